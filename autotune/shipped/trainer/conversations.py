"""Samples for Trainer whose labels are the answers in conversations."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor

from autotune.shipped.chat_template import ChatTemplate, Message, labelled_tokens, tools_of
from autotune.shipped.labels import IGNORED_LABEL
from autotune.shipped.token_encoding import Tokens, read_token_of


def answered_conversations(
    rows: Iterable[Any],
    tokenizer: Any,
    messages_in: Callable[[Any], list[Message]],
    *,
    learns_all: bool = False,
) -> Iterator[Tokens]:
    """Yields the tokens of each conversation, with -2 - token for those that are not learned.

    `messages_in` returns the messages of a row, none for one that is left out.
    """
    template = ChatTemplate(
        text=tokenizer.get_chat_template(), special_tokens=tokenizer.special_tokens_map
    )
    for row in rows:
        messages = messages_in(row)
        if not messages:
            continue
        text, answers = template.with_answers(messages, tools=tools_of(row.get("tools")))
        if learns_all:
            answers = [(0, len(text))]
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        tokens = numpy.array(encoded["input_ids"], dtype=numpy.int64)
        yield labelled_tokens(tokens, encoded["offset_mapping"], answers)


def packed_conversations(conversations: Iterable[Tokens], length: int) -> list[dict[str, Any]]:
    """Returns sequences of `length` tokens, cut from one stream of all conversations.

    Those without an answer are left out, and tokens at the end that do not fill a sequence.
    """
    stream = torch.cat([torch.from_numpy(tokens) for tokens in conversations])
    rows = stream[: len(stream) // length * length].view(-1, length)
    return [_learned_sample(row, length) for row in rows if (row[1:] >= 0).any()]


def padded_conversations(conversations: Iterable[Tokens], length: int) -> list[dict[str, Any]]:
    """Returns the first `length` tokens of each conversation, padded, if an answer is in them."""
    rows = [torch.from_numpy(tokens[:length]) for tokens in conversations]
    return [_learned_sample(row, length) for row in rows if (row[1:] >= 0).any()]


def _learned_sample(row: Tensor, length: int) -> dict[str, Any]:
    """Returns a sample for Trainer of tokens in which -2 - token stands for what is no label."""
    # The first token is not predicted; some versions would count its label in the mean.
    labels = F.pad(row[1:], (1, length - len(row)), value=IGNORED_LABEL)
    tokens = torch.where(row < 0, read_token_of(row), row)
    return {
        "input_ids": F.pad(tokens, (0, length - len(row))),
        "labels": labels.masked_fill(labels < 0, IGNORED_LABEL),
    }
