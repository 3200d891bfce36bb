"""Code that goes into `autotune_trainer.py`, definition by definition.

Nothing here runs inside autotune.

Techniques that stand inside the model change classes and methods, not modules: a checkpoint that is
saved has the names that it has without them.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import CausalLMOutputWithPast

IGNORED_LABEL = -100


def set_weights_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """Of floating-point parameters; buffers, such as the frequencies of positions, stay as they are."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


@functools.cache
def checkpointed_class(
    kind: type[nn.Module], context_fn: Callable[[], Any] | None = None
) -> type[nn.Module]:
    """`kind`, with its forward recomputed in the backward pass."""
    options: dict[str, Any] = {} if context_fn is None else {"context_fn": context_fn}

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(
            functools.partial(kind.forward, self), *args, use_reentrant=False, **options, **kwargs
        )

    return type(kind.__name__, (kind,), {"forward": functools.wraps(kind.forward)(forward)})


def checkpoint_segments(blocks: Sequence[nn.Module], *, compiled: bool) -> None:
    """Recomputes consecutive blocks in about sqrt(blocks) segments: the first of each runs them all.

    The blocks must be called alike, and return their output or a tuple with their output first.
    """
    kind, segments = type(blocks[0]), round(math.sqrt(len(blocks)))
    run = torch.compile(kind.forward, dynamic=False) if compiled else kind.forward
    bounds = [round(index * len(blocks) / segments) for index in range(segments + 1)]
    leading, following = _segment_classes(kind, run)
    for start, end in itertools.pairwise(bounds):
        for block in blocks[start:end]:
            block.__class__ = following
        blocks[start].__class__ = leading
        blocks[start].segment = tuple(blocks[start:end])  # type: ignore[assignment]  # a tuple registers no modules


def _segment_classes(
    kind: type[nn.Module], run: Callable[..., Any]
) -> tuple[type[nn.Module], type[nn.Module]]:
    """Of the first block of a segment, which runs them all, and of the others, which hand on what they are given."""

    def run_segment(self: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        output: Any = hidden
        for block in self.segment:
            output = run(block, output[0] if isinstance(output, tuple) else output, *args, **kwargs)
        return output

    def lead(self: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        output = checkpoint(run_segment, self, hidden, *args, use_reentrant=False, **kwargs)
        for block in self.segment:
            block.hands_on_a_tuple = isinstance(output, tuple)
        return output

    def follow(self: Any, hidden: Tensor, *_args: Any, **_kwargs: Any) -> Any:
        return (hidden,) if self.hands_on_a_tuple else hidden

    return (
        type(kind.__name__, (kind,), {"forward": functools.wraps(kind.forward)(lead)}),
        type(kind.__name__, (kind,), {"forward": functools.wraps(kind.forward)(follow)}),
    )


def lose_in_chunks(model: Any, token_loss: Callable[[Tensor, nn.Linear, Tensor], Tensor]) -> None:
    """`model(..., labels=...)` makes its loss by `token_loss`, and no logits; without labels it is what it was."""
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


def share_of_rate(step: int, *, steps: int, warmup_steps: int, schedule: str) -> float:
    """Of the learning rate at a step, counted from 0: a linear rise, then constant or a cosine down to a tenth."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "constant":
        return 1.0
    done = (step - warmup_steps) / max(1, steps - warmup_steps)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


def packed_sequences(
    texts: Iterable[str], encode: Callable[[str], Sequence[int]], length: int
) -> list[dict[str, Any]]:
    """Sequences of `length` tokens, cut from one stream of all texts; the beginning of one more is left out."""
    stream = torch.tensor([token for text in texts for token in encode(text)])
    rows = stream[: len(stream) // length * length].view(-1, length)
    # What stands first follows nothing: some versions would count it in the mean.
    return [
        {"input_ids": row, "labels": F.pad(row[1:], (1, 0), value=IGNORED_LABEL)} for row in rows
    ]


def padded_sequences(
    texts: Iterable[str], encode: Callable[[str], Sequence[int]], length: int
) -> list[dict[str, Any]]:
    """The beginning of each text, `length` tokens at most; what is behind a text's end is no label."""
    rows = [torch.tensor(encode(text)[:length]) for text in texts]
    return [
        {
            "input_ids": F.pad(row, (0, length - len(row))),
            "labels": F.pad(row[1:], (1, length - len(row)), value=IGNORED_LABEL),
        }
        for row in rows
        if len(row) > 1  # without a label it teaches nothing
    ]


def keep_causal_flag() -> None:
    """Compiled, transformers makes a mask of what a kernel's causal flag says, and flash attention takes no mask."""
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
