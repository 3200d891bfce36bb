"""The trial server with real processes: what it runs and survives, and that nothing outlives it."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from autotune.errors import AutotuneError, InvalidInput, StudyMismatch, TrialLost, TrialServerLost
from autotune.execution.server.child_process import SECONDS_BETWEEN_ATTEMPTS
from autotune.execution.server.client import TrialServer
from autotune.execution.server.limits import time_limits
from autotune.execution.tasks import Identify, ListDevices, Prepare, Probe, Rehearse, Train
from autotune.spec.config import TrainingConfig
from autotune.spec.result import Measurement
from autotune.spec.training_request import TrainingRequest
from tests.building.hostile_server import Attack, hostile_command

WAIT_SECONDS = 60


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    """A folder whose modules the server can import."""
    return tmp_path_factory.mktemp("libraries")


@pytest.fixture(scope="module")
def server_log(tmp_path_factory):
    return tmp_path_factory.mktemp("server") / "server.log"


@pytest.fixture(scope="module")
def server(server_log, libraries, tmp_path_factory):
    """One that all tests share but those that end it; in its folder are modules that end it."""
    folder = tmp_path_factory.mktemp("current")
    for name in ("json", "torch", "datasets"):
        (folder / f"{name}.py").write_text("raise SystemExit('the wrong module')\n")
    path = os.pathsep.join([str(libraries), *filter(None, [os.environ.get("PYTHONPATH")])])
    with contextlib.chdir(folder):
        trial_server = TrialServer(log_file=server_log, environment={"PYTHONPATH": path})
    with trial_server:
        yield trial_server


@pytest.fixture
def doomed_server(tmp_path):
    with TrialServer(log_file=tmp_path / "server.log") as trial_server:
        yield trial_server


@pytest.fixture
def light_server(tmp_path):
    """A server that starts without torch, and whose trainings sleep."""
    with TrialServer(log_file=tmp_path / "server.log", command=hostile_command()) as trial_server:
        yield trial_server


@pytest.fixture
def train(server, workload, prepared, tmp_path):
    """train(steps=..., ...) is the future of a training in its own process."""

    def submit(
        *,
        time_limit_seconds=None,
        cap_bytes=2**40,
        workload=workload,
        by=server,
        folder=prepared,
        **choices,
    ):
        config = TrainingConfig(**{"micro_batch_size": workload.global_batch, **choices})
        training = TrainingRequest(
            workload=workload, config=config, folder=folder, device="cpu", cap_bytes=cap_bytes
        )
        limits = (
            None
            if time_limit_seconds is None
            else time_limits(time_limit_seconds, step_seconds=time_limit_seconds)
        )
        task = Train(training=training)
        return by.submit(task, log_file=tmp_path / "trial.log", limits=limits)

    return submit


def endless(workload):
    """The same training, far too long to end in a test."""
    import dataclasses

    return dataclasses.replace(workload, steps=10**6)


def children_of(pid: int) -> list[int]:
    return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_until(condition) -> bool:
    end = time.monotonic() + WAIT_SECONDS
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def sleep(light_server, tmp_path):
    """Begins a training that sleeps; returns its future."""
    return light_server.submit(Attack(doing="sleep"), log_file=tmp_path / "trial.log")


def measurement_of(future) -> Measurement:
    return future.result(WAIT_SECONDS).measurement


def start_endless_trial(server, train, workload) -> int:
    """Begins a training that does not end; returns the pid of its process."""
    train(workload=endless(workload), by=server)
    return pid_of_trial(server)


def pid_of_trial(server) -> int:
    """Of the one trial there is, once it listens to signals as any program does."""
    assert wait_until(lambda: [pid for pid in children_of(server.pid) if os.getsid(pid) == pid])
    (pid,) = children_of(server.pid)
    return pid


@pytest.mark.slow
def test_what_ends_all_processes_of_a_terminal_leaves_the_server_to_the_search(server, train):
    train().result(WAIT_SECONDS)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(server.pid, number)
    assert measurement_of(train()).outcome == "ok"


def test_a_training_returns_its_measurement(train):
    measurement = measurement_of(train())
    assert measurement.outcome == "ok"


def test_a_forked_training_measures_the_same_peak_as_one_in_this_process(train, make_trainer):
    measurement = measurement_of(train())
    assert measurement.peak_memory_bytes == make_trainer().run().peak_memory_bytes


def test_a_forked_training_ends_at_the_same_loss_as_one_in_this_process(train, make_trainer):
    measurement = measurement_of(train())
    assert measurement.final_loss == make_trainer().run().final_loss


def test_over_the_cap_is_an_outcome_with_the_peak(train):
    measurement = measurement_of(train(cap_bytes=100_000))
    assert measurement.outcome == "over_cap"
    assert measurement.peak_memory_bytes > 100_000


def test_a_trial_past_its_time_limit_is_ended(train, workload):
    measurement = measurement_of(train(workload=endless(workload), time_limit_seconds=2))
    assert measurement.outcome == "timeout"


def test_a_trial_killed_from_outside_says_nothing_of_its_configuration_and_the_next_one_runs(
    server, train, workload
):
    for number in (signal.SIGKILL, signal.SIGTERM):
        future = train(workload=endless(workload))
        os.kill(pid_of_trial(server), number)
        with pytest.raises(TrialLost, match=number.name):
            future.result(WAIT_SECONDS)
    assert measurement_of(train()).outcome == "ok"


def test_an_error_in_the_trials_code_is_a_crash(server, train, workload):
    future = train(workload=endless(workload))
    os.kill(pid_of_trial(server), signal.SIGSEGV)
    measurement = measurement_of(future)
    assert (measurement.outcome, "SIGSEGV" in measurement.message) == ("crashed", True)


@pytest.mark.slow
def test_a_stopped_trial_is_still_ended_at_its_time_limit(server, train, workload):
    future = train(workload=endless(workload), time_limit_seconds=2)
    assert wait_until(lambda: children_of(server.pid))
    os.kill(children_of(server.pid)[0], signal.SIGSTOP)
    assert measurement_of(future).outcome == "timeout"


def test_a_cancelled_trial_is_interrupted(server, train, workload):
    future = train(workload=endless(workload))
    assert wait_until(lambda: children_of(server.pid))
    server.cancel(future)
    assert measurement_of(future).outcome == "interrupted"


def test_a_loss_that_is_no_number_is_diverged(train, workload):
    import dataclasses

    hopeless = dataclasses.replace(workload, learning_rates={**workload.learning_rates, "sgd": 1e6})
    measurement = measurement_of(train(workload=hopeless, optimizer="sgd"))
    assert measurement.outcome == "diverged"


@pytest.mark.slow
def test_more_memory_than_the_host_has_is_out_of_memory(server, workload, prepared, tmp_path):
    """A batch of 2^38 bytes of logits: the host limit rejects it before the kernel kills."""
    import dataclasses

    from autotune.execution.process.preparation import prepare

    huge = dataclasses.replace(
        workload, vocab_size=2**22, width=8, heads=1, layers=1, global_batch=512
    )
    folder = tmp_path / "huge"
    of_one = dataclasses.replace(huge, evaluation_sequences=1)
    prepare(Prepare(workload=of_one, folder=folder))
    training = TrainingRequest(
        workload=huge,
        config=TrainingConfig(micro_batch_size=512),
        folder=folder,
        device="cpu",
        cap_bytes=2**50,
    )
    future = server.submit(Train(training=training), log_file=tmp_path / "trial.log")
    measurement = measurement_of(future)
    assert measurement.outcome == "out_of_memory"
    assert measurement.requested_bytes == 512 * 32 * 2**22 * 4


def test_an_error_of_a_task_about_its_input_is_raised_here(server, tmp_path):
    task = Probe(device="cuda:99", choices={}, with_context=True)
    future = server.submit(task, log_file=tmp_path / "probe.log")
    with pytest.raises(InvalidInput, match="cuda:99"):
        future.result(WAIT_SECONDS)


def test_a_defect_in_a_task_is_an_error_of_ours_too(server, tmp_path):
    task = Rehearse(workload="none", micro_batch_size=1, device="cpu")
    future = server.submit(task, log_file=tmp_path / "rehearse.log")
    with pytest.raises(AutotuneError, match="ValueError: str is given for a Workload"):
        future.result(WAIT_SECONDS)


def test_the_server_imports_a_module_once_for_all_its_processes(
    server, server_log, libraries, tmp_path
):
    (libraries / "library.py").write_text("print('imported', flush=True)")
    for _ in range(2):
        modules = ["library", "none_of_this_name"]
        reply = server.submit(ListDevices(), log_file=tmp_path / "log", modules=modules)
        assert reply.result(timeout=WAIT_SECONDS)
    assert server_log.read_text().splitlines().count("imported") == 1


@pytest.mark.slow
def test_tasks_run_where_an_imported_module_resets_the_wakeup_descriptor_after_a_fork(
    tmp_path,
):
    """As asyncio does from Python 3.12 on, which torch imports."""
    (tmp_path / "resets.py").write_text(
        "import os, signal\nos.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))\n"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    with TrialServer(log_file=tmp_path / "log", environment={"PYTHONPATH": path}) as server:
        reply = server.submit(ListDevices(), log_file=tmp_path / "task.log", modules=["resets"])
        assert reply.result(timeout=WAIT_SECONDS)


def test_closing_the_server_ends_its_trials(light_server, tmp_path):
    sleep(light_server, tmp_path)
    pid = pid_of_trial(light_server)
    light_server.close()
    assert wait_until(lambda: is_gone(pid))


def test_trials_end_with_a_killed_server(doomed_server, train, workload):
    pid = start_endless_trial(doomed_server, train, workload)
    os.kill(doomed_server.pid, signal.SIGKILL)
    assert wait_until(lambda: is_gone(pid))


def test_the_loss_of_the_server_reaches_the_caller(light_server, tmp_path):
    future = sleep(light_server, tmp_path)
    assert wait_until(lambda: children_of(light_server.pid))
    os.kill(light_server.pid, signal.SIGKILL)
    with pytest.raises(TrialServerLost):
        future.result(WAIT_SECONDS)


def test_a_request_to_a_server_that_has_ended_fails_at_once(light_server, tmp_path):
    os.kill(light_server.pid, signal.SIGKILL)
    light_server._reader.join(WAIT_SECONDS)
    with pytest.raises(TrialServerLost):
        sleep(light_server, tmp_path).result(WAIT_SECONDS)


# -- trials that another process has disturbed -----------------------------------------------------

DISTURBED = """
    from pathlib import Path
    from autotune.errors import DeviceDisturbed
    from tests.building.light_server import serve_without_torch

    def train(request):
        arguments = request["payload"]["arguments"]
        attempts = Path(arguments["folder"], "attempts")
        attempts.write_text(attempts.read_text() + "x" if attempts.exists() else "x")
        if len(attempts.read_text()) <= arguments["disturbed"]:
            raise DeviceDisturbed("process 7 began on cuda:0", hint="end it")
        measurement = {"outcome": "ok", "startup_seconds": request["requested_at"]}
        return {"measurement": measurement, "seconds": 1.0}

    serve_without_torch({"train": train})
"""
"""A server whose trainings are disturbed as often as they are told; measured is when it was
asked."""


@pytest.fixture(scope="module")
def disturbed_server(tmp_path_factory):
    command = (sys.executable, "-c", textwrap.dedent(DISTURBED))
    with TrialServer(
        log_file=tmp_path_factory.mktemp("disturbed") / "server.log", command=command
    ) as trial_server:
        yield trial_server


@pytest.fixture
def measure(disturbed_server, tmp_path):
    """measure(disturbed=2) is the training's future; `attempts` gets a letter an attempt."""

    def submit(*, disturbed):
        arguments = {"folder": str(tmp_path), "disturbed": disturbed}
        task = Attack(doing="measure", arguments=arguments)
        return disturbed_server.submit(task, log_file=tmp_path / "trial.log")

    return submit


@pytest.mark.slow
def test_a_disturbed_trial_is_begun_again_and_counts_from_there(measure, tmp_path):
    asked = time.monotonic()
    began_from = measurement_of(measure(disturbed=2)).startup_seconds
    assert began_from > asked + SECONDS_BETWEEN_ATTEMPTS
    assert (tmp_path / "attempts").read_text() == "xxx"


@pytest.mark.slow
def test_a_trial_disturbed_three_times_is_lost_and_says_by_what(measure, tmp_path):
    with pytest.raises(TrialLost, match="process 7 began on cuda:0"):
        measure(disturbed=99).result(WAIT_SECONDS)
    assert (tmp_path / "attempts").read_text() == "xxx"


def test_a_cancelled_trial_is_not_begun_again(disturbed_server, measure, tmp_path):
    future = measure(disturbed=99)
    assert wait_until((tmp_path / "attempts").exists)
    disturbed_server.cancel(future)
    with contextlib.suppress(AutotuneError):
        future.result(WAIT_SECONDS)
    assert len((tmp_path / "attempts").read_text()) < 3


def test_a_server_that_cannot_fork_for_cuda_says_so(tmp_path):
    program = """
        from autotune.execution.server import fork_server
        from autotune.execution.server.clean_imports import CudaTouched

        def touch():
            raise CudaTouched("CUDA was initialized while modules were imported")

        fork_server._import_what_trials_need = touch
        fork_server.main()
    """
    command = (sys.executable, "-c", textwrap.dedent(program))
    with TrialServer(log_file=tmp_path / "server.log", command=command) as server:
        future = server.submit(ListDevices(), log_file=tmp_path / "devices.log")
        with pytest.raises(
            TrialServerLost, match="CUDA was initialized while modules were imported"
        ):
            future.result(WAIT_SECONDS)


def test_what_an_interpreter_says_before_the_server_begins_is_no_reply(tmp_path):
    """As a line in sitecustomize or a .pth file does."""
    command = hostile_command(before="print('hello', flush=True); print('[1]', flush=True)")
    with TrialServer(log_file=tmp_path / "server.log", command=command) as chatty:
        task = Attack(doing="print_much", arguments={"size": 0})
        future = chatty.submit(task, log_file=tmp_path / "trial.log")
        assert measurement_of(future).outcome == "ok"


def test_half_a_reply_of_a_server_that_was_killed_leaves_nobody_waiting(tmp_path):
    half = "import sys; sys.stdin.readline(); print('{\"id\": 1, \"resu', end='', flush=True)"
    with TrialServer(
        log_file=tmp_path / "server.log", command=(sys.executable, "-c", half)
    ) as killed:
        future = killed.submit(ListDevices(), log_file=tmp_path / "devices.log")
        with pytest.raises(TrialServerLost):
            future.result(WAIT_SECONDS)


def test_requests_and_replies_larger_than_the_pipes_pass_each_other(tmp_path):
    echo = """
        import json, sys
        for line in sys.stdin:
            request = json.loads(line)
            device = {"device": "cpu", "name": "x" * 100_000}
            device |= {"total_memory_bytes": 1, "versions": {}}
            reply = {"id": request["id"], "result": device, "error": None, "seconds": 0.0}
            print(json.dumps(reply), flush=True)
    """
    with TrialServer(
        log_file=tmp_path / "server.log", command=(sys.executable, "-c", textwrap.dedent(echo))
    ) as server:
        futures = [
            server.submit(Identify(device="y" * 100_000), log_file=tmp_path / "identify.log")
            for _ in range(30)
        ]
        assert {len(future.result(WAIT_SECONDS).name) for future in futures} == {100_000}


def test_a_study_whose_prepared_files_are_gone_ends_and_no_configuration_is_charged(train):
    future = train(folder=Path("gone"))
    with pytest.raises(StudyMismatch, match="gone"):
        future.result(WAIT_SECONDS)


def test_nothing_outlives_a_caller_that_was_killed(tmp_path):
    caller = textwrap.dedent(
        f"""
        import time
        from pathlib import Path
        from autotune.execution.server.client import TrialServer
        from tests.building.hostile_server import Attack
        log_file = Path({str(tmp_path / "server.log")!r})
        server = TrialServer(log_file=log_file, command={hostile_command()!r})
        server.submit(Attack(doing="sleep"), log_file=log_file.with_name("trial.log"))
        print(server.pid, flush=True)
        time.sleep(600)
        """
    )
    process = subprocess.Popen([sys.executable, "-c", caller], stdout=subprocess.PIPE, text=True)
    server_pid = int(process.stdout.readline())
    assert wait_until(lambda: children_of(server_pid))
    trial_pid = children_of(server_pid)[0]
    process.kill()
    process.wait()
    assert wait_until(lambda: is_gone(server_pid) and is_gone(trial_pid))


def test_the_server_has_no_thread_and_no_device(server, train):
    train().result(WAIT_SECONDS)
    assert len(list(Path(f"/proc/{server.pid}/task").iterdir())) == 1


@pytest.mark.gpu
def test_the_server_stays_free_of_cuda(server, tmp_path):
    """A child could not use CUDA if its parent had; and the server must not have a GPU context."""
    task = Probe(device="cuda:0", choices={"precision": ["fp32"]}, with_context=True)
    found = server.submit(task, log_file=tmp_path / "probe.log").result(300)
    assert found.device.device == "cuda:0"
    assert "nvidia" not in "".join(
        os.readlink(link) for link in Path(f"/proc/{server.pid}/fd").iterdir()
    )


@pytest.mark.gpu
def test_importing_touches_nothing_where_nvml_does_not_say_how_many_devices_there_are():
    """As with CUDA_VISIBLE_DEVICES=MIG-...: torch asks the CUDA runtime, after which forks fail."""
    program = """
        import os
        from autotune.execution.server import fork_server
        fork_server._import_what_trials_need()
        import torch
        if (pid := os.fork()) == 0:
            os._exit(torch.cuda._is_in_bad_fork())
        raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    """
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "MIG-0",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }
    assert (
        subprocess.run([sys.executable, "-c", textwrap.dedent(program)], env=environment).returncode
        == 0
    )


def test_a_file_in_the_current_folder_does_not_stand_in_for_a_module(server, tmp_path):
    future = server.submit(ListDevices(), log_file=tmp_path / "devices.log")
    assert (Path(f"/proc/{server.pid}/cwd") / "torch.py").exists()
    assert future.result(WAIT_SECONDS)[-1].device == "cpu"


def test_a_task_runs_on_its_cpus_with_a_thread_on_each(server, tmp_path):
    """The name of a CPU says with how many threads torch computes."""
    [cpu, *_] = os.sched_getaffinity(0)
    future = server.submit(Identify(device="cpu"), log_file=tmp_path / "identify.log", cpus=[cpu])
    assert future.result(timeout=WAIT_SECONDS).name.endswith(", 1 threads")
