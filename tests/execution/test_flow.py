"""Flows: generators that one thread drives from one future to the next."""

import threading
import time
from concurrent.futures import Future

import pytest

from autotune.execution.flow import Ended, Flows, Pause, result_of, run


def ended(value):
    future = Future()
    future.set_result(value)
    return future


def test_a_flow_is_sent_what_its_futures_find_and_returns_its_result():
    def flow():
        one = yield ended(1)
        two = yield ended(2)
        return one + two

    assert result_of(flow()) == 3


def test_the_error_of_a_future_is_raised_where_the_flow_waits():
    failed = Future()
    failed.set_exception(KeyError("lost"))

    def flow():
        with pytest.raises(KeyError):
            yield failed
        return "went on"

    assert result_of(flow()) == "went on"


def test_flows_take_turns_while_others_wait():
    said = []
    late = Future()

    def waits():
        said.append((yield late))

    def ends():
        yield ended(None)
        said.append("first")
        late.set_result("second")

    run([waits(), ends()])
    assert said == ["first", "second"]


def test_a_future_of_another_thread_ends_the_wait_at_once():
    future = Future()
    threading.Timer(0.05, future.set_result, ("late",)).start()
    flows, found = Flows(), []

    def flow():
        found.append((yield future))

    flows.begin(flow())
    began = time.monotonic()
    flows.wait(30.0)
    assert found == ["late"]
    assert time.monotonic() - began < 15.0


def test_a_pause_ends_with_what_it_waits_for():
    future = Future()
    pause = Pause(3600.0, unless=future)
    assert not pause.done()
    future.set_result(None)
    assert pause.done()


def test_at_the_end_what_is_done_goes_on_and_the_others_get_the_error():
    kept = []

    def stores(future):
        kept.append((yield future))

    def waits(future):
        try:
            yield future
        except Ended:
            kept.append("given back")
            raise

    flows = Flows()
    for flow in (stores(ended("a result")), waits(Future())):
        flows.begin(flow)
    flows.end()
    assert sorted(kept) == ["a result", "given back"]
    assert not flows


def test_a_flow_may_wait_while_it_cleans_up():
    task, said = Future(), []

    def flow():
        try:
            yield task
        except Ended:
            task.set_result("interrupted")
            yield Pause(3600.0, unless=task)
            said.append(task.result())
            raise

    flows = Flows()
    flows.begin(flow())
    flows.end()
    assert said == ["interrupted"]


def test_a_flow_whose_task_never_ends_is_left_after_some_seconds(monkeypatch):
    monkeypatch.setattr("autotune.execution.flow.SECONDS_TO_END", 0.2)

    def flow():
        try:
            yield Future()
        finally:
            yield Future()

    flows = Flows()
    flows.begin(flow())
    flows.end()
    assert not flows


@pytest.mark.slow
def test_a_flow_that_goes_on_after_the_end_is_ended_where_it_waits_next():
    future, reached = Future(), []

    def flow():
        try:
            yield future
        except Ended:
            reached.append("stored without it")
        try:
            yield Future()
        finally:
            reached.append("ended")

    flows = Flows()
    flows.begin(flow())
    flows.end()
    assert reached == ["stored without it", "ended"]


def test_an_error_of_one_flow_ends_the_others_and_is_raised():
    ended_by = []

    def fails():
        yield ended(None)
        raise KeyError("failed")

    def waits():
        try:
            yield Future()
        except Ended as error:
            ended_by.append(error)
            raise

    with pytest.raises(KeyError):
        run([waits(), fails()])
    assert len(ended_by) == 1
