"""The groups of devices that a worker offers to the queue, without a database."""

import os
import time
from functools import partial
from types import SimpleNamespace

import psutil
import pytest

from autotune.analysis.queue_order import DeviceGroup
from autotune.errors import StorageUnavailable
from autotune.service import devices, submissions
from autotune.service.devices import groups_of
from autotune.service.pages.fit import _usual_card
from autotune.service.settings import ServerSettings, SubmissionRules
from autotune.service.state import ServiceState
from autotune.service.submissions import check_submission, file_not_here
from autotune.service.worker import Worker
from autotune.spec.data_sheets import DATA_SHEETS, sheet_of
from autotune.spec.setting import options_of
from autotune.study.prediction.pasted import PastedTraining
from autotune.study.request import DEFAULT_TIME_BUDGET_SECONDS
from autotune.study.running.devices import MOST_DEVICES


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(devices, "visible_devices", lambda: ["a", "b"])
    monkeypatch.setattr(devices, "name_of", lambda device: "NVIDIA H200")
    monkeypatch.setattr(os, "cpu_count", lambda: 64)


@pytest.mark.parametrize(
    ("settings", "slots"),
    [
        ({}, 1),
        ({"devices": "2"}, 2),
        ({"devices": "all"}, 2),
        ({"devices": "cuda:1"}, 1),
        ({"devices": "cpu"}, 1),
        ({"ray": "auto", "devices": "4"}, 4),
        ({"ray": "auto"}, MOST_DEVICES),
    ],
    ids=str,
)
def test_gpus_are_as_many_slots_as_there_are(two_gpus, settings, slots):
    (group,) = groups_of(ServerSettings(**settings))
    assert group.slots == slots


def test_a_cpu_has_as_many_slots_as_cores(monkeypatch):
    monkeypatch.setattr(devices, "visible_devices", list)
    monkeypatch.setattr(devices, "_OTHER_GPUS", ())
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    (group,) = groups_of(ServerSettings())
    assert (group.type, group.slots) == ("cpu", 64)


def test_a_submission_may_ask_for_what_the_largest_group_of_gpus_has():
    cpu = DeviceGroup(name="cpu", type="cpu", kind="AMD EPYC", devices="cpu", slots=64)
    gpus = DeviceGroup(
        name="gpus", type="cuda", kind="NVIDIA H200", devices="cuda:0,cuda:1", slots=2
    )
    state = server_with(cpu, others=[gpus])
    assert ServiceState.rules(state, {}).devices == "cuda:0,cuda:1"
    for of_cpu in ({"group": "cpu"}, {"kind": "cpu"}):
        assert ServiceState.rules(state, of_cpu).most_devices == 64
    assert ServiceState.rules(state, {}, model="AMD EPYC, 4 threads").most_devices == 64


def server_with(*own, others=()):
    state = SimpleNamespace(
        settings=ServerSettings(),
        worker=SimpleNamespace(groups=own),
        searches=SimpleNamespace(groups=lambda: others),
    )
    state.largest_group = partial(ServiceState.largest_group, state)
    return state


def test_a_search_is_judged_by_the_devices_that_it_would_run_on(tmp_path, monkeypatch):
    monkeypatch.setattr(submissions, "all_devices", list)
    cpu = DeviceGroup(name="cpu", type="cpu", kind="AMD EPYC", devices="cpu", slots=64)
    gpus = DeviceGroup(name="gpus", type="cuda", kind="NVIDIA H200", slots=2)
    state = server_with(cpu, others=[gpus])
    for asked, kind in (({}, "cuda"), ({"group": "cpu"}, "cpu"), ({"kind": "H200"}, "cuda")):
        rules = ServiceState.rules(state, asked)
        assert rules.device_type == kind
        body = {"max_mem": "48MiB", "space": "quick"}
        checked = check_submission(body, rules, folder=tmp_path)
        assert checked.budget_seconds == DEFAULT_TIME_BUDGET_SECONDS[kind]


def test_the_page_on_what_fits_proposes_the_card_of_the_largest_group():
    cpu = DeviceGroup(name="cpu", type="cpu", kind="AMD EPYC", slots=64)
    gpus = DeviceGroup(name="gpus", type="cuda", kind="NVIDIA A100-SXM4-80GB", slots=2)
    default = options_of(PastedTraining)["card"].default
    assert DATA_SHEETS[_usual_card(server_with(cpu, others=[gpus]), is_asked=False)] is sheet_of(
        gpus.kind
    )
    assert _usual_card(server_with(cpu, others=[gpus]), is_asked=True) == default
    assert _usual_card(server_with(cpu), is_asked=False) == default


@pytest.mark.parametrize("wanted", [{"kind": "H100"}, {"group": "later"}], ids=str)
def test_a_submission_for_devices_that_are_not_there_is_not_judged_by_others(wanted):
    """It waits for a worker with them."""
    cpu = DeviceGroup(name="cpu", type="cpu", devices="cpu", slots=1)
    rules = ServiceState.rules(server_with(cpu), wanted)
    assert (rules.devices, rules.most_devices) == (None, None)


def worker_of(folder, searches, settings=None, *, groups=()):
    return Worker(
        searches,
        SimpleNamespace(),
        settings or ServerSettings(),
        groups=groups,
        log_folder=folder,
        retention=SimpleNamespace(apply=lambda active: None),
    )


def test_the_time_of_a_worker_is_counted_from_the_start_of_its_process(tmp_path, monkeypatch):
    hour_ago = time.time() - 3600.0
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: hour_ago)
    for limit, is_over in ((3500.0, True), (36_000.0, False)):
        worker = worker_of(tmp_path, SimpleNamespace(), ServerSettings(time_limit=limit))
        assert worker.is_over == is_over


def test_a_search_is_not_claimed_where_the_database_fails_before_it_could_start(tmp_path):
    claimed = []

    def lead():
        raise StorageUnavailable("the database is away", hint="wait")

    searches = SimpleNamespace(
        find=lambda **asked: ((), 0),
        running=list,
        counts=lambda: {"queued": 1},
        claim_next=lambda group, version, lacking: claimed.append(group),
        lead=lead,
    )
    worker = worker_of(tmp_path, searches, groups=[DeviceGroup()])
    with pytest.raises(StorageUnavailable):
        worker._round()
    assert claimed == []


@pytest.mark.parametrize("setting", ["dataset", "tokenizer", "model", "model_source", "script"])
def test_a_file_that_a_search_names_is_looked_for_in_the_folders_of_the_machine(setting, tmp_path):
    (tmp_path / "here.txt").touch()
    is_code = setting == "script"
    folders = {"code_folders" if is_code else "data_roots": (str(tmp_path),)}
    rules = SubmissionRules(storage="sqlite://", **folders)
    for name in ("here.txt", str(tmp_path / "here.txt")):
        assert file_not_here({setting: name}, rules) is None
    gone = str(tmp_path / "gone.txt")
    assert file_not_here({setting: gone}, rules) == gone
    assert file_not_here(
        {setting: str(tmp_path / "here.txt")}, SubmissionRules(storage="sqlite://")
    )


@pytest.mark.parametrize("table", ["workload", "scales.large"])
@pytest.mark.parametrize("setting", ["dataset", "tokenizer", "model", "script"])
def test_a_file_that_the_text_of_a_space_names_is_looked_for_as_well(setting, table, tmp_path):
    (tmp_path / "here.txt").touch()
    folders = {"code_folders" if setting == "script" else "data_roots": (str(tmp_path),)}
    rules = SubmissionRules(storage="sqlite://", **folders)
    for name, is_here in (("here.txt", True), ("gone.txt", False)):
        file = str(tmp_path / name)
        space = f'[techniques]\nloss = ["full"]\n[{table}]\n{setting} = "{file}"\n'
        assert file_not_here({"space_content": space}, rules) == (None if is_here else file)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"space_content": '[workload]\ndataset = "owner/name"\n[scales.large]\nlayers = 3\n'},
        {"space_content": "scales = 3\nworkload = [1]\n"},
        {"space_content": "is no TOML"},
        {"dataset": "owner/name", "tokenizer": "owner/name", "model": "owner/name"},
        {"dataset": "python-docs", "tokenizer": "bpe", "model": "gpt"},
        {"model": "llama-0a1b2c", "model_config": {"model_type": "llama"}},
    ],
    ids=str,
)
def test_a_search_that_names_no_file_may_run_anywhere(settings):
    assert file_not_here(settings, SubmissionRules(storage="sqlite://")) is None


def test_a_function_of_a_model_is_looked_for_in_the_folders_for_code(tmp_path):
    (tmp_path / "net.py").touch()
    rules = SubmissionRules(storage="sqlite://", code_folders=(str(tmp_path),))
    assert file_not_here({"model": "net.py:make"}, rules) is None
    assert file_not_here({"model": "other.py:make"}, rules) == "other.py"
