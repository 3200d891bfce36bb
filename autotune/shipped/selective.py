"""What the values of checkpointing that choose by operator store: the rest is recomputed."""

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import (
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)

_aten = torch.ops.aten
_MATRIX_PRODUCTS = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
        _aten._grouped_mm.default,
        _aten._scaled_mm.default,
    }
)
_ATTENTION = frozenset(
    {
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_fused_attention_overrideable.default,
        torch.ops.higher_order.flex_attention,
    }
)
ATTENTION = "attention"
_OF_ATTENTION = ("flash_attn", "torch_attn")
"""Parts of the namespaces of the operators of packages: `flash_attn`, `flash_attn_3`, torch's
attention of sequences that are packed, and kernels of the hub."""
_DROPOUT = ("dropout_p", "p_dropout")
"""Names that kernels of attention have for the share of what they drop."""


def selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(_keep_matrix_products)


def attention_contexts() -> Any:
    """Returns the contexts of `save-attention`, which keeps what attention kernels compute.

    Attention in single operators is recomputed: to keep its last product saves only this product,
    since the backward pass needs the softmax before it anyway.
    """
    return create_selective_checkpoint_contexts(_keep_attention)


def _keep_attention(_context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if operator_name(operator) == ATTENTION and not draws(operator, args, kwargs):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def draws(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Returns whether an operator draws random numbers, as dropout does.

    It must run again with the others: those after it would draw its numbers instead of theirs.
    """
    shares = [value for name, value in arguments_of(operator, args, kwargs) if name in _DROPOUT]
    if operator_name(operator) == ATTENTION:
        return any(shares)
    return torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ())


def arguments_of(
    operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Yields name and value of the arguments of an operator that declares its arguments."""
    schema = getattr(operator, "_schema", None)
    for number, declared in enumerate(schema.arguments if schema is not None else ()):
        value = args[number] if number < len(args) else kwargs.get(declared.name)
        yield declared.name, value


@functools.cache
def operator_name(operator: Any) -> str:
    """Returns `aten.mm` for any overload of it, and one name for all kernels of attention.

    Which of them runs depends on the device.
    """
    is_of_package = any(part in getattr(operator, "namespace", "") for part in _OF_ATTENTION)
    if operator in _ATTENTION or is_of_package:
        return ATTENTION
    return str(getattr(operator, "overloadpacket", operator)).replace("::", ".")


def _keep_matrix_products(
    context: Any, operator: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    if operator in _MATRIX_PRODUCTS:
        return CheckpointPolicy.MUST_SAVE
    return _keep_attention(context, operator, *args, **kwargs)


def alternating_contexts() -> Any:
    """Returns the contexts of `selective-2`, which keeps the first, third, ... matrix product.

    It is what torchtitan does (torchtitan/distributed/activation_checkpoint.py).
    """
    products: Counter[bool] = Counter()

    def keep_every_second(context: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
        if operator in _MATRIX_PRODUCTS:
            products[context.is_recompute] += 1
            if products[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return _keep_matrix_products(context, operator, *args, **kwargs)

    return create_selective_checkpoint_contexts(keep_every_second)


@functools.cache
def contexts_keeping(kept: frozenset[tuple[str, int]]) -> Callable[[], Any]:
    """Returns what makes contexts that keep the results of these calls of operators.

    An operator is named as `operator_name` does, with the number of its call in the region, from 0
    on. For equal sets it is the same function. It makes those of torch, which compiled code needs;
    its `in_eager` makes those of `_Keeping`, which take a fraction of the time.
    """
    numbers: defaultdict[str, set[int]] = defaultdict(set)
    for name, number in kept:
        numbers[name].add(number)

    def contexts() -> Any:
        calls: Counter[tuple[bool, str]] = Counter()

        def keep(context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
            name = operator_name(operator)
            number = calls[context.is_recompute, name]
            calls[context.is_recompute, name] += 1
            is_kept = number in numbers.get(name, ())
            return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(keep)

    def in_eager() -> Any:
        results: dict[tuple[str, int], Any] = {}
        return _Keeping(numbers, results), _Returning(numbers, results)

    contexts.in_eager = in_eager  # type: ignore[attr-defined]
    return contexts


class _OfCalls(TorchDispatchMode):
    """Sees the calls of operators some of whose results are kept; the others run as they are."""

    supports_higher_order_operators = True

    def __init__(
        self, numbers: Mapping[str, Container[int]], results: dict[tuple[str, int], Any]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._numbers = numbers
        self._results = results
        self._calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = operator_name(func)
        if name not in self._numbers:
            return func(*args, **(kwargs or {}))
        number = self._calls[name]
        self._calls[name] += 1
        if number not in self._numbers[name]:
            return func(*args, **(kwargs or {}))
        return self.of_kept((name, number), func, args, kwargs or {})

    def of_kept(self, call: tuple[str, int], func: Any, args: Any, kwargs: Any) -> Any:
        """Returns the result of a call whose result is kept."""
        raise NotImplementedError


class _Keeping(_OfCalls):
    """Keeps the results in the forward pass."""

    def of_kept(self, call: tuple[str, int], func: Any, args: Any, kwargs: Any) -> Any:
        output = func(*args, **kwargs)
        is_tensor = isinstance(output, Tensor)
        self._results[call] = _Unchanged(output) if is_tensor else tree_map(_Unchanged, output)
        return output


class _Returning(_OfCalls):
    """Returns them where the forward pass runs again."""

    def __enter__(self) -> Any:
        self._calls.clear()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def of_kept(self, call: tuple[str, int], func: Any, args: Any, kwargs: Any) -> Any:
        if call not in self._results:
            raise RuntimeError(
                f"{func} encountered during backward but not found in storage: a graph can go "
                "backward once, and must run the same operators again"
            )
        kept = self._results.pop(call)
        return kept.value() if isinstance(kept, _Unchanged) else tree_map(_Unchanged.value, kept)


class _Unchanged:
    """A result of an operator, which nothing may change in place until it is used again."""

    def __init__(self, result: Any) -> None:
        if isinstance(result, Tensor):
            # Views share the count of changes, and have no graph, which this would keep.
            with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
                result = result.detach()
        self._result = result
        self._version = result._version if isinstance(result, Tensor) else 0

    def value(self) -> Any:
        if isinstance(self._result, Tensor) and self._result._version != self._version:
            raise RuntimeError("a result that was kept for the backward pass was changed in place")
        return self._result
