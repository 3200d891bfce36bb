"""Collectives of gloo, whose threads hold on to tensors."""

import sys
import threading

import torch

from autotune.techniques import gloo


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
