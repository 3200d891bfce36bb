"""What an exported training says of its first steps, beside the numbers and facts of its trial."""

import dataclasses
import itertools
import sys
import time

import pytest
import torch
from torch import nn

from autotune.exporters import TARGETS
from autotune.exporters.bundle import shipped_text
from autotune.exporters.promise import OF_TRAINER, promised
from autotune.shipped.device_name import device_name
from autotune.shipped.peak_memory import PeakMemory
from autotune.shipped.promise import COMPARED_UP_TO, FIRST_COMPARED, Promise
from autotune.spec.config import TrainingConfig
from tests.exporters.readers.hugging_face import imported
from tests.exporters.recipes import recipe
from tests.exporters.test_transformers_export import exported, trainer_of

SECONDS = 0.5
"""Of a step, by the clock of the tests, without those for its data."""
TRIAL = {
    "trial": "study tour, trial 12, on cpu",
    "peak_memory_bytes": 2**20,
    "tokens_per_second": 64 / SECONDS,
    "device": device_name("cpu"),
    "devices": 1,
    "micro_batch_size": 4,
    "sequence_length": 16,
    "accumulation_steps": 1,
    "share_of_tokens": 1.0,
    "versions": {"torch": torch.__version__},
}


@pytest.fixture
def compared(monkeypatch, capsys):
    """compared(rows=8, trial={...}) makes steps of such a batch, and returns what is said."""

    def run(
        *, trial=None, steps=COMPARED_UP_TO, peak=2**20, rows=4, length=16, tokens=None, data=0.0
    ):
        now = [0.0]
        monkeypatch.setattr(time, "perf_counter", lambda: now[0])
        monkeypatch.setattr(time, "process_time", lambda: now[0])
        memory = PeakMemory("cpu")
        memory.bytes = peak
        promise = Promise({**TRIAL, **(trial or {})}, device_type="cpu", peak=memory)
        for _ in range(steps):
            now[0] += data
            promise.step_begins()
            promise.saw(tokens or rows * length, rows=rows, length=length)
            now[0] += SECONDS
            promise.step_ended()
        promise.ends()
        return capsys.readouterr().err.strip()

    return run


def test_a_training_that_keeps_the_promise_is_told_so_in_three_lines(compared):
    assert compared().splitlines() == [
        "autotune: 20 steps beside study tour, trial 12, on cpu",
        "  peak memory 1.00 MiB, promised 1.00 MiB",
        "  128 tokens/s, promised 128",
    ]


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"rows": 8}, "8 sequences in a forward pass (4 in the trial)"),
        ({"length": 32}, "sequences of 32 tokens (16 in the trial)"),
        (
            {"trial": {"versions": {"torch": "1.0"}}},
            f"torch {torch.__version__} (1.0 in the trial)",
        ),
        ({"trial": {"device": "an abacus"}}, "(an abacus in the trial)"),
        ({"trial": {"devices": 2}}, "a number of devices of 1 (2 in the trial)"),
        ({"trial": {"not_expressed": ["loss chunked (full in the trial)"]}}, "loss chunked"),
    ],
)
def test_a_number_that_is_off_is_explained_by_what_differs_from_the_trial(compared, changes, cause):
    _, memory, speed = compared(peak=2**21, **{"tokens": 32, **changes}).splitlines()
    for line, how in ((memory, "100 % more"), (speed, "50 % slower")):
        assert f": {how}, likely because of " in line
        assert cause in line


def test_what_differs_is_no_cause_of_the_opposite(compared):
    _, memory, _ = compared(peak=2**19, length=32).splitlines()
    assert "50 % less, and nothing that this process knows differs" in memory


def test_where_nothing_differs_it_says_how_to_find_out(compared):
    _, memory, speed = compared(peak=2**21, trial={"tokens_per_second": 256.0}).splitlines()
    assert "nothing that this process knows differs from the trial" in memory
    assert "`autotune explain`" in memory
    assert "nothing that this process knows differs from the trial" in speed
    assert "`autotune profile`" in speed


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"data": SECONDS}, "50 % of the time between steps (data and logging)"),
        ({"tokens": 32}, "50 % of all places being no padding (100 % in the trial)"),
        (
            {"tokens": 32, "trial": {"tokens_per_second_spread": 100.0}},
            "disturbed steps, whose speed varied by 0 % here, 78 % in the trial",
        ),
    ],
)
def test_a_slow_training_is_explained_by_what_takes_its_time(compared, changes, cause):
    *_, speed = compared(**changes).splitlines()
    assert "50 % slower, likely because of " in speed
    assert cause in speed


def test_a_training_that_ends_early_promises_no_speed(compared):
    said = compared(steps=3)
    assert "3 steps beside" in said
    assert "peak memory is not measured here" in said
    assert "too few steps for a speed" in said


def test_it_is_said_once_and_only_by_the_first_process_that_wants_it(capsys, monkeypatch):
    def end(**options):
        promise = Promise({"trial": "t"}, device_type="cpu", **options)
        for _ in range(2 * COMPARED_UP_TO):
            promise.step_begins()
            promise.step_ended(1)
        return capsys.readouterr().err.count("beside")

    assert end() == 1
    assert end(is_first=False) == 0
    monkeypatch.setenv("AUTOTUNE_PROMISE", "0")
    assert end() == 0


def test_an_error_in_it_ends_the_comparison_and_not_the_training(capsys):
    promise = Promise({}, device_type="cpu")
    for _ in range(2 * COMPARED_UP_TO):
        promise.step_begins("no model")
        promise.step_ended(1)
    said = capsys.readouterr().err
    assert said.count("this training is not compared with its trial: AttributeError") == 1


def test_an_error_within_the_recorded_step_ends_the_recording(capsys):
    promise = Promise(TRIAL, device_type="cpu")
    model = nn.Linear(2, 2)
    for step in range(FIRST_COMPARED):
        promise.step_begins(model)
        is_recorded = torch._C._autograd._profiler_enabled()
        promise.saw(1, rows=4, length=16 if step < FIRST_COMPARED - 1 else None)
        promise.step_ended()
    assert (is_recorded, torch._C._autograd._profiler_enabled()) == (True, False)
    assert "this training is not compared" in capsys.readouterr().err


def test_on_a_gpu_time_is_that_of_the_device_and_the_peak_counts_from_the_first_timed_step(
    monkeypatch, capsys
):
    """By a stand-in for torch.cuda: each event is a quarter of a step after the one before."""
    times = itertools.count(step=250.0)

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = next(times)

        def elapsed_time(self, later):
            return later.at - self.at

    resets, steps = [], itertools.count()
    cuda = {
        "Event": Event,
        "synchronize": lambda: None,
        "get_device_name": lambda: "a card",
        "max_memory_allocated": lambda: 2**21,
        "reset_peak_memory_stats": lambda: resets.append(next(steps)),
    }
    for name, value in cuda.items():
        monkeypatch.setattr(torch.cuda, name, value)
    promise = Promise({**TRIAL, "device": "a card"}, device_type="cuda")
    model = nn.Linear(2, 2)
    for _ in range(COMPARED_UP_TO):
        promise.step_begins(model, torch.optim.SGD(model.parameters()))
        promise.saw(torch.tensor(64), rows=4, length=16)
        promise.step_ended()
        promise.interrupted("evaluation")
        next(steps)
    assert resets == [FIRST_COMPARED - 1]
    _, memory, speed = capsys.readouterr().err.strip().splitlines()
    assert memory.endswith("2.00 MiB, promised 1.00 MiB: 100 % more, likely because of evaluation")
    assert speed.strip() == "128 tokens/s, promised 128"


# -- exports ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["pytorch", "transformers", "trl", "lightning"])
def test_an_export_holds_what_its_trial_measured_if_it_measured_anything(target):
    def texts(asked):
        return "\n".join(TARGETS[target].write(asked, TARGETS[target].versions[0]).files.values())

    measured = recipe(TrainingConfig(micro_batch_size=4))
    unmeasured = dataclasses.replace(measured, peak_memory_bytes=None, tokens_per_second=None)
    number = str(measured.peak_memory_bytes)
    assert (number in texts(measured), number in texts(unmeasured)) == (True, False)
    if target != "pytorch":
        assert ("class Promise:" in texts(measured)) != ("class Promise:" in texts(unmeasured))


def test_what_the_files_do_not_express_is_among_the_facts():
    asked = recipe(TrainingConfig(micro_batch_size=8, optimizer_fusion="kernel"))
    facts = promised(asked, TARGETS["trl"].write(asked, "1.16").unsupported)
    assert facts["not_expressed"] == ["loss chunked (full in the trial)"]


def test_facts_of_a_script_leave_out_what_it_decides_itself(tmp_path):
    (tmp_path / "own.py").touch()
    asked = recipe(model="script", script=str(tmp_path / "own.py"))
    assert "sequence_length" in promised(recipe())
    assert not {"sequence_length", "share_of_tokens"} & promised(asked).keys()


def test_an_exported_trainer_counts_its_peak_and_names_longer_sequences(
    tmp_path, monkeypatch, capsys
):
    with imported(shipped_text(OF_TRAINER)) as of_trainer:
        monkeypatch.setitem(sys.modules, "autotune_promise", of_trainer)
        said = []
        for length in (16, 32):
            export = exported(workload={"sequence_length": length})
            with trainer_of(export, tmp_path, max_steps=FIRST_COMPARED + 1) as (made, trainer):
                made.TRIAL |= {"sequence_length": 16, "peak_memory_bytes": 1024}
                trainer.train()
            said.append(capsys.readouterr().err)
    peaks = [float(text.partition("peak memory ")[2].split()[0]) for text in said]
    assert 1.2 < peaks[1] / peaks[0] < 2.2
    assert ["sequences of 32 tokens (16 in the trial)" in text for text in said] == [False, True]
