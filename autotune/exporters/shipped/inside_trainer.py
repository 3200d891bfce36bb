"""Definitions that exports copy into `autotune_trainer.py`. Nothing here runs inside autotune.

The techniques change classes and methods of the model, not its modules, so that a saved checkpoint
has the same names as without them.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import CausalLMOutputWithPast

from autotune.data.chat_template import ChatTemplate, conversation_of, labelled_tokens, tools_of
from autotune.data.token_file import Tokens, read_token_of
from autotune.spec.config import segment_bounds

IGNORED_LABEL = -100


def set_weights_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """Casts the floating-point parameters, not buffers such as the frequencies of positions."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


@functools.cache
def checkpointed_class(
    kind: type[nn.Module], context_fn: Callable[[], Any] | None = None
) -> type[nn.Module]:
    """Returns a subclass of `kind` whose forward is recomputed in the backward pass."""
    options: dict[str, Any] = {} if context_fn is None else {"context_fn": context_fn}

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(
            functools.partial(kind.forward, self), *args, use_reentrant=False, **options, **kwargs
        )

    return type(kind.__name__, (kind,), {"forward": functools.wraps(kind.forward)(forward)})


def checkpoint_segments(blocks: Sequence[nn.Module], *, compiled: bool) -> None:
    """Recomputes the blocks in about sqrt(blocks) segments; the first block of each runs them all.

    All blocks must take the same arguments, and return their output or a tuple with their output
    first.
    """
    kind = type(blocks[0])
    run = torch.compile(kind.forward, dynamic=False) if compiled else kind.forward
    bounds = segment_bounds(len(blocks))
    leading, following = _segment_classes(kind, run)
    for start, end in itertools.pairwise(bounds):
        for block in blocks[start:end]:
            block.__class__ = following
        blocks[start].__class__ = leading
        # A tuple, because a list of modules would register them a second time.
        blocks[start].segment = tuple(blocks[start:end])  # type: ignore[assignment]


def _segment_classes(
    kind: type[nn.Module], run: Callable[..., Any]
) -> tuple[type[nn.Module], type[nn.Module]]:
    """Returns the class of the first block of a segment and the class of the others.

    The first runs all blocks of the segment; the others return their input.
    """

    def run_segment(self: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        output: Any = hidden
        for block in self.segment:
            output = run(block, output[0] if isinstance(output, tuple) else output, *args, **kwargs)
        return output

    def lead(self: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        output = checkpoint(run_segment, self, hidden, *args, use_reentrant=False, **kwargs)
        for block in self.segment:
            block.returns_tuple = isinstance(output, tuple)
        return output

    def follow(self: Any, hidden: Tensor, *_args: Any, **_kwargs: Any) -> Any:
        return (hidden,) if self.returns_tuple else hidden

    return (
        type(kind.__name__, (kind,), {"forward": functools.wraps(kind.forward)(lead)}),
        type(kind.__name__, (kind,), {"forward": functools.wraps(kind.forward)(follow)}),
    )


def use_chunked_loss(model: Any, token_loss: Callable[[Tensor, nn.Linear, Tensor], Tensor]) -> None:
    """Makes `model(..., labels=...)` compute its loss by `token_loss` and return no logits.

    Without labels the model behaves as before. `token_loss` returns the summed loss of the tokens.
    """
    inner = model.forward

    @functools.wraps(inner)
    def forward(
        *args: Any, labels: Tensor | None = None, num_items_in_batch: Any = None, **kwargs: Any
    ) -> CausalLMOutputWithPast:
        if labels is None:
            return inner(*args, **kwargs)
        following = kwargs.pop("shift_labels", None)
        if following is None:
            following = F.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)
        hidden = model.base_model(*args, **kwargs)[0]
        total = token_loss(hidden, model.get_output_embeddings(), following)
        tokens = (
            (following != IGNORED_LABEL).sum() if num_items_in_batch is None else num_items_in_batch
        )
        return CausalLMOutputWithPast(loss=total / tokens)

    model.forward = forward


def learning_rate_factor(step: int, *, steps: int, warmup_steps: int, schedule: str) -> float:
    """Returns the factor of the learning rate at a step, counted from 0.

    A linear warm-up is followed by a constant rate or by a cosine down to a tenth.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "constant":
        return 1.0
    progress = (step - warmup_steps) / max(1, steps - warmup_steps)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))


def packed_sequences(
    texts: Iterable[str], encode: Callable[[str], Sequence[int]], length: int
) -> list[dict[str, Any]]:
    """Returns sequences of `length` tokens, cut from one stream of all texts.

    Tokens at the end of the stream that do not fill a sequence are dropped.
    """
    stream = torch.tensor([token for text in texts for token in encode(text)])
    rows = stream[: len(stream) // length * length].view(-1, length)
    # The first token is not predicted; some versions would count its label in the mean.
    return [
        {"input_ids": row, "labels": F.pad(row[1:], (1, 0), value=IGNORED_LABEL)} for row in rows
    ]


def padded_sequences(
    texts: Iterable[str], encode: Callable[[str], Sequence[int]], length: int
) -> list[dict[str, Any]]:
    """Returns the first `length` tokens of each text, padded; padding has no labels."""
    rows = [torch.tensor(encode(text)[:length]) for text in texts]
    return [
        {
            "input_ids": F.pad(row, (0, length - len(row))),
            "labels": F.pad(row[1:], (1, length - len(row)), value=IGNORED_LABEL),
        }
        for row in rows
        if len(row) > 1  # a single token has no label
    ]


def answered_conversations(rows: Iterable[Any], tokenizer: Any, column: str) -> Iterator[Tokens]:
    """Yields the tokens of each conversation, with -2 - token for those that are not answers."""
    template = ChatTemplate(
        text=tokenizer.get_chat_template(), special_tokens=tokenizer.special_tokens_map
    )
    for row in rows:
        messages = conversation_of(row[column])
        text, answers = template.with_answers(messages, tools=tools_of(row.get("tools")))
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


def keep_causal_flag() -> None:
    """Makes transformers use the causal flag of the attention kernels in compiled code as well.

    It would make a mask there instead, and flash attention takes no mask.
    """
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    def mask(
        *,
        q_length: int,
        kv_length: int,
        local_size: int | None = None,
        attention_mask: Any = None,
        **options: Any,
    ) -> Any:
        is_long = local_size is not None and kv_length >= local_size
        is_plain = attention_mask is None and options.get("allow_is_causal_skip", True)
        if is_plain and q_length == kv_length and not is_long:
            return None
        return sdpa_mask(
            q_length=q_length,
            kv_length=kv_length,
            local_size=local_size,
            attention_mask=attention_mask,
            **options,
        )

    AttentionMaskInterface.register("sdpa", mask)
