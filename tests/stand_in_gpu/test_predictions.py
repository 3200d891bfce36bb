"""Predictions on a machine with GPUs do not use them, and are for the right one."""

import json

import pytest

from tests.stand_in_gpu.machine import SMALL_MODEL

SIZES = (*SMALL_MODEL[:10], "--json", "--quiet")
PREDICT = ("-m", "autotune", "predict", *SIZES)


def contexts(machine):
    return (
        [line for line in machine.log.read_text().splitlines() if "context" in line]
        if machine.log.exists()
        else []
    )


def predicted(machine, *arguments, **settings):
    ended = machine.run(*PREDICT, *arguments, **settings)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def test_no_prediction_creates_a_context(machine):
    """For a whole search space, several at once, for the device that the command detects."""
    space = machine.folder / "space.toml"
    space.write_text(
        '[techniques]\ncheckpointing = ["none", "block"]\n[defaults]\nmicro_batch_size = 4\n'
    )
    answer = predicted(machine, "--space", str(space))
    assert [prediction["device"] for prediction in answer["predictions"]] == ["cuda", "cuda"]
    assert contexts(machine) == []


@pytest.mark.parametrize(
    ("cc", "capability", "workspace_mib"), [(89, "8.9", 8.125), (90, "9.0", 32)]
)
def test_a_prediction_is_for_the_present_gpu(machine, cc, capability, workspace_mib):
    answer = predicted(machine, "--torch", "2.11", "--allocator", "expandable", cc=cc)
    assert f"for a GPU of compute capability {capability} with torch 2.11" in answer["notes"]
    assert answer["bytes_by_category"]["workspace"] == 2 * workspace_mib * 1024**2
