"""Trainings that are timed in turn, as real processes: who computes when, and what fails."""

import dataclasses
import os
import signal
import subprocess
import sys
import textwrap
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from autotune.errors import Stopped, TrialLost
from autotune.execution import in_turn
from autotune.execution.in_turn import (
    LEAST_ROUNDS,
    SHORT_TRAININGS,
    TrainingInTurn,
    fit_at_once,
)
from autotune.execution.local import LocalExecutor
from autotune.execution.tasks import Train
from autotune.execution.trial_options import TrialOptions
from autotune.spec.config import TrainingConfig
from autotune.spec.result import DeviceInfo
from autotune.spec.workload import make_workload
from tests.building.studies import definition

ROUNDS = 4
CPU = DeviceInfo(device="cpu", name="a CPU", total_memory_bytes=2**36, versions={})
TINY_BYTES = 2**20
"""Small enough for any number of trainings to fit the host at once."""

SCRIPT = textwrap.dedent("""
    import os, time
    begun = time.monotonic()
    import torch, autotune
    from torch import nn

    config = autotune.current_config(global_batch=4)
    ME = config.micro_batch_size

    def others():
        with open(__file__ + ".log") as log:
            pids = {int(line.split()[1]) for line in log}
        return [pid for pid in pids - {os.getpid()} if os.path.exists(f"/proc/{pid}")]

    def computed(since):
        with open(__file__ + ".log", "a") as log:
            log.write(f"{ME} {os.getpid()} {since} {time.monotonic()}\\n")

    START
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Linear(64, 64).to(device)
    model, optimizer = autotune.apply(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    data = torch.randn(16, 64).to(device)
    for step in range(1, STEPS + 1):
        tokens, evaluation_loss = 64, None
        STEP
        loss = (model(data) - data).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        computed(begun)
        autotune.report(tokens=tokens, loss=loss, evaluation_loss=evaluation_loss)
        begun = time.monotonic()
""")


@pytest.fixture(scope="module")
def stopping():
    """The search is stopped while this list has something."""
    return []


@pytest.fixture(scope="module")
def executor(one_trial_server, tmp_path_factory, stopping):
    folder = tmp_path_factory.mktemp("executor")
    with LocalExecutor(folder, should_stop=lambda: bool(stopping)) as local:
        yield local


def processes_of(executor):
    """The processes of trainings that the executor's server runs."""
    return psutil.Process(executor.server_pid).children(recursive=True)


def trainings(*micro_batch_sizes, device_bytes=TINY_BYTES):
    return [
        TrainingInTurn(config=TrainingConfig(micro_batch_size=size), device_bytes=device_bytes)
        for size in micro_batch_sizes
    ]


@pytest.fixture
def time_script(executor, tmp_path):
    """time_script(4, 2, start="", step="...") is the result for trainings of these sizes."""
    file = tmp_path / "train.py"

    def run(
        *sizes,
        start="",
        step="",
        steps=100,
        of=7,
        device=CPU,
        device_bytes=TINY_BYTES,
        limits=None,
        **so,
    ):
        text = SCRIPT.replace("START", start).replace("STEPS", str(steps)).replace("STEP", step)
        file.write_text(text)
        settings = {"script": str(file), "global_batch": 4, "steps": of, "warmup_steps": 2}
        return executor.time_in_turn(
            definition(workload=make_workload("cpu", settings), device=device, cap_bytes=2**40),
            trainings(*sizes, device_bytes=device_bytes),
            study_folder=tmp_path,
            log_name="turns",
            trial_options=limits or TrialOptions(trial_time_limit_seconds=120.0),
            **{"rounds": ROUNDS, "seed": 0, **so},
        )

    return run


@pytest.fixture
def computed(tmp_path):
    """computed() is [(micro batch size, pid, begin, end)] of all that the scripts have computed."""

    def read():
        lines = (tmp_path / "train.py.log").read_text().splitlines()
        rows = [line.split() for line in lines]
        return [(int(me), int(pid), float(begin), float(end)) for me, pid, begin, end in rows]

    return read


def outcomes(timed):
    return [result.outcome for result in timed.results]


def blocks(timed):
    return [len(result.blocks) for result in timed.results]


# -- models ----------------------------------------------------------------------------------------


def test_all_trainings_have_a_block_of_every_round_in_the_order_given(executor, workload, prepared):
    configs = [TrainingConfig(micro_batch_size=size) for size in (4, 1, 2)]
    timed = executor.time_in_turn(
        definition(workload=workload),
        [TrainingInTurn(config=config, device_bytes=TINY_BYTES) for config in configs],
        study_folder=prepared.parent,
        log_name="turns",
        trial_options=TrialOptions(trial_time_limit_seconds=120.0),
        rounds=ROUNDS,
        seed=0,
    )
    assert timed.schedule == "in turn"
    assert [result.config for result in timed.results] == configs
    assert outcomes(timed) == ["ok"] * 3
    assert blocks(timed) == [ROUNDS] * 3
    assert len({block.tokens for result in timed.results for block in result.blocks}) == 1


@pytest.mark.slow
def test_a_model_goes_on_with_its_text_for_more_rounds_than_its_workload_has_steps(
    executor, workload, prepared
):
    timed = executor.time_in_turn(
        definition(workload=workload),
        trainings(4, 2),
        study_folder=prepared.parent,
        log_name="turns",
        trial_options=TrialOptions(trial_time_limit_seconds=120.0),
        rounds=2 * workload.steps,
        seed=0,
    )
    assert blocks(timed) == [2 * workload.steps] * 2


@pytest.mark.slow
def test_a_run_whose_time_is_over_ends_with_the_least_rounds(time_script):
    timed = time_script(4, 2, of=60, rounds=40, seconds=0.0)
    assert outcomes(timed) == ["ok"] * 2
    assert blocks(timed) == [LEAST_ROUNDS] * 2


@pytest.mark.slow
def test_short_trainings_whose_time_is_over_are_half_as_many(time_script):
    timed = time_script(4, 2, device_bytes=None, rounds=SHORT_TRAININGS, seconds=0.0)
    assert timed.schedule == "in blocks"
    assert blocks(timed) == [SHORT_TRAININGS // 2] * 2


# -- one at a time ---------------------------------------------------------------------------------


def test_only_one_training_computes_at_a_time_in_an_order_that_is_drawn(time_script, computed):
    timed = time_script(4, 2, step="time.sleep(0.002)")
    assert blocks(timed) == [ROUNDS] * 2
    spans = sorted(computed(), key=lambda span: span[2])
    assert all(earlier[3] <= later[2] for earlier, later in pairwise(spans))
    in_rounds = [me for me, *_ in spans[-2 * ROUNDS :]]
    rounds = {tuple(in_rounds[i : i + 2]) for i in range(0, 2 * ROUNDS, 2)}
    assert rounds == {(4, 2), (2, 4)}


def test_trainings_that_may_not_fit_at_once_are_started_in_turn(time_script, computed):
    timed = time_script(4, 2, device_bytes=None, rounds=8)
    assert timed.schedule == "in blocks"
    assert blocks(timed) == [8, 8]
    spans = sorted(computed(), key=lambda span: span[2])
    assert all(earlier[3] <= later[2] for earlier, later in pairwise(spans))
    processes = list(dict.fromkeys((me, pid) for me, pid, *_ in spans))
    changes = sum(earlier[1] != later[1] for earlier, later in pairwise(spans))
    assert sorted(me for me, _ in processes) == [2] * SHORT_TRAININGS + [4] * SHORT_TRAININGS
    assert changes == 2 * SHORT_TRAININGS - 1  # each has ended before the next one begins


def test_a_step_with_an_evaluation_is_not_timed(time_script):
    timed = time_script(4, 2, of=12, step="if step in (3, 6): tokens, evaluation_loss = 7, 1.0")
    assert blocks(timed) == [ROUNDS] * 2
    assert {block.tokens for result in timed.results for block in result.blocks} == {2 * 64}


def test_a_script_that_always_evaluates_is_timed_all_the_same(time_script):
    assert blocks(time_script(4, 2, step="evaluation_loss = 1.0")) == [ROUNDS] * 2


# -- what fails ------------------------------------------------------------------------------------


def test_the_others_are_timed_where_one_crashes(time_script):
    step = "if ME == 2 and step == 4: raise LookupError('nothing there')"
    timed = time_script(4, 2, 1, step=step)
    assert outcomes(timed) == ["ok", "crashed", "ok"]
    assert timed.results[1].message == "LookupError: nothing there"
    assert blocks(timed) == [ROUNDS, 0, ROUNDS]


def test_a_process_that_dies_is_a_crash_of_its_training(time_script):
    timed = time_script(4, 2, 1, step="if ME == 2 and step == 4: os.abort()")
    assert outcomes(timed) == ["ok", "crashed", "ok"]
    assert "was killed by SIGABRT" in timed.results[1].message


def test_out_of_memory_is_an_outcome(time_script):
    timed = time_script(4, 2, 1, step="if ME == 2: torch.empty(2**50)")
    assert outcomes(timed) == ["ok", "out_of_memory", "ok"]
    assert timed.results[1].message.startswith("the host ran out of memory")
    assert blocks(timed) == [ROUNDS, 0, ROUNDS]


def test_what_runs_out_of_memory_next_to_others_is_timed_alone(time_script):
    timed = time_script(4, 2, step="if ME == 2 and others(): torch.empty(2**50)")
    assert timed.schedule == "in blocks"
    assert outcomes(timed) == ["ok", "ok"]
    assert blocks(timed) == [ROUNDS, ROUNDS]


def test_nothing_is_timed_where_the_partner_fails(time_script):
    timed = time_script(4, 2, start="if ME == 4: raise LookupError('nothing there')")
    assert outcomes(timed) == ["crashed", "interrupted"]
    assert timed.results[1].message == "not measured, because its partner ended as crashed"


def test_a_script_that_ends_early_leaves_fewer_rounds_for_all(time_script):
    timed = time_script(4, 2, steps=5)
    assert outcomes(timed) == ["ok", "ok"]
    assert blocks(timed) == [3, 3]


def test_a_script_that_ends_before_its_first_turn_has_crashed(time_script):
    timed = time_script(4, 2, 1, start="if ME == 2: raise SystemExit")
    assert outcomes(timed) == ["ok", "crashed", "ok"]
    assert timed.results[1].message.startswith("the script ended after 0 of 7 steps")


@pytest.mark.slow
def test_who_waits_is_not_ended_by_the_limit_of_a_step_but_who_hangs_is(time_script):
    limits = TrialOptions(trial_time_limit_seconds=120.0, step_time_limit_seconds=1.0)
    hang = "if ME == 2 and step == 4: time.sleep(600)"
    timed = time_script(4, 2, 1, start="time.sleep(1.5)", step=hang, limits=limits)
    assert outcomes(timed) == ["ok", "timeout", "ok"]
    assert timed.results[1].message.startswith("no step ended within 1 s")
    assert blocks(timed) == [ROUNDS, 0, ROUNDS]


# -- the end of the search -------------------------------------------------------------------------


HOSTILE = """import autotune.training.turns as turns
if ME == 2: turns.Turns._wait_after = lambda self, message: (MESSAGE, time.sleep(3600))
"""


@pytest.mark.parametrize(
    "message",
    [
        "self._connection.send({})",
        "self._connection.send({'step_seconds': 0})",
        "self._connection.send({'step_seconds': float('nan')})",
        "self._connection.send({'step_seconds': '1'})",
        "self._connection._socket.sendall(b'[]' + bytes([10]))",
        "self._connection._socket.sendall(b'[' * 10**6)",
    ],
)
def test_a_training_that_sends_no_valid_message_is_a_crash(time_script, message):
    timed = time_script(4, 2, start=HOSTILE.replace("MESSAGE", message))
    assert outcomes(timed) == ["ok", "crashed"]


@pytest.mark.slow
def test_a_training_that_claims_to_wait_for_its_turn_is_ended(time_script, monkeypatch):
    monkeypatch.setattr(in_turn, "_SECONDS_BEYOND_LIMIT", 2.0)
    limits = TrialOptions(trial_time_limit_seconds=10.0)
    start = HOSTILE.replace("MESSAGE", "self._progress('waiting')")
    assert outcomes(time_script(4, 2, start=start, limits=limits)) == ["ok", "timeout"]


@pytest.mark.slow
def test_a_stopped_search_ends_all_processes(time_script, executor, stopping, monkeypatch):
    take_turn = in_turn._Processes._take_turn
    turns = []

    def stop_at_the_third(processes, training, *, steps):
        turns.append(training.number)
        if len(turns) == 3:
            stopping.append("now")
        return take_turn(processes, training, steps=steps)

    monkeypatch.setattr(in_turn._Processes, "_take_turn", stop_at_the_third)
    try:
        with pytest.raises(Stopped):
            time_script(4, 2, step="time.sleep(0.5)")
    finally:
        stopping.clear()
    assert processes_of(executor) == []


def test_a_training_that_is_killed_from_outside_is_a_loss(time_script, executor):
    with pytest.raises(TrialLost, match="killed from outside, by SIGKILL"):
        time_script(4, 2, step="if ME == 2 and step == 4: os.kill(os.getpid(), 9)")
    assert processes_of(executor) == []


SEARCH = """
import sys
from pathlib import Path
from autotune.execution.local import LocalExecutor
from autotune.execution.trial_options import TrialOptions
from autotune.spec.workload import make_workload
from tests.building.studies import definition
from tests.execution.test_in_turn import trainings
folder = Path(sys.argv[1])
settings = {"script": str(folder / "train.py"), "global_batch": 4, "steps": 99, "warmup_steps": 2}
with LocalExecutor(folder) as executor:
    executor.time_in_turn(
        definition(workload=make_workload("cpu", settings)),
        trainings(4, 2),
        study_folder=folder,
        log_name="turns",
        trial_options=TrialOptions(trial_time_limit_seconds=120.0),
        rounds=30,
        seed=0,
    )
"""


@pytest.mark.slow
def test_nothing_outlives_a_killed_search(tmp_path, computed):
    text = SCRIPT.replace("START", "").replace("STEPS", "100").replace("STEP", "time.sleep(0.3)")
    (tmp_path / "train.py").write_text(text)
    root = Path(__file__).parents[2]
    search = subprocess.Popen(
        [sys.executable, "-c", SEARCH, str(tmp_path)], env={**os.environ, "PYTHONPATH": str(root)}
    )
    log = tmp_path / "train.py.log"
    end = time.monotonic() + 120
    while not (log.exists() and len({pid for _, pid, *_ in computed()}) == 2):
        assert time.monotonic() < end
        time.sleep(0.1)
    processes = psutil.Process(search.pid).children(recursive=True)
    assert len(processes) == 3  # the server and both trainings
    search.send_signal(signal.SIGKILL)
    search.wait()
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert alive == []


# -- what fits at once -----------------------------------------------------------------------------


def test_trainings_whose_memory_is_not_known_are_not_run_at_once():
    assert not fit_at_once([CPU], [TINY_BYTES, None])


def test_trainings_that_need_more_than_is_free_are_not_run_at_once():
    assert fit_at_once([CPU], [TINY_BYTES] * 2)
    assert not fit_at_once([CPU], [2**50] * 2)


def test_every_process_of_a_training_needs_memory_of_the_host(monkeypatch):
    monkeypatch.setattr(in_turn, "available_bytes", lambda: 3 * 2**30)
    assert fit_at_once([CPU] * 2, [TINY_BYTES] * 2)
    assert not fit_at_once([CPU] * 3, [TINY_BYTES] * 2)


def test_trainings_fit_only_where_each_of_their_gpus_holds_them(monkeypatch):
    used = {"GPU-0": 0, "GPU-1": 0}
    monkeypatch.setattr(
        in_turn, "open_device", lambda uuid: SimpleNamespace(used_bytes=lambda: used[uuid])
    )
    gpus = [
        dataclasses.replace(
            CPU,
            device=f"cuda:{one}",
            uuid=f"GPU-{one}",
            compute_mode="default",
            is_known_to_nvml=True,
        )
        for one in range(2)
    ]
    assert fit_at_once(gpus, [2**34] * 2)
    used["GPU-1"] = 2**35
    assert fit_at_once(gpus[:1], [2**34] * 2)
    assert not fit_at_once(gpus, [2**34] * 2)


def test_trainings_are_not_run_at_once_where_the_memory_in_use_is_not_known():
    gpu = dataclasses.replace(CPU, device="cuda:0", uuid="GPU-0", compute_mode="default")
    assert not fit_at_once([gpu], [TINY_BYTES] * 2)


# -- on a GPU --------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_script_on_a_gpu_runs_ahead_within_its_turn(time_script, executor):
    gpu, _ = executor.probe("cuda:0", {})
    with executor.slot_on(gpu):
        timed = time_script(4, 2, of=30, device=gpu)
    assert timed.schedule == "in turn"
    assert blocks(timed) == [ROUNDS] * 2
    [tokens] = {block.tokens for result in timed.results for block in result.blocks}
    assert 64 <= tokens <= 28 // ROUNDS * 64


@pytest.mark.gpu
def test_the_cap_of_each_training_holds_next_to_another_one(executor, workload, prepared):
    """What others have on the device counts for none of them."""
    gpu, _ = executor.probe("cuda:0", {})
    study = definition(workload=workload, device=gpu, cap_bytes=2**40)
    options = TrialOptions(trial_time_limit_seconds=120.0)
    configs = [TrainingConfig(micro_batch_size=size) for size in (4, 2, 1)]

    def run(cap_bytes, enforced):
        return executor.time_in_turn(
            dataclasses.replace(study, cap_bytes=cap_bytes),
            [
                TrainingInTurn(config=config, enforce_cap=enforce_cap, device_bytes=needed)
                for config, enforce_cap in zip(configs, enforced, strict=True)
            ],
            study_folder=prepared.parent,
            log_name="turns",
            trial_options=options,
            rounds=ROUNDS,
            seed=0,
        )

    with executor.slot_on(gpu):
        training = executor.training(
            study, configs[0], study_folder=prepared.parent, enforce_cap=True
        )
        alone = executor.run(Train(training=training), limits=options.time_limits())
        needed = alone.measurement.device_bytes
        fitting = run(needed, (True, True, True))
        tight = run(gpu.context_bytes + 2**20, (False, True, False))
    assert fitting.schedule == "in turn"
    assert outcomes(fitting) == ["ok"] * 3
    assert blocks(fitting) == [ROUNDS] * 3
    assert len({block.tokens for result in fitting.results for block in result.blocks}) == 1
    assert outcomes(tight) == ["ok", "out_of_memory", "ok"]
    assert blocks(tight) == [ROUNDS, 0, ROUNDS]
