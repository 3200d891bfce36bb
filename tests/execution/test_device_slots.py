"""Device slots: one trial at a time, over processes and users, until its last process has ended."""

import os
import re
import signal
import socket
import threading
import time
import uuid
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace

import pytest

from autotune.analysis.pick import DEFAULT_PREFERENCES
from autotune.errors import Stopped, StorageUnavailable
from autotune.execution.device_slots import (
    DeviceSlots,
    container_isolation_note,
    describe_slot_scope,
    device_node,
)
from autotune.execution.local import LocalExecutor
from autotune.execution.process.request import MAX_SLOT_HOLDERS, _hold_slot
from autotune.execution.server import socket_lock
from autotune.spec.result import DeviceInfo
from autotune.study.events import WaitingForDevice
from autotune.study.progress import Progress
from autotune.study.request import SearchRequest
from autotune.study.search import _device_warnings

CPU = DeviceInfo(device="cpu", name="a CPU", total_memory_bytes=2**30, versions={})
NOBODY = 65534


class Waited(Exception):
    pass


def give_up():
    raise Waited


@pytest.fixture
def our(monkeypatch):
    """our(device) is a device whose locks, shared by all users, no other test has."""
    monkeypatch.delenv("AUTOTUNE_LOCK_FOLDER", raising=False)
    own = uuid.uuid4().hex[:8]
    return lambda device=CPU: replace(device, uuid=f"{device.uuid or device.device}-{own}")


@pytest.fixture(params=["sockets", "files"])
def slots_on(request, our, tmp_path):
    """slots_on(device, places=2) are the slots of one search."""

    def make(device=CPU, **options):
        if request.param == "files":
            return DeviceSlots(device, folder=tmp_path, **options)
        return DeviceSlots(our(device), **options)

    return make


@pytest.fixture
def sockets_of(our):
    """sockets_of(places=2) are the slots of one search, with the locks that all users share."""
    return lambda device=CPU, **options: DeviceSlots(our(device), **options)


@contextmanager
def forked(run):
    """A process that has called `run`, holds what that returned, and now waits for its end."""
    done, doing = os.pipe()
    pid = os.fork()
    if pid == 0:
        with suppress(BaseException):
            held = run()
            os.write(doing, b"1")
            time.sleep(600)
            del held
        os._exit(1)
    os.close(doing)
    try:
        assert os.read(done, 1) == b"1"
        yield
    finally:
        os.close(done)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def begun(slots):
    """Acquires the slot, which is held as long as what this returns."""
    slot = slots.slot(give_up)
    slot.__enter__()
    return slot


def test_one_search_has_the_slot_at_a_time(slots_on):
    with slots_on().slot(give_up), pytest.raises(Waited), slots_on().slot(give_up):
        pass


def test_the_slot_is_free_again_afterwards(slots_on):
    with slots_on().slot(give_up):
        pass
    with slots_on().slot(give_up):
        pass


def test_the_slot_is_free_again_after_an_error(slots_on):
    with pytest.raises(KeyError), slots_on().slot(give_up):
        raise KeyError
    with slots_on().slot(give_up):
        pass


def test_as_many_slots_as_places_can_be_held_at_a_time(slots_on):
    searches = [slots_on(places=2) for _ in range(3)]
    with (
        searches[0].slot(give_up),
        searches[1].slot(give_up),
        pytest.raises(Waited),
        searches[2].slot(give_up),
    ):
        pass


def test_who_is_to_be_alone_waits_for_all_slots(slots_on):
    for held in range(1, 3):
        searches = [begun(slots_on(places=3)) for _ in range(held)]
        with pytest.raises(Waited), slots_on(places=3).slot(give_up, alone=True):
            pass
        for search in searches:
            search.__exit__(None, None, None)
    with slots_on(places=3).slot(give_up, alone=True):
        pass


def test_nobody_gets_a_slot_beside_who_is_alone_and_all_are_free_afterwards(slots_on):
    with slots_on(places=2).slot(give_up, alone=True):
        with pytest.raises(Waited), slots_on(places=2).slot(give_up):
            pass
        with pytest.raises(Waited), slots_on(places=2).slot(give_up, alone=True):
            pass
    assert [begun(slots_on(places=2)) for _ in range(2)]


def test_who_is_to_be_alone_waits_for_a_trial_that_still_runs_in_any_slot(slots_on):
    first, second = begun(slots_on(places=2)), slots_on(places=2).slot(give_up)
    lock = second.__enter__()
    with forked(lambda: _hold_slot(lock)):
        first.__exit__(None, None, None)
        second.__exit__(None, None, None)
        with pytest.raises(Waited), slots_on(places=2).slot(give_up, alone=True):
            pass
        with slots_on(places=2).slot(give_up):
            pass


@pytest.mark.parametrize(("one", "other"), [(1, 4), (4, 1), (2, 3)])
def test_a_search_with_another_number_of_slots_waits_until_all_are_free(slots_on, one, other):
    first, second = begun(slots_on(places=one)), None
    if one > 1:
        second = begun(slots_on(places=one))
        first.__exit__(None, None, None)  # the last slot that is held is not the first one
    with pytest.raises(Waited), slots_on(places=other).slot(give_up):
        pass
    with pytest.raises(Waited), slots_on(places=other).slot(give_up, alone=True):
        pass
    (second or first).__exit__(None, None, None)
    with slots_on(places=other).slot(give_up):
        pass


def test_no_further_slot_is_granted_beside_a_waiting_search_with_another_number(slots_on):
    begun_before, waits = begun(slots_on(places=4)), threading.Event()

    def wait_for_it():
        with suppress(Waited), slots_on(places=1).slot(pause):
            pass

    def pause():
        waits.set()
        time.sleep(0.001)

    waiting = threading.Thread(target=wait_for_it)
    waiting.start()
    assert waits.wait(10)
    with pytest.raises(Waited), slots_on(places=4).slot(give_up):
        pass
    begun_before.__exit__(None, None, None)
    waiting.join(10)
    with slots_on(places=4).slot(give_up):
        pass


def test_trials_of_a_killed_search_with_another_number_of_slots_are_waited_for(slots_on):
    first, second = begun(slots_on(places=2)), slots_on(places=2).slot(give_up)
    lock = second.__enter__()
    with forked(lambda: _hold_slot(lock)):
        first.__exit__(None, None, None)
        second.__exit__(None, None, None)
        with pytest.raises(Waited), slots_on().slot(give_up):
            pass
    with slots_on().slot(give_up):
        pass


@pytest.mark.parametrize("places", [1, 2])
@pytest.mark.parametrize("name", ["0.turn", "1.of.4", "0.of.4.trials.0", "0.of.1.trials.3"])
def test_locks_of_an_earlier_autotune_on_the_machine_are_waited_for(our, name, places):
    device = our()
    held = socket_lock.acquire(f"autotune/{device.uuid}/{name}")
    with pytest.raises(Waited), DeviceSlots(device, places=places).slot(give_up):
        pass
    os.close(held)
    with DeviceSlots(device, places=places).slot(give_up):
        pass


def test_trials_of_two_searches_run_on_the_cpus_of_their_slots(our, tmp_path):
    used = []
    with ExitStack() as held:
        for _ in range(2):
            executor = held.enter_context(LocalExecutor(tmp_path))
            executor.cpus, executor.cpus_of_slots = (0,), [(0,), (1,)]
            held.enter_context(executor.slot(our(), places=2, on_wait=lambda holder: None))
            used.append(executor.cpus)
    assert used == [(0,), (1,)]


def test_another_device_has_separate_slots(slots_on):
    other = DeviceInfo(
        device="cuda:1", name="a GPU", total_memory_bytes=2**30, versions={}, uuid="GPU-1"
    )
    with slots_on().slot(give_up), slots_on(other).slot(give_up):
        pass


def test_a_device_that_changes_its_index_is_still_the_same(slots_on):
    names = ("cuda:0", "cuda:1")
    one, other = (
        DeviceInfo(device=name, name="a GPU", total_memory_bytes=2**30, versions={}, uuid="GPU-7")
        for name in names
    )
    with slots_on(one).slot(give_up), pytest.raises(Waited), slots_on(other).slot(give_up):
        pass


def test_the_slot_of_a_killed_process_is_free(slots_on):
    with forked(lambda: begun(slots_on())), pytest.raises(Waited), slots_on().slot(give_up):
        pass
    with slots_on().slot(give_up):
        pass


def test_a_process_forked_while_a_slot_is_held_does_not_hold_it(slots_on):
    """It may outlive the slot, as workers of a user's program that calls autotune.search do."""
    slot = begun(slots_on())
    with forked(lambda: None):
        slot.__exit__(None, None, None)
        with slots_on().slot(give_up):
            pass


def test_a_slot_is_not_granted_while_a_trial_of_the_last_holder_still_runs(slots_on):
    slot = slots_on().slot(give_up)
    held = slot.__enter__()
    with forked(lambda: _hold_slot(held)):
        slot.__exit__(None, None, None)
        with pytest.raises(Waited), slots_on().slot(give_up):
            pass
    with slots_on().slot(give_up):
        pass


def test_a_slot_is_not_granted_while_a_fork_of_a_trial_still_runs(slots_on):
    end, go_on = os.pipe()

    def trial():
        _hold_slot(held)
        if os.fork() == 0:
            os.close(go_on)
            os.read(end, 1)  # until the test closes its end
            os._exit(0)

    slot = slots_on().slot(give_up)
    held = slot.__enter__()
    with forked(trial):
        slot.__exit__(None, None, None)
    with pytest.raises(Waited), slots_on().slot(give_up):
        pass
    os.close(go_on)
    waited = []
    with slots_on().slot(lambda: waited.append(time.sleep(0.001))):
        assert len(waited) < 10_000


def test_a_trial_holds_the_slot_together_with_one_that_could_not_be_ended(slots_on):
    slot = slots_on().slot(give_up)
    held = slot.__enter__()
    left_over = forked(lambda: [_hold_slot(held) for _ in range(MAX_SLOT_HOLDERS - 1)])
    left_over.__enter__()
    with forked(lambda: _hold_slot(held)):
        slot.__exit__(None, None, None)
        left_over.__exit__(None, None, None)
        with pytest.raises(Waited), slots_on().slot(give_up):
            pass


def test_a_waiting_search_comes_before_one_that_has_just_had_the_slot(slots_on):
    first, second = slots_on(), slots_on()
    order, waits = [], threading.Event()

    def wait_for_it():
        def pause():
            waits.set()
            time.sleep(0.001)

        with second.slot(pause):
            order.append("second")

    with first.slot(give_up):
        waiting = threading.Thread(target=wait_for_it)
        waiting.start()
        assert waits.wait(10)
    with first.slot(lambda: time.sleep(0.001)):
        order.append("first")
    waiting.join(10)
    assert order == ["second", "first"]


def test_slots_that_were_given_back_leave_no_file_open(slots_on):
    before = len(os.listdir("/proc/self/fd"))
    with slots_on().slot(give_up):
        pass
    assert len(os.listdir("/proc/self/fd")) == before


# -- all users -------------------------------------------------------------------------------------


def become_nobody():
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)


as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


@as_root
def test_a_search_waits_for_the_slot_of_another_user(sockets_of):
    def other():
        become_nobody()
        return begun(sockets_of())

    with forked(other), pytest.raises(Waited), sockets_of().slot(give_up):
        pass
    with sockets_of().slot(give_up):
        pass


@as_root
def test_another_user_waits_for_the_slot_of_this_one(sockets_of):
    def other():
        become_nobody()
        with pytest.raises(Waited):
            begun(sockets_of())

    with sockets_of().slot(give_up), forked(other):
        pass


@as_root
def test_a_search_waits_for_a_trial_of_another_user_that_still_runs(sockets_of):
    slot = sockets_of().slot(give_up)
    held = slot.__enter__()

    def other():
        become_nobody()
        _hold_slot(held)

    with forked(other):
        slot.__exit__(None, None, None)
        with pytest.raises(Waited), sockets_of().slot(give_up):
            pass


def test_a_waiting_search_learns_once_whom_it_waits_for(sockets_of, our, tmp_path):
    looks, said = [], []
    executor = LocalExecutor(tmp_path, should_stop=lambda: len(looks) > 1 or looks.append(1))
    with (
        sockets_of().slot(give_up),
        pytest.raises(Stopped),
        executor.slot(our(), on_wait=said.append),
    ):
        pass
    (holder,) = said
    assert holder.startswith(f"process {os.getpid()} of user ")


@pytest.mark.parametrize("places", [1, 2])
def test_a_search_that_waits_learns_whose_slot_it_waits_for(slots_on, places):
    waiting = slots_on()
    with forked(lambda: begun(slots_on(places=places))):
        with pytest.raises(Waited), waiting.slot(give_up):
            pass
        assert re.match(r"process \d+ of user ", waiting.holder())
        assert f"process {os.getpid()} " not in waiting.holder()


def test_a_search_that_waits_in_the_queue_learns_whom_it_waits_for(our):
    device = our()
    line = socket_lock.acquire(f"autotune/{device.uuid}/line")
    waiting = DeviceSlots(device)
    with pytest.raises(Waited), waiting.slot(give_up):
        pass
    assert waiting.holder().startswith(f"process {os.getpid()} of user ")
    os.close(line)


def test_a_search_that_waits_learns_since_when_the_other_runs(our):
    device = our()
    line = socket_lock.acquire(f"autotune/{device.uuid}/line")
    waiting = DeviceSlots(device)
    with pytest.raises(Waited), waiting.slot(give_up):
        pass
    _, _, since = waiting.holder().partition(", which runs since ")
    began = time.mktime(time.strptime(since, "%Y-%m-%d %H:%M"))
    assert 0 <= time.time() - began < 3600
    os.close(line)


def test_the_owner_of_a_trial_that_still_runs_is_reported(sockets_of):
    slot = sockets_of().slot(give_up)
    held = slot.__enter__()
    waiting = sockets_of()
    with forked(lambda: _hold_slot(held)):
        slot.__exit__(None, None, None)
        with pytest.raises(Waited), waiting.slot(give_up):
            pass
        assert waiting.holder().startswith("process ")
        assert f"process {os.getpid()} " not in waiting.holder()


def test_the_display_says_for_whom_a_search_waits():
    progress = Progress(preferences=DEFAULT_PREFERENCES)
    progress.note(WaitingForDevice(device="cpu", holder="process 17 of user ada"))
    assert (
        progress.meanwhile
        == "waiting for cpu, which another trial is using (process 17 of user ada)"
    )


# -- the device's node -----------------------------------------------------------------------------


@pytest.fixture
def node(tmp_path):
    """A file instead of /dev/nvidia0."""
    (tmp_path / "node").touch()
    return tmp_path / "node"


@pytest.fixture
def far_apart(sockets_of, node):
    """far_apart(1) are slots on the same node, whose sockets another number does not see."""

    def make(number, **options):
        device = DeviceInfo(
            device="cuda:0", name="", total_memory_bytes=1, versions={}, uuid=f"GPU-{number}"
        )
        return sockets_of(device, node=node, **options)

    return make


def test_searches_that_see_only_the_same_node_wait_for_each_other(far_apart):
    with far_apart(1).slot(give_up), pytest.raises(Waited), far_apart(2).slot(give_up):
        pass
    with far_apart(2).slot(give_up):
        pass


def test_those_that_allow_several_trials_share_the_node(far_apart):
    with far_apart(1, places=2).slot(give_up), far_apart(2, places=2).slot(give_up):
        pass


def test_one_that_allows_a_single_trial_does_not_share_the_node(far_apart):
    with far_apart(1, places=2).slot(give_up), pytest.raises(Waited), far_apart(2).slot(give_up):
        pass


def test_who_is_alone_does_not_share_the_node(far_apart):
    with (
        far_apart(1, places=2).slot(give_up, alone=True),
        pytest.raises(Waited),
        far_apart(2, places=2).slot(give_up),
    ):
        pass


def test_a_link_instead_of_the_node_is_ignored(far_apart, node):
    node.rename(node.with_name("elsewhere"))
    node.symlink_to(node.with_name("elsewhere"))
    with far_apart(1).slot(give_up), far_apart(2).slot(give_up):
        pass


@pytest.mark.parametrize("uuid", [None, "GPU-that-is-not-there"])
def test_what_the_driver_does_not_know_has_no_node(uuid):
    assert device_node(replace(CPU, uuid=uuid)) is None


# -- lock files ------------------------------------------------------------------------------------


def test_lock_files_are_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("AUTOTUNE_LOCK_FOLDER", str(tmp_path / "locks"))
    with DeviceSlots(CPU).slot(give_up), pytest.raises(Waited), DeviceSlots(CPU).slot(give_up):
        pass
    assert "cpu.0.turn" in os.listdir(tmp_path / "locks")


def test_a_lock_folder_that_cannot_be_used_is_named_in_one_sentence(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("AUTOTUNE_LOCK_FOLDER", str(tmp_path / "file"))
    with pytest.raises(
        StorageUnavailable, match=f"cannot be stored in {tmp_path / 'file'}: File exists"
    ):
        DeviceSlots(CPU)


def test_a_link_instead_of_a_lock_file_is_not_followed(tmp_path):
    (tmp_path / "cpu.line").symlink_to(tmp_path / "elsewhere")
    with (
        pytest.raises(StorageUnavailable, match=r"cpu\.line"),
        DeviceSlots(CPU, folder=tmp_path).slot(give_up),
    ):
        pass
    assert not (tmp_path / "elsewhere").exists()


def test_a_device_that_calls_itself_a_path_has_its_locks_in_the_folder_all_the_same(tmp_path):
    folder = tmp_path / "locks"
    folder.mkdir()
    with DeviceSlots(replace(CPU, uuid="../../outside"), folder=folder).slot(give_up):
        pass
    assert os.listdir(tmp_path) == ["locks"]


@pytest.fixture
def no_sockets(our, monkeypatch, tmp_path):
    """A system without Unix sockets, and the user's folders."""
    monkeypatch.setattr(socket, "AF_UNIX", 4711)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def test_without_sockets_the_locks_are_files_of_the_user_and_one_note_says_so(
    no_sockets,
):
    notes = []
    with (
        DeviceSlots(CPU, note=notes.append).slot(give_up),
        pytest.raises(Waited),
        DeviceSlots(CPU).slot(give_up),
    ):
        pass
    assert notes == [
        "searches of other users do not wait for this one on cpu: "
        "there are no abstract Unix sockets "
        "(Address family not supported by protocol)"
    ]


def test_without_sockets_a_planted_folder_is_named_with_the_way_out(no_sockets):
    (no_sockets / "cache" / "autotune").mkdir(parents=True)
    (no_sockets / "cache" / "autotune").chmod(0o777)
    with pytest.raises(StorageUnavailable, match=r"cache/autotune is open to others") as raised:
        DeviceSlots(CPU)
    assert "let AUTOTUNE_LOCK_FOLDER name a folder" in raised.value.hint


def test_the_note_that_other_users_are_not_waited_for_appears_once_a_command(no_sockets):
    notes = []
    with LocalExecutor(no_sockets / "work", note=notes.append) as executor:
        for _ in range(2):
            with executor.slot_on(CPU):
                pass
        with executor.slot(CPU, places=2, on_wait=notes.append):
            pass
    (note,) = notes
    assert note.startswith("searches of other users do not wait for this one on cpu: there are no")


def test_sockets_that_the_system_does_not_list_are_no_locks(no_sockets, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(no_sockets / "cache"))
    monkeypatch.delenv("AUTOTUNE_LOCK_FOLDER", raising=False)
    monkeypatch.setattr(socket_lock, "names_after", lambda prefix: [])
    notes = []
    with (
        DeviceSlots(CPU, places=2, note=notes.append).slot(give_up),
        pytest.raises(Waited),
        DeviceSlots(CPU).slot(give_up),
    ):
        pass
    assert "the system does not list them" in notes[0]


# -- whose searches are waited for, in words -------------------------------------------------------

GPU = replace(CPU, device="cuda:0", uuid="GPU-of-no-machine", context_bytes=2**29)


def test_the_reach_of_the_slots_is_described(our, monkeypatch, tmp_path):
    assert describe_slot_scope(CPU).startswith("all searches of this machine; those in a container")
    monkeypatch.setenv("AUTOTUNE_LOCK_FOLDER", str(tmp_path))
    assert (
        describe_slot_scope(CPU)
        == f"searches whose AUTOTUNE_LOCK_FOLDER is {tmp_path}, and no others"
    )


def test_without_sockets_the_reach_excludes_other_users(no_sockets):
    assert "this user's searches; others are not waited for" in describe_slot_scope(CPU)


def test_a_search_on_a_gpu_without_a_node_says_that_containers_do_not_see_it(our):
    assert container_isolation_note(GPU) == (
        "of the searches on cuda:0 those in a container with its own network "
        "are not waited for: "
        "it has no device node"
    )


def test_there_is_no_note_about_containers_for_a_cpu_or_a_chosen_lock_folder(
    our, monkeypatch, tmp_path
):
    assert container_isolation_note(CPU) == ""
    monkeypatch.setenv("AUTOTUNE_LOCK_FOLDER", str(tmp_path))
    assert container_isolation_note(GPU) == ""


def test_a_note_says_that_several_trials_share_the_gpu(our, monkeypatch, tmp_path):
    monkeypatch.setenv("AUTOTUNE_LOCK_FOLDER", str(tmp_path))
    assert list(_device_warnings(GPU, SearchRequest(trials_per_device=1))) == []
    (sentence,) = _device_warnings(GPU, SearchRequest(trials_per_device=3))
    assert sentence.startswith(
        "3 trials at a time share cuda:0: their speeds are those of sharing it"
    )
    assert list(_device_warnings(CPU, SearchRequest(trials_per_device=3))) == []
