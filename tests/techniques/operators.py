"""Counts the operators that really run, to test what a technique does."""

from collections import Counter

from torch.utils._python_dispatch import TorchDispatchMode


class OperatorCount(TorchDispatchMode):
    """`count["mm"]` is how often aten.mm ran inside the block, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def operators_in_a_step(trainer) -> Counter[str]:
    batch = next(trainer.batches())
    trainer.step(0, batch)  # optimizer state exists from here on
    with OperatorCount() as counted:
        trainer.step(1, batch)
    return counted.count
