"""An exported configuration trains with DeepSpeed as in the trial."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("deepspeed", reason="deepspeed is not installed")
pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="DeepSpeed's processes are those of Linux"
)
ROOT = Path(__file__).parents[2]
STEPS = 3
CASES = (
    *("fp32", "bf16-mixed", "bf16-true", "fp16-mixed", "sgd", "adafactor"),
    *("padded in 1", "padded in 4", "chat in 1", "chat in 4"),
)


@pytest.fixture(scope="module")
def runs():
    """Run all cases in one process: DeepSpeed's process groups are global, its import is slow."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    done = subprocess.run(
        [sys.executable, "-m", "tests.exporters.deepspeed_training", port],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", CASES)
def test_deepspeed_arrives_at_the_weights_of_the_trial(runs, case):
    assert runs[case]["steps"] == STEPS
    assert runs[case]["distance"] < 1e-5


def test_another_precision_would_have_been_seen(runs):
    assert runs["control"] > 1e-3


def test_mixed_precision_has_weights_and_state_in_float32(runs):
    assert (runs["bf16-mixed"]["weights"], runs["bf16-mixed"]["state"]) == (
        "torch.float32",
        ["torch.float32"],
    )


def test_pure_bf16_has_no_float32_copy_anywhere(runs):
    assert (runs["bf16-true"]["weights"], runs["bf16-true"]["state"]) == (
        "torch.bfloat16",
        ["torch.bfloat16"],
    )


def test_the_optimizer_is_torchs_own_with_the_exported_fusion(runs):
    flags = {
        name: (runs[name]["optimizer"], *runs[name]["flags"])
        for name in ("fp32", "bf16-mixed", "bf16-true")
    }
    assert flags == {
        "fp32": ("AdamW", False, True),
        "bf16-mixed": ("AdamW", False, False),
        "bf16-true": ("AdamW", True, False),
    }


def test_the_rate_rises_from_the_first_step_on(runs):
    assert runs["fp32"]["rates"] == pytest.approx([0.0005, 0.0010, 0.0015])
