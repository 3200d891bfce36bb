"""torch's allocation history on CUDA, read from handwritten entries in its format."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from autotune.memory.attribution import bytes_by_category, find_peak
from autotune.memory.cpu import CpuMeter
from autotune.memory.history import StepHistory, changes_of, read_changes

PHASES = [("forward", 10, 20), ("backward", 21, 30), ("step", 31, 40)]


def entry(action, address, size, at, **fields):
    return {"action": action, "addr": address, "size": size, "time_us": at, **fields}


def recording_of(*entries, gradients=(), resident=None):
    return read_changes(
        changes_of(entries),
        resident=resident or {"parameters": [(90_000, 100)]},
        phases=PHASES,
        gradients=gradients,
    )


STEP = (
    entry("segment_alloc", 0, 4096, 1),
    entry("alloc", 1000, 50, 12),
    entry("alloc", 2000, 30, 13),
    entry("free_requested", 2000, 30, 14),
    entry("free_completed", 2000, 30, 14),
    entry("alloc", 3000, 40, 22),
    entry("free_requested", 1000, 50, 23),
    entry("free_requested", 3000, 40, 33),
)


def test_the_peak_counts_resident_and_allocated_blocks():
    assert find_peak(recording_of(*STEP)).size_bytes == 100 + 50 + 40


def test_the_phase_of_the_peak_is_known_by_its_time():
    assert find_peak(recording_of(*STEP)).phase == "backward"


def test_what_outlives_forward_is_an_activation_and_what_an_optimizer_took_a_gradient():
    peak = find_peak(recording_of(*STEP, gradients=[(3000, 32)]))
    sizes = bytes_by_category(peak.blocks)
    assert (sizes["parameters"], sizes["activations"], sizes["gradients"]) == (100, 50, 40)


def test_an_address_used_again_is_another_block():
    again = entry("alloc", 3000, 5, 35)
    recording = recording_of(*STEP, again, gradients=[(3000, 32)])
    assert [block.is_gradient for sign, block in recording.events if sign > 0] == [
        False,
        False,
        True,
        False,
    ]


def test_blocks_from_before_the_trace_count_until_they_are_freed():
    peak = find_peak(recording_of(entry("free_requested", 7, 9, 12), entry("alloc", 8, 5, 13)))
    assert peak.size_bytes == 100 + 9
    assert bytes_by_category(peak.blocks)["inputs"] == 9


def test_state_that_a_step_replaces_counts_once_and_as_state():
    """Both are alive for a moment: the new one is allocated before the old one is freed."""
    recording = recording_of(
        entry("alloc", 5000, 60, 32),
        entry("free_requested", 4000, 60, 33),
        resident={"parameters": [(90_000, 100)], "optimizer_state": [(5000, 60)]},
    )
    peak = find_peak(recording)
    assert peak.size_bytes == 100 + 60 + 60
    assert bytes_by_category(peak.blocks)["optimizer_state"] == 120


def test_a_block_is_named_by_its_innermost_frame():
    frames = [{"name": "forward", "filename": "/somewhere/model.py", "line": 7}, {"name": "step"}]
    recording = recording_of(entry("alloc", 1, 1, 12, frames=frames))
    assert recording.events[0][1].operator == "forward (model.py:7)"


OF_FSDP2 = "torch/distributed/fsdp/_fully_shard"


@pytest.mark.parametrize(
    ("names", "category"),
    [
        (["alloc_storage", "unshard"], "gathered_weights"),
        (["allocate", "foreach_all_gather"], "gathered_weights"),
        (["allocate", "foreach_reduce"], "activations"),
        (["_get_param_all_gather_inputs", "foreach_all_gather"], "activations"),
    ],
    ids=["a weight", "a block on its way", "gradients", "a part in 16 bits"],
)
def test_memory_that_fsdp2_allocates_for_gathered_weights_is_of_their_category(names, category):
    frames = [{"name": name, "filename": f"{OF_FSDP2}/_fsdp_param.py"} for name in names]
    recording = recording_of(entry("alloc", 1, 5, 12, frames=frames))
    assert recording.events[0][1].category == category


@pytest.mark.gpu
def test_a_checkpoint_that_stops_early_can_be_recorded(tmp_path):
    """The exception by which it stops passes through code that frees blocks."""
    device = torch.device("cuda:0")
    head = nn.Linear(64, 256, bias=False, device=device, dtype=torch.bfloat16)
    hidden = torch.randn(8, 256, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.zeros(8 * 256, device=device, dtype=torch.int64)

    def loss_of(hidden):
        return F.cross_entropy(head(hidden).flatten(0, 1).float(), labels, reduction="sum")

    history = StepHistory(marker=CpuMeter())
    with history.recorded(device, snapshot_file=tmp_path / "snapshot.pickle"):
        for _ in range(20):
            checkpoint(loss_of, hidden, use_reentrant=False, preserve_rng_state=False).backward()
    actions = [entry["action"] for entry in history.trace]
    assert actions.count("alloc") > 20
    assert actions.count("free_requested") > 20
    assert "loss_of" in {
        frame["name"] for entry in history.trace for frame in entry.get("frames", ())
    }
