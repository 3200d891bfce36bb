"""Measures what it takes to choose, for each operator of a block, whether its result is kept.

Also how fast a pointwise operator runs whose result is written to memory that was not used before.

    OMP_NUM_THREADS=1 python studies/activation_budget/choosing.py

Products of matrices of 4 x 4 numbers, of which every second is kept: hardly any time is computed.
"""

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from autotune.shipped.selective import contexts_keeping

PRODUCTS = 40
ROUNDS = 300
WEIGHT = torch.randn(4, 4, requires_grad=True)
KEPT = contexts_keeping(frozenset(("aten.mm", number) for number in range(0, PRODUCTS, 2)))


def products(hidden: Tensor) -> Tensor:
    for _ in range(PRODUCTS):
        hidden = hidden @ WEIGHT
    return hidden


def microseconds(run: Callable[[Tensor], Tensor]) -> float:
    """Returns the CPU time of a product, forward and backward."""
    hidden = torch.randn(4, 4, requires_grad=True)
    began = time.process_time()
    run(hidden).sum().backward()
    return 1e6 * (time.process_time() - began) / PRODUCTS


def bytes_per_second(*, results: int) -> float:
    """Returns the bytes that products of two numbers read and write, if so many results stay."""
    numbers, kept = torch.randn(1024, 256), []
    began = time.process_time()
    for number in range(24):
        kept = kept[-results:] if number else []
        kept.append(numbers * numbers)
    return 24 * 2 * numbers.nbytes / (time.process_time() - began)


if __name__ == "__main__":
    recompute = partial(checkpoint, products, use_reentrant=False)
    forms: dict[str, Callable[[Tensor], Tensor]] = {
        "without checkpointing": products,
        "recomputed": recompute,
        "half kept, by contexts of torch": partial(recompute, context_fn=KEPT),
        "half kept, by ours": partial(recompute, context_fn=KEPT.in_eager),  # type: ignore[attr-defined]
    }
    rounds = [[microseconds(run) for run in forms.values()] for _ in range(ROUNDS)]
    for name, times in zip(forms, zip(*rounds, strict=True), strict=True):
        print(f"{name}: {min(times):.1f} µs for each product at the least")
    for results in (1, 24):
        rate = max(bytes_per_second(results=results) for _ in range(40))
        print(f"pointwise, {results} results of 1 MiB stay: {rate / 1e9:.1f} GB/s at the most")
