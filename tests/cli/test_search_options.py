"""The options of a search: one declaration for the command and for Python."""

import inspect
import math
import re
import shlex

import pytest
import typer.main
from hypothesis import given
from hypothesis import strategies as st

import autotune
from autotune.cli import app
from autotune.cli.lazy import LazyCommand
from autotune.cli.search_run import continue_command
from autotune.errors import InvalidInput
from autotune.spec.option import COUNT, DURATION, SIZE, SWITCH, TEXT, Option
from autotune.spec.workload import Workload
from autotune.spec.workload_options import WORKLOAD_OPTIONS
from autotune.study.request import LARGEST_CONFIRM_SHARE, SEARCH_OPTIONS, SearchRequest, request_of

LAZY = typer.main.get_group(app).commands["search"]
assert isinstance(LAZY, LazyCommand)
COMMAND = LAZY.load()
TYPED = {parameter.name: parameter for parameter in COMMAND.params}
IN_PYTHON = inspect.signature(autotune.search).parameters
OF_PREFERENCES = {"tolerance", "prefer", "max_perplexity_increase"}
OF_THE_DISPLAY = {"as_json", "quiet", "verbose"}
ONLY_IN_PYTHON = {"preferences", "listener", "should_stop", "workload"}

SECONDS = st.floats(min_value=1e-6, max_value=9e8)
LIMITS = st.lists(SECONDS, min_size=3, max_size=3).map(lambda limits: sorted(limits, reverse=True))
SWITCHES = st.booleans()
REPEATED = {
    "until_converged": SWITCHES,
    "full_trainings": SWITCHES,
    "predict": SWITCHES,
    "memory_snapshot": SWITCHES,
    "confirm": SWITCHES,
    "confirm_share": st.floats(0.0, LARGEST_CONFIRM_SHARE),
    "perplexity_seeds": st.integers(1, 100),
    "devices": st.sampled_from(["all", "4"]),
    "ray": st.sampled_from(["auto", "local", "ray://head:10001"]),
    "trials_per_device": st.integers(1, 256),
    "database_wait_seconds": SECONDS,
    "storage": st.sampled_from(["sqlite:///my studies/autotune.db", "sqlite:///a.db"]),
}


def parsed(command):
    """Return the request that `autotune search` makes of a command line."""
    words = shlex.split(command)
    assert words[:2] == ["autotune", "search"]
    typed = COMMAND.make_context("search", words[2:]).params
    settings = {}
    for option in SEARCH_OPTIONS.values():
        value = typed[option.parameter]
        settings[option.keyword] = not value if option.turns_off else value
    return request_of(settings, workload={})


# -- the command and Python ------------------------------------------------------------------------


def test_every_option_of_the_command_is_a_setting_in_python():
    options = {option.parameter for option in SEARCH_OPTIONS.values()}
    options |= {option.parameter for option in WORKLOAD_OPTIONS.values()}
    others = {"dry_run", "time_trials", "script_arguments", "server"}
    assert set(TYPED) - {"help"} == options | OF_PREFERENCES | OF_THE_DISPLAY | others
    assert callable(autotune.dry_run)


def test_every_setting_in_python_is_an_option_of_the_command():
    keywords = [option.keyword for option in SEARCH_OPTIONS.values()]
    assert set(IN_PYTHON) - ONLY_IN_PYTHON == set(keywords)
    assert len(keywords) == len(set(keywords))


def test_a_submission_has_every_option_of_a_search_but_its_database():
    submit = typer.main.get_group(app).commands["submit"]
    assert isinstance(submit, LazyCommand)
    submitted = {parameter.name for parameter in submit.load().params}
    only_of_search = {"storage", "dry_run", "time_trials", "verbose"}
    assert submitted == set(TYPED) - only_of_search | {"priority", "group"}


def test_every_option_of_the_workload_is_a_field_of_it():
    assert set(WORKLOAD_OPTIONS) <= set(Workload.__dataclass_fields__)


@pytest.mark.parametrize("name", SEARCH_OPTIONS)
def test_an_option_has_the_same_default_everywhere(name):
    option = SEARCH_OPTIONS[name]
    default = getattr(SearchRequest(), name)
    typed = TYPED[option.parameter].default
    assert IN_PYTHON[option.keyword].default == default
    assert option.read(not typed if option.turns_off else typed) == default


def test_a_dry_run_takes_the_settings_of_a_search():
    parameters = dict(inspect.signature(autotune.dry_run).parameters)
    assert parameters.pop("time_trials").default is TYPED["time_trials"].default is False
    assert parameters == IN_PYTHON


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"max_mem": "8 gigs"}, "'8 gigs' is not a memory size"),
        ({"max_mem": 12}, "a memory cap of 12 B is too small"),
        ({"trial_time_limit": None}, "'None' is not a duration"),
        ({"time_budget": 0}, "'0' is not a possible duration"),
        ({"perplexity_seeds": "two"}, "invalid number of seeds: 'two'"),
        ({"sampler": "best"}, "there is no sampler 'best'"),
        ({"memory_snapshot": True, "device": "cpu"}, "--memory-snapshot records the history"),
        ({"layerz": 3}, "has no setting 'layerz'"),
        ({"seed": "x"}, "invalid seed: 'x'"),
        ({"preferences": "smallest"}, "preferences = 'smallest' are no preferences"),
    ],
    ids=str,
)
@pytest.mark.parametrize("function", [autotune.search, autotune.dry_run])
def test_an_invalid_setting_is_rejected_from_python(function, settings, expected):
    with pytest.raises(autotune.AutotuneError, match=expected):
        function(**settings)


def test_a_misspelt_setting_of_a_dry_run_is_answered_with_its_own():
    with pytest.raises(InvalidInput, match="has no setting 'time_trial'") as error:
        autotune.dry_run(time_trial=True)
    assert "help(autotune.dry_run)" in error.value.hint
    assert "'time_trials'" in error.value.hint


# -- the command that continues a study ------------------------------------------------------------


@given(
    trials=st.none() | st.integers(1, 10**6),
    limits=LIMITS,
    switched=st.fixed_dictionaries({}, optional=REPEATED),
)
def test_the_continue_command_repeats_every_setting_that_the_study_does_not_store(
    trials, limits, switched
):
    trial, compile_limit, step = limits
    request = SearchRequest(
        trial_time_limit_seconds=trial,
        compile_time_limit_seconds=compile_limit,
        step_time_limit_seconds=step,
        device="cuda",
        **switched,
    )
    again = parsed(continue_command("mine", request, trials=trials))
    assert (again.name, again.trials) == ("mine", trials)
    assert again.trial_options == request.trial_options
    for name in REPEATED:
        assert getattr(again, name) == getattr(request, name), name


def test_a_setting_is_repeated_unless_the_study_stores_it_or_it_is_of_one_run():
    stored = {"cap_bytes", "space", "scale", "device", "sampler", "seed", "fresh"}
    of_one_run = {"time_budget_seconds", "profile"}
    other_names = {"workers"}
    repeated = {name for name, option in SEARCH_OPTIONS.items() if option.is_repeated}
    assert repeated == set(SEARCH_OPTIONS) - stored - of_one_run - other_names
    limits = {name for name in repeated if name.endswith("time_limit_seconds")}
    assert repeated == {*REPEATED, *limits, "name", "trials"}


def test_a_password_is_not_repeated():
    request = SearchRequest(storage="postgresql+psycopg://me:secret@there/studies")
    assert "secret" not in continue_command("mine", request)


# -- the time budget that nobody has given --------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "seconds"),
    [
        ({}, {"cpu": 600.0, "cuda": 1800.0}),
        ({"trials": 4}, {"cpu": None, "cuda": None}),
        ({"until_converged": True}, {"cpu": None, "cuda": None}),
        ({"time_budget": "2h"}, {"cpu": None, "cuda": None}),
        ({"time_budget": "none"}, {"cpu": None, "cuda": None}),
    ],
    ids=str,
)
def test_a_search_that_is_given_no_end_has_a_time_budget(settings, seconds):
    request = request_of(settings, workload={})
    assert {kind: request.default_time_budget_seconds(kind) for kind in seconds} == seconds


@pytest.mark.parametrize("given", ["none", math.inf])
def test_a_time_budget_can_be_lifted(given):
    request = request_of({"time_budget": given}, workload={})
    assert request.time_budget_seconds == math.inf
    assert SEARCH_OPTIONS["time_budget_seconds"].arguments(math.inf) == ["--time-budget", "none"]


# -- one option ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value", "arguments"),
    [
        (Option(flag="--max-mem", help="", kind=SIZE), 3 * 2**29, ["--max-mem", "1536MiB"]),
        (Option(flag="--wait", help="", kind=DURATION, default="5m"), 300.0, []),
        (Option(flag="--wait", help="", kind=DURATION), 12345678.25, ["--wait", "12345678.25s"]),
        (Option(flag="--seeds", help="", kind=COUNT, default=1), 3, ["--seeds", "3"]),
        (Option(flag="--name", help="", kind=TEXT), None, []),
        (Option(flag="--fresh", help="", kind=SWITCH, default=False), True, ["--fresh"]),
        (Option(flag="--no-predict", help="", kind=SWITCH, default=True), False, ["--no-predict"]),
        (Option(flag="--no-predict", help="", kind=SWITCH, default=True), True, []),
        (WORKLOAD_OPTIONS["streaming"], True, ["--streaming"]),
        (WORKLOAD_OPTIONS["streaming"], False, ["--no-streaming"]),
        (WORKLOAD_OPTIONS["streaming"], None, []),
    ],
    ids=lambda given: given.flag if isinstance(given, Option) else str(given),
)
def test_an_option_writes_its_value_as_it_is_typed(option, value, arguments):
    assert option.arguments(value) == arguments


# -- devices ---------------------------------------------------------------------------------------


def test_the_options_of_trials_have_the_names_of_the_request():
    request = SearchRequest(full_trainings=True, perplexity_seeds=3, memory_snapshot=True)
    for name, value in vars(request.trial_options).items():
        assert getattr(request, name) == value


def test_the_names_of_several_devices_are_as_in_the_printed_command():
    request = SearchRequest(devices="cuda,cuda:2")
    assert parsed(continue_command("mine", request)).devices == "cuda,cuda:2"


def test_workers_are_a_number_of_devices():
    request = SearchRequest(workers=3)
    assert request == SearchRequest(workers=3, devices="3")
    assert parsed(continue_command("mine", request)).devices == "3"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"devices": "cuda:1,cuda:1"}, "names cuda:1 twice"),
        ({"devices": "cuda,cuda:0"}, "names cuda:0 twice"),
        ({"devices": "cuda:0,gpu"}, "'gpu' is not a device"),
        ({"devices": "0"}, "invalid number of devices: 0"),
        ({"devices": "1025"}, "invalid number of devices: 1025"),
        ({"devices": ""}, "'' is not a device"),
        ({"devices": "2", "workers": 3}, "both are given"),
        ({"devices": "cuda:1", "device": "cuda"}, "both name devices"),
        ({"devices": "all", "device": "cuda:1"}, "both name devices"),
        ({"devices": "cuda:0,cuda:1", "ray": "auto"}, "names devices of one machine"),
        ({"device": "cuda:1", "ray": "auto"}, "names devices of one machine"),
        ({"ray": "http://head:8265"}, "'http://head:8265' is not the address"),
        ({"ray": ""}, "'' is not the address"),
    ],
    ids=str,
)
def test_devices_that_make_no_sense_are_an_error(settings, message):
    with pytest.raises(InvalidInput, match=re.escape(message)) as raised:
        SearchRequest(**settings)
    assert raised.value.hint
