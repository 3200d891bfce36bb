"""The queue of a service, on both kinds of databases."""

import sqlite3
from contextlib import closing

import pytest
from sqlalchemy import select, update

from autotune.analysis.queue_order import DeviceGroup
from autotune.errors import SearchConflict, StorageUnavailable, UnknownSearch, UnknownStudy
from autotune.spec.queued_search import MOST_LOSSES, SearchEnd, SearchProcess
from autotune.storage.leases import LeaseLost
from autotune.storage.searches import NewSearch, Searches
from autotune.storage.servers import RunningServer, Servers
from autotune.storage.store import StudyStore
from autotune.storage.tables import REVISION, SEARCHES, SERVER, SERVERS, USES, VERSION
from tests.building.studies import definition, open_store

PROCESS = SearchProcess(host="here", pid=17, started_at=1000.0)
FINISHED = SearchEnd(state="finished", exit_code=0)
SERVER_STOPS = SearchEnd(state="queued", reason="the server stops")


@pytest.fixture
def database(store_url):
    with closing(StudyStore(store_url, create=True)) as store:
        yield store.database


@pytest.fixture
def queue(database):
    return Searches(database)


@pytest.fixture
def epoch(queue):
    return queue.take_lead("a server", version="1")


def submit(queue, **changes):
    settings = {"request": {"trials": 3}, "submitted_by": "ada", **changes}
    return queue.submit(NewSearch(**settings))[0]


def claim(queue, name="default", **of_group):
    return queue.claim_next(DeviceGroup(machine="here", name=name, **of_group), version="1")


def renew(queue, search, *, events=(), after=0, **said):
    """Give a sign of life as the process of a search does, with what else it says."""
    said = {"progress": {}, "study": search.study, "has_results": False, **said}
    return queue.renew_run(search.id, search.run, events=events, after=after, **said)


def test_a_search_whose_files_a_machine_lacks_waits_and_says_so_while_others_run_there(queue):
    first, second = submit(queue), submit(queue)
    here = DeviceGroup(machine="here")
    lacking = {first.id: "it waits for a worker with /data/text.txt"}
    assert queue.claim_next(here, version="1", lacking=lacking).id == second.id
    assert queue.get(first.id).reason == "it waits for a worker with /data/text.txt"
    there = queue.claim_next(DeviceGroup(machine="there"), version="1")
    assert (there.id, there.reason) == (first.id, "")


def present(database, *groups, digest="d"):
    """Have a worker there with some groups of devices."""
    known = {"digest": digest, "owner_digest": "", "address": f"http://{digest}"}
    Servers(database).renew(RunningServer(**known, host="here", groups=groups))


def lose(queue, search, reason="gone"):
    """Give up the process of a search, as a worker of its machine does."""
    end = SearchEnd(state="queued", reason=reason, is_loss=True)
    return queue.end_lost_run(search.id, search.run, end)


def positions(queue):
    return {number: place.position for number, place in queue.places().items()}


def kinds(queue):
    return [event.kind for event in queue.events_after(0)]


def changed(database, number, **values):
    """Write columns of a search as nothing else does, such as a moment in the past."""
    with database.writing() as connection:
        connection.execute(update(SEARCHES).where(SEARCHES.c.id == number).values(**values))


# -- submissions -----------------------------------------------------------------------------------


def test_a_study_without_a_name_is_called_after_the_number_of_its_search(queue):
    search = submit(queue, study_base="quick-gpt")
    assert search.study == f"quick-gpt-{search.id}"


def test_a_repeated_key_returns_the_first_search(queue):
    new = NewSearch(request={}, submitted_by="ada", key="k", digest="d")
    first, is_new = queue.submit(new)
    again, is_new_again = queue.submit(new)
    assert (is_new, is_new_again) == (True, False)
    assert again == first


def test_a_repeated_key_with_another_content_is_a_conflict(queue):
    queue.submit(NewSearch(request={}, submitted_by="ada", key="k", digest="d"))
    with pytest.raises(SearchConflict, match="with other settings"):
        queue.submit(NewSearch(request={}, submitted_by="ada", key="k", digest="e"))


def test_people_take_turns_within_a_priority(queue):
    """Twelve searches of one person do not go before everybody's next."""
    of_ada = [submit(queue).id for _ in range(3)]
    of_bob = [submit(queue, submitted_by="bob").id for _ in range(2)]
    first_of_all = submit(queue, submitted_by="cid", priority=1).id
    order = [first_of_all, of_ada[0], of_bob[0], of_ada[1], of_bob[1], of_ada[2]]
    assert [search.id for search in queue.find(order=queue.places())[0]] == order
    begun = []
    while (search := claim(queue)) is not None:
        begun.append(search.id)
        queue.end_run(search.id, search.run, SearchEnd(state="finished"))
    assert begun == order


def test_whoever_has_a_search_running_lets_others_go_before(queue):
    running, next_of_ada = submit(queue), submit(queue)
    assert claim(queue).id == running.id
    of_bob = submit(queue, submitted_by="bob")
    assert claim(queue, "other").id == of_bob.id
    assert positions(queue) == {next_of_ada.id: 1}


def test_who_removes_their_ended_searches_keeps_their_turn(queue):
    for person in ("bob", "ada"):
        submit(queue, submitted_by=person)
        search = claim(queue)
        queue.end_run(search.id, search.run, FINISHED)
    queue.remove(search.id)  # of ada, who had the last turn
    submit(queue)
    of_bob = submit(queue, submitted_by="bob")
    assert claim(queue).id == of_bob.id


def test_a_search_that_goes_on_takes_no_new_turn(queue):
    """A start after a loss is not that of a search which others have waited for."""
    submit(queue)
    search = claim(queue)
    submit(queue, submitted_by="bob")
    of_bob = claim(queue, "right")
    queue.end_run(search.id, search.run, SERVER_STOPS)
    again = claim(queue)
    for each in (of_bob, again):
        queue.end_run(each.id, each.run, FINISHED)
    submit(queue, submitted_by="bob")
    of_ada = submit(queue)
    assert claim(queue).id == of_ada.id


def test_a_person_at_the_limit_of_running_searches_waits_and_others_do_not(queue):
    queue.take_lead("a server", version="1", limits={"most_running_of_person": 1})
    submit(queue), submit(queue)
    of_bob = submit(queue, submitted_by="bob")
    assert claim(queue, "one") is not None
    assert claim(queue, "two").id == of_bob.id
    assert claim(queue, "three") is None


def test_a_person_at_the_limit_of_queued_searches_submits_no_more_and_others_do(queue):
    new = NewSearch(request={}, submitted_by="ada")
    queue.submit(new, most_of_person=1)
    with pytest.raises(SearchConflict, match="1 searches of ada wait in the queue"):
        queue.submit(new, most_of_person=1)
    queue.submit(NewSearch(request={}, submitted_by="bob"), most_of_person=1)


def test_a_full_queue_takes_no_more(queue, monkeypatch):
    monkeypatch.setattr("autotune.storage.searches.MOST_QUEUED", 2)
    submit(queue), submit(queue)
    with pytest.raises(SearchConflict, match="the queue is full"):
        submit(queue)


def test_the_longest_key_of_the_longest_name_is_stored(queue):
    key = f"{'n' * 100}:{'k' * 200}"
    first = submit(queue, key=key)
    assert submit(queue, key=key) == first


def test_a_number_that_no_search_has_is_unknown(queue):
    for number in (0, -1, 7, 2**31, 2**70):
        with pytest.raises(UnknownSearch):
            queue.get(number)


# -- the order -------------------------------------------------------------------------------------


def test_the_highest_priority_begins_first_and_among_equals_the_oldest(queue):
    numbers = [submit(queue, priority=priority).id for priority in (0, 5, 5, -1)]
    order = []
    while (search := claim(queue)) is not None:
        queue.begin_run(search.id, search.run, PROCESS, version="1")
        queue.end_run(search.id, search.run, FINISHED)
        order.append(search.id)
    assert order == [numbers[1], numbers[2], numbers[0], numbers[3]]


def test_the_list_shows_the_queue_in_the_order_in_which_it_begins(queue):
    numbers = [submit(queue, priority=priority).id for priority in (0, 5, 1)]
    found, total = queue.find(order=queue.places())
    assert [search.id for search in found] == [numbers[1], numbers[2], numbers[0]]
    assert total == 3
    assert positions(queue) == {numbers[1]: 1, numbers[2]: 2, numbers[0]: 3}


def test_a_group_runs_one_search_at_a_time(queue):
    submit(queue)
    submit(queue)
    assert claim(queue) is not None
    assert claim(queue) is None


def test_another_group_runs_the_next_search(queue):
    submit(queue)
    second = submit(queue)
    claim(queue, "a")
    assert claim(queue, "b").id == second.id


def test_a_search_for_one_group_waits_for_it(queue):
    search = submit(queue, group="b")
    assert claim(queue, "a") is None
    assert claim(queue, "b").id == search.id


def test_two_machines_run_a_search_each_on_groups_of_one_name(queue):
    submit(queue)
    second = submit(queue)
    assert claim(queue) is not None
    other = queue.claim_next(DeviceGroup(machine="there"), version="1")
    assert (other.id, other.host) == (second.id, "there")


H100 = {"type": "cuda", "kind": "NVIDIA H100 80GB HBM3"}


@pytest.mark.parametrize(
    ("kind", "group", "is_taken"),
    [
        ("h100", H100, True),
        ("cuda", H100, True),
        (" cuda ", H100, True),
        ("cpu", H100, False),
        ("A100", H100, False),
        ("cpu", {"type": "cpu", "kind": "AMD EPYC"}, True),
        ("H100", {}, False),
        ("cuda", {}, False),
        ("", {}, True),
    ],
)
def test_a_search_runs_on_the_kind_of_device_that_it_names(queue, kind, group, is_taken):
    """A group of which no kind is known, such as a cluster's, takes those that name none."""
    search = submit(queue, request={"kind": kind})
    claimed = claim(queue, **group)
    assert (claimed is not None and claimed.id == search.id) == is_taken


def test_a_search_of_a_kind_that_nobody_has_waits_and_says_so(queue, database):
    present(database, DeviceGroup(machine="here", type="cpu", kind="AMD EPYC"))
    number = submit(queue, request={"kind": "NVIDIA H100"}, budget_seconds=60.0).id
    place = queue.places()[number]
    assert place.waits_for == "a worker with NVIDIA H100, and none is there"
    assert place.begins_in_seconds is None


def test_a_study_goes_on_where_devices_are_of_its_model(queue, store_url):
    with open_store(store_url) as store:
        store.create_study(definition("begun"), trials_wanted=3)  # on `a CPU`
    search = submit(queue, study="begun", submitted_by="owner")
    assert claim(queue, type="cpu", kind="another CPU") is None
    assert claim(queue, type="cpu", kind="a CPU").id == search.id


def test_a_study_goes_on_where_no_kind_is_known_if_nobody_has_its_model(queue, database, store_url):
    with open_store(store_url) as store:
        store.create_study(definition("begun"), trials_wanted=3)  # on `a CPU`
    search = submit(queue, study="begun", submitted_by="owner")
    cluster = DeviceGroup(machine="here", name="cluster")
    present(database, cluster, DeviceGroup(machine="here", type="cpu", kind="a CPU"))
    assert claim(queue, "cluster") is None
    present(database, cluster, DeviceGroup(machine="here", type="cpu", kind="another CPU"))
    assert claim(queue, "cluster").id == search.id


def test_a_search_of_more_devices_than_a_group_has_waits_for_a_larger_one(queue, database):
    present(database, DeviceGroup(machine="here", slots=2))
    search = submit(queue, request={"devices": 4})
    assert claim(queue, slots=2) is None
    assert queue.places()[search.id].waits_for == "a worker with 4 devices, and none is there"
    assert claim(queue, slots=4).id == search.id


def test_a_search_whose_trials_use_several_gpus_needs_a_group_with_them(queue):
    search = submit(queue, request={"devices_per_trial": 4})
    assert claim(queue, type="cuda", slots=2) is None
    assert claim(queue, type="cuda", slots=4).id == search.id


def test_a_search_whose_trials_use_several_nodes_waits_for_a_cluster(queue, database):
    present(database, DeviceGroup(machine="here", slots=8))
    search = submit(queue, request={"devices_per_trial": 4, "nodes_per_trial": 2})
    assert claim(queue, slots=8) is None
    assert queue.places()[search.id].waits_for == "a worker with a Ray cluster, and none is there"
    assert claim(queue, slots=8, is_cluster=True).id == search.id


def test_the_groups_of_all_workers_are_told_once(queue, database):
    here, there = DeviceGroup(machine="here"), DeviceGroup(machine="there", kind="NVIDIA H200")
    present(database, here, digest="a")
    present(database, here, there, digest="b")
    assert queue.groups() == [here, there]


def test_groups_that_somebody_has_damaged_are_none(queue, database):
    present(database, DeviceGroup(machine="here"))
    with database.writing() as connection:
        connection.execute(update(SERVERS).values(device_groups=[{"name": 7}]))
    assert queue.groups() == []


def test_a_priority_can_be_changed_until_the_search_ends(queue):
    first, second = submit(queue), submit(queue)
    queue.set_priority(second.id, 9)
    assert claim(queue).id == second.id
    queue.cancel(first.id, by="ada")
    with pytest.raises(SearchConflict, match="has ended"):
        queue.set_priority(first.id, 1)


# -- the end ---------------------------------------------------------------------------------------


def test_a_queued_search_is_cancelled_at_once(queue):
    search = queue.cancel(submit(queue).id, by="bob")
    assert (search.state, search.reason) == ("cancelled", "cancelled by bob")


def test_a_running_search_is_told_to_stop_by_its_next_sign_of_life(queue):
    submit(queue)
    search = claim(queue)
    queue.begin_run(search.id, search.run, PROCESS, version="1")
    assert renew(queue, search) is False
    assert queue.cancel(search.id, by="bob").state == "running"
    assert renew(queue, search) is True
    queue.end_run(search.id, search.run, SearchEnd(state="cancelled"))
    assert queue.get(search.id).reason == "cancelled by bob"


def test_a_search_that_stops_for_a_cancelled_one_to_be_resumed_is_cancelled(queue):
    submit(queue)
    search = claim(queue)
    queue.cancel(search.id, by="bob")
    queue.end_run(search.id, search.run, SERVER_STOPS)
    assert queue.get(search.id).state == "cancelled"


def test_an_ended_search_cannot_be_cancelled_and_can_be_removed(queue):
    submit(queue)
    search = claim(queue)
    with pytest.raises(SearchConflict, match="cancel it before"):
        queue.remove(search.id)
    queue.end_run(search.id, search.run, FINISHED)
    with pytest.raises(SearchConflict, match="is finished"):
        queue.cancel(search.id, by="bob")
    queue.remove(search.id)
    with pytest.raises(UnknownSearch):
        queue.get(search.id)


def test_the_number_of_a_removed_search_is_not_given_again(queue):
    first = submit(queue)
    queue.cancel(first.id, by="ada")
    queue.remove(first.id)
    assert submit(queue).id > first.id


# -- losses ----------------------------------------------------------------------------------------


def test_a_search_whose_process_is_lost_is_first_in_the_queue_again(queue, database):
    submit(queue)
    submit(queue, priority=100)
    search = claim(queue)
    lost = lose(queue, search, "killed by SIGKILL")
    assert (lost.state, lost.losses, lost.reason) == ("queued", 1, "killed by SIGKILL")
    changed(database, search.id, not_before=0.0)
    again = claim(queue)
    assert (again.id, again.run) == (search.id, 2)


def test_only_a_process_whose_lease_was_not_renewed_is_ended_from_elsewhere(queue, database):
    submit(queue)
    search = claim(queue)
    end = SearchEnd(state="queued", reason="no sign of life", is_loss=True)
    watched = search.lease_until
    changed(database, search.id, lease_until=watched + 2.0)
    assert queue.end_lost_run(search.id, search.run, end, unrenewed_since=watched) is None
    lost = queue.end_lost_run(search.id, search.run, end, unrenewed_since=watched + 2.0)
    assert lost.state == "queued"
    assert queue.end_lost_run(search.id, search.run, end, unrenewed_since=watched + 2.0) is None


def test_a_search_that_is_lost_too_often_fails_with_the_reason(queue, database):
    number = submit(queue).id
    for _ in range(MOST_LOSSES + 1):
        changed(database, number, not_before=0.0)
        search = claim(queue)
        lose(queue, search, "killed by SIGKILL")
    search = queue.get(number)
    assert search.state == "failed"
    assert "killed by SIGKILL" in search.reason


def test_results_end_the_count_of_losses(queue, database):
    number = submit(queue).id
    search = claim(queue)
    lose(queue, search)
    changed(database, number, not_before=0.0)
    search = claim(queue)
    renew(queue, search, has_results=True)
    assert queue.get(number).losses == 0


def test_a_process_that_was_given_up_changes_nothing_any_more(queue, database):
    submit(queue)
    search = claim(queue)
    lose(queue, search)
    changed(database, search.id, not_before=0.0)
    claim(queue)
    before, last = queue.get(search.id), queue.last_event()
    for late in (
        lambda: queue.begin_run(search.id, search.run, PROCESS, version="1"),
        lambda: renew(
            queue, search, study="other", has_results=True, events=[("notice", {})], after=0
        ),
        lambda: queue.end_run(search.id, search.run, FINISHED),
    ):
        with pytest.raises(LeaseLost):
            late()
    assert (queue.get(search.id), queue.last_event()) == (before, last)


# -- the lead --------------------------------------------------------------------------------------


def test_the_lead_is_taken_from_a_server_only_when_it_is_silent_or_dead(queue, epoch, database):
    assert queue.take_lead("another", version="1") is None
    assert queue.take_lead("another", version="1", dead_epoch=epoch) == epoch + 1
    with database.writing() as connection:
        connection.execute(update(SERVER).values(renewed_at=SERVER.c.renewed_at - 60))
    assert queue.take_lead("a third", version="1") == epoch + 2


def test_a_server_that_gives_the_lead_is_followed_at_once(queue, epoch):
    queue.give_lead(epoch)
    assert queue.take_lead("another", version="1") == epoch + 1


def test_a_server_that_was_paused_changes_nothing_when_it_wakes_up(queue, epoch):
    submit(queue)
    search = claim(queue)
    queue.take_lead("another", version="1", dead_epoch=epoch)
    before = queue.get(search.id)
    for late in (
        lambda: queue.keep_lead(epoch),
        lambda: queue.prune_events(epoch, most=0),
        lambda: queue.set_announced(epoch, [search.id]),
    ):
        with pytest.raises(LeaseLost):
            late()
    assert queue.get(search.id) == before


@pytest.mark.parametrize(
    "write",
    [
        lambda queue, epoch, search: submit(queue),
        lambda queue, epoch, search: queue.cancel(search.id, by="ada"),
        lambda queue, epoch, search: queue.keep_lead(epoch),
        lambda queue, epoch, search: queue.take_lead("another", version="1", dead_epoch=epoch),
        lambda queue, epoch, search: renew(queue, search, events=[("notice", {})]),
        lambda queue, epoch, search: queue.end_run(search.id, search.run, FINISHED),
    ],
    ids=["submit", "cancel", "keep the lead", "take the lead", "renew", "end"],
)
def test_nothing_is_written_into_a_queue_that_a_later_autotune_has_upgraded(
    queue, epoch, database, write
):
    submit(queue)
    search = claim(queue)
    with database.writing() as connection:
        connection.execute(update(VERSION).values(version_num="9999"))
    before = queue.get(search.id), queue.last_event(), queue.lead()
    with pytest.raises(StorageUnavailable, match=rf"schema 9999, .* up to {REVISION}"):
        write(queue, epoch, search)
    assert (queue.get(search.id), queue.last_event(), queue.lead()) == before


# -- events ----------------------------------------------------------------------------------------


def test_events_are_numbered_without_gaps(queue):
    submit(queue)
    search = claim(queue)
    events = [("notice", {"message": "a"}), ("notice", {})]
    renew(queue, search, events=events)
    events = queue.events_after(0)
    assert [event.number for event in events] == list(range(1, len(events) + 1))
    assert kinds(queue) == ["search", "search", "notice", "notice"]
    assert queue.last_event() == len(events)


def test_a_change_that_changes_nothing_is_no_event(queue):
    number = submit(queue).id
    queue.cancel(number, by="ada")
    before = queue.last_event()
    queue.cancel(number, by="ada")
    assert queue.last_event() == before


def test_old_events_are_removed_and_the_numbers_go_on(queue, epoch):
    submit(queue)
    search = claim(queue)
    renew(queue, search, events=[("notice", {})] * 10)
    queue.prune_events(epoch, most=3)
    assert queue.first_event() == queue.last_event() - 2
    renew(queue, search, events=[("notice", {})], after=10)
    assert queue.events_after(0)[-1].number == queue.last_event() == 13


def test_a_search_is_announced_once(queue, epoch):
    search = queue.cancel(submit(queue).id, by="ada")
    assert [one.id for one in queue.to_announce()] == [search.id]
    assert queue.to_announce(by=["ada"]) == queue.to_announce()
    assert queue.to_announce(by=["bob"]) == queue.to_announce(by=[]) == []
    queue.set_announced(epoch, [search.id])
    assert queue.to_announce() == []


def test_events_that_are_told_again_because_the_answer_was_lost_come_once(queue):
    submit(queue)
    search = claim(queue)
    events = [("notice", {"message": str(index)}) for index in range(3)]
    renew(queue, search, events=events)
    renew(queue, search, events=[*events, ("notice", {"message": "3"})])
    told = [event.data["message"] for event in queue.events_after(2)]
    assert told == ["0", "1", "2", "3"]


def test_a_server_that_judges_a_leader_dead_does_not_take_the_lead_of_the_next(queue, epoch):
    assert queue.take_lead("b", version="1", dead_epoch=epoch) == epoch + 1
    assert queue.take_lead("c", version="1", dead_epoch=epoch) is None


def test_a_search_whose_server_stops_is_for_any_group_again(queue):
    submit(queue)
    search = claim(queue, "left")
    queue.end_run(search.id, search.run, SERVER_STOPS)
    assert claim(queue, "right").id == search.id


def test_a_search_for_a_group_that_is_not_there_says_why_it_waits(queue):
    number = submit(queue, group="gone", budget_seconds=60.0).id
    place = queue.places()[number]
    assert place.waits_for == "a worker with a group of devices gone, and none is there"
    assert place.begins_in_seconds is None


def test_a_search_that_ends_as_it_is_cancelled_is_finished_without_a_reason(queue):
    submit(queue)
    search = claim(queue)
    queue.cancel(search.id, by="ada")
    queue.end_run(search.id, search.run, FINISHED)
    assert queue.get(search.id).reason == ""


def test_the_process_of_a_removed_search_is_lost(queue):
    submit(queue)
    search = claim(queue)
    queue.end_run(search.id, search.run, FINISHED)
    queue.remove(search.id)
    with pytest.raises(LeaseLost):
        renew(queue, search)


@pytest.mark.parametrize(
    "change",
    [lambda queue: queue.delete_study("old"), lambda queue: queue.rename_study("old", "other")],
    ids=["delete", "rename"],
)
def test_a_study_that_has_just_been_renamed_is_not_changed_by_its_old_name(
    change, queue, store_url
):
    """Otherwise others would remove or move files of another study, and a log would be wrong."""
    with open_store(store_url) as store:
        store.create_study(definition("old"), trials_wanted=3)
    queue.rename_study("old", "new")
    events = len(queue.events_after(0))
    with pytest.raises(UnknownStudy, match="there is no study 'old'"):
        change(queue)
    assert len(queue.events_after(0)) == events
    assert queue.owner_of("new") is not None


def test_the_searches_of_a_study_follow_its_name(queue, store_url):
    with open_store(store_url) as store:
        store.create_study(definition("old"), trials_wanted=3)
    search = submit(queue, study="old", submitted_by="owner")
    with pytest.raises(SearchConflict, match="is queued"):
        queue.rename_study("old", "new")
    queue.cancel(search.id, by="ada")
    queue.rename_study("old", "new")
    assert queue.get(search.id).study == "new"
    assert queue.states_of_studies() == {"new": queue.get(search.id).state}
    assert queue.latest_of("new") == queue.get(search.id)
    assert queue.events_after(0)[-1].data == {"action": "renamed", "name": "new"}


# -- rows that nobody has written ------------------------------------------------------------------


@pytest.mark.parametrize(
    "values",
    [{"request": [1]}, {"progress": "fast"}, {"submitted_at": 1e308}, {"losses": -1}],
)
def test_a_search_that_cannot_be_read_fails_and_the_next_one_runs(queue, database, values):
    damaged, whole = submit(queue), submit(queue)
    changed(database, damaged.id, **values)
    (listed,) = [search for search in queue.find()[0] if search.id == damaged.id]
    assert listed.state == "failed"
    assert listed.reason.startswith("its row cannot be read: ")
    claimed = [claim(queue), claim(queue)]
    assert [search.id for search in claimed if search is not None] == [whole.id]
    queue.remove(damaged.id)


def test_a_request_that_is_nested_too_deeply_is_one_failed_search(tmp_path):
    file = tmp_path / "autotune.db"
    with closing(StudyStore(f"sqlite:///{file}", create=True)) as store:
        queue = Searches(store.database)
        damaged, whole = submit(queue), submit(queue)
        with closing(sqlite3.connect(file)) as connection, connection:
            statement = "UPDATE autotune_searches SET request = ? WHERE id = ?"
            connection.execute(statement, ["[" * 10**5, damaged.id])
        states = {search.id: search.state for search in queue.find()[0]}
    assert states == {damaged.id: "failed", whole.id: "queued"}


# -- device hours ----------------------------------------------------------------------------------


def used_hours(database):
    """Let what runs have begun two hours earlier."""
    with database.writing() as connection:
        connection.execute(update(USES).values(began_at=USES.c.began_at - 7200.0))


@pytest.fixture
def limited(queue):
    queue.take_lead("a server", version="1", limits={"most_device_hours_of_person": "2/7d"})
    return queue


def test_who_has_used_their_hours_waits_and_others_begin(limited, database):
    first, second = submit(limited), submit(limited)
    search = claim(limited)
    used_hours(database)
    limited.end_run(search.id, search.run, FINISHED)
    assert claim(limited) is None
    of_bob = submit(limited, submitted_by="bob")
    assert claim(limited).id == of_bob.id
    present(database, DeviceGroup())
    told = limited.places()[second.id].waits_for
    assert told.startswith("device hours of ada, who has used 2.0 of 2/7d: the next in ")
    assert limited.get(first.id).state == "finished"


def test_a_running_search_counts_and_is_not_stopped(limited, database):
    submit(limited), submit(limited)
    search = claim(limited, "left")
    used_hours(database)
    assert claim(limited, "right") is None
    assert not renew(limited, search)


def test_a_removed_search_has_used_its_hours(limited, database):
    submit(limited)
    search = claim(limited)
    used_hours(database)
    limited.end_run(search.id, search.run, FINISHED)
    limited.remove(search.id)
    submit(limited)
    assert claim(limited) is None


def test_a_lost_process_has_used_its_devices_until_its_last_sign_of_life(limited, database):
    """A weekend without a server is no weekend of device hours."""
    submit(limited)
    search = claim(limited)
    used_hours(database)
    changed(database, search.id, lease_until=SEARCHES.c.lease_until - 7190.0)
    lose(limited, search)
    changed(database, search.id, not_before=0.0)
    assert claim(limited).id == search.id


def test_a_search_that_waits_again_has_no_devices_meanwhile(limited, database):
    submit(limited)
    search = claim(limited)
    limited.end_run(search.id, search.run, SERVER_STOPS)
    with database.reading() as connection:
        assert connection.scalars(select(USES.c.ended_at)).one() is not None
