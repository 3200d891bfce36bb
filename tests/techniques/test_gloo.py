"""Collectives of gloo, whose threads hold on to tensors."""

import sys
import threading

import pytest
import torch

from autotune.shipped import gloo
from tests.building.gloo_ranks import on_ranks


def test_a_collective_ends_when_its_tensors_are_its_callers_alone():
    tensor = torch.zeros(1)
    before = sys.getrefcount(tensor)
    has_reference, may_go_on = threading.Event(), threading.Event()

    def hold_python_object(_held):
        has_reference.set()
        may_go_on.wait(timeout=60)

    with gloo._held_by_caller([tensor]):
        thread = threading.Thread(target=hold_python_object, args=(tensor,))
        thread.start()
        has_reference.wait(timeout=60)
        threading.Timer(0.1, may_go_on.set).start()
    assert sys.getrefcount(tensor) == before
    thread.join()


def sums_in_compiled_code(rank):
    """Returns what an operator of compiled code gives, and how many collectives go on after it."""
    import torch.distributed
    from torch._C import _distributed_c10d

    from autotune.techniques.gloo_compiled import use_gloo_in_compiled_code

    use_gloo_in_compiled_code()
    name = torch.distributed.group.WORLD.group_name
    operators = torch.ops._c10d_functional
    tensor = torch.full((2,), rank + 1.0)
    total = operators.all_reduce(tensor, "sum", name).tolist()
    gathered = operators.all_gather_into_tensor(tensor, 2, name).tolist()
    operators.all_reduce_(tensor, "sum", name)
    return total, gathered, tensor.tolist(), _distributed_c10d._get_work_registry_size()


@pytest.mark.slow
def test_an_operator_of_compiled_code_ends_its_collective():
    expected = ([3.0, 3.0], [1.0, 1.0, 2.0, 2.0], [3.0, 3.0], 0)
    assert on_ranks(2, sums_in_compiled_code) == [expected, expected]
