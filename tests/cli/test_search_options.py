"""The options of a search: one declaration for the command and for Python."""

import inspect
import math
import re
import shlex
from dataclasses import dataclass, replace
from typing import Annotated

import pytest
import typer.main
from hypothesis import given
from hypothesis import strategies as st

import autotune
from autotune.cli import app
from autotune.cli.lazy import LazyCommand
from autotune.cli.requests import Given, request_of, settings_typed
from autotune.cli.search_run import continue_command
from autotune.errors import InvalidInput
from autotune.spec.setting import (
    Duration,
    Settings,
    Size,
    all_options_of,
    option_of,
    options_of,
    pairs,
    setting,
    whole_number,
)
from autotune.spec.workload import Workload
from autotune.study.request import LARGEST_CONFIRM_SHARE, SearchRequest

LAZY = typer.main.get_group(app).commands["search"]
assert isinstance(LAZY, LazyCommand)
COMMAND = LAZY.load()
TYPED = {parameter.name: parameter for parameter in COMMAND.params}
IN_PYTHON = inspect.signature(autotune.search).parameters
OF_SEARCH = options_of(SearchRequest)
OPTIONS = {name: one for name, one in all_options_of(SearchRequest).items() if one.is_typed}
OF_THE_DISPLAY = {"json", "quiet", "verbose"}
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
    "database_wait": SECONDS,
    "storage": st.sampled_from(["sqlite:///my studies/autotune.db", "sqlite:///a.db"]),
}


def parsed(command):
    """Returns the request that `autotune search` makes of a command line."""
    words = shlex.split(command)
    assert words[:2] == ["autotune", "search"]
    context = COMMAND.make_context("search", words[2:])
    given = Given(context)
    given.update(settings_typed(OPTIONS.values(), context.params))
    return request_of(SearchRequest, given)


# -- the command and Python ------------------------------------------------------------------------


def test_every_option_of_the_command_is_a_setting_in_python():
    options = {option.parameter for option in OPTIONS.values()}
    others = {"dry_run", "time_trials", "script_arguments", "server"}
    assert set(TYPED) - {"help"} == options | OF_THE_DISPLAY | others
    assert callable(autotune.dry_run)


def test_every_setting_in_python_is_an_option_of_the_command():
    assert set(IN_PYTHON) - ONLY_IN_PYTHON == set(OF_SEARCH)


def test_a_submission_has_every_option_of_a_search_but_its_database():
    submit = typer.main.get_group(app).commands["submit"]
    assert isinstance(submit, LazyCommand)
    submitted = {parameter.name for parameter in submit.load().params}
    only_of_search = {"storage", "dry_run", "time_trials", "verbose"}
    assert submitted == set(TYPED) - only_of_search | {"priority", "group", "kind"}


def test_every_option_of_the_workload_is_a_field_of_it():
    assert set(options_of(Workload)) <= set(Workload.__dataclass_fields__)


@pytest.mark.parametrize("name", OF_SEARCH)
def test_an_option_has_the_same_default_everywhere(name):
    option = OF_SEARCH[name]
    default = getattr(SearchRequest(), name)
    assert IN_PYTHON[name].default == default == option.default
    if default is not None and not option.is_switch:
        written = option.format.write(default)
        assert f"[default: {written}]" in str(getattr(TYPED[option.parameter], "help", ""))
        assert option.parse(written) == default


def test_a_dry_run_takes_the_settings_of_a_search():
    parameters = dict(inspect.signature(autotune.dry_run).parameters)
    assert parameters.pop("time_trials").default is False
    assert parameters == IN_PYTHON


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"max_mem": "8 gigs"}, "'8 gigs' is not a memory size"),
        ({"max_mem": 12}, "Invalid max_mem: 12"),
        ({"trial_time_limit": None}, "Invalid trial_time_limit: None"),
        ({"time_budget": 0}, "Invalid time_budget: 0"),
        ({"perplexity_seeds": "two"}, "Invalid perplexity_seeds: 'two'"),
        ({"sampler": "best"}, "Invalid sampler: 'best'"),
        ({"memory_snapshot": True, "device": "cpu"}, "--memory-snapshot records the history"),
        ({"layerz": 3}, "there is no setting 'layerz'"),
        ({"seed": "x"}, "Invalid seed: 'x'"),
        ({"preferences": "smallest"}, "preferences = 'smallest' are no preferences"),
    ],
    ids=str,
)
@pytest.mark.parametrize("function", [autotune.search, autotune.dry_run])
def test_an_invalid_setting_is_rejected_from_python(function, settings, expected):
    with pytest.raises(autotune.AutotuneError, match=expected):
        function(**settings)


def test_a_misspelt_setting_of_a_dry_run_is_answered_with_its_own():
    with pytest.raises(InvalidInput, match="there is no setting 'time_trial'") as error:
        autotune.dry_run(time_trial=True)
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
        trial_time_limit=trial,
        compile_time_limit=compile_limit,
        step_time_limit=step,
        device="cuda",
        **switched,
    )
    again = parsed(continue_command("mine", request, trials=trials))
    assert (again.name, again.trials) == ("mine", trials)
    assert again.trial_options == request.trial_options
    for name in REPEATED:
        assert getattr(again, name) == getattr(request, name), name


def test_a_setting_is_repeated_unless_the_study_stores_it_or_it_is_of_one_run():
    stored = {"max_mem", "space", "scale", "device", "sampler", "seed", "fresh", "from_file"}
    of_one_run = {"time_budget", "profile"}
    other_names = {"workers"}
    repeated = {name for name, option in OF_SEARCH.items() if option.is_repeated}
    assert repeated == set(OF_SEARCH) - stored - of_one_run - other_names
    limits = {name for name in repeated if name.endswith("time_limit")}
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
    request = SearchRequest(**settings)
    assert {kind: request.default_time_budget_seconds(kind) for kind in seconds} == seconds


@pytest.mark.parametrize("given", ["none", math.inf])
def test_a_time_budget_can_be_lifted(given):
    request = SearchRequest(time_budget=given)
    assert request.time_budget == math.inf
    assert OF_SEARCH["time_budget"].arguments(math.inf) == ["--time-budget", "none"]


# -- one option ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Example(Settings):
    max_mem: Size | None = setting(None)
    wait: Duration = setting(300.0)
    longer: Duration | None = setting(None, flag="--wait")
    seeds: Annotated[int, whole_number(1, 9)] = setting(1)
    name: str | None = setting(None)
    fresh: bool = setting(False)
    predict: bool = setting(True)
    streaming: bool | None = setting(None, off_flag="--no-streaming")
    learning_rates: Annotated[
        dict[str, float], pairs(("adamw", "sgd"), example="adamw=1", metavar="")
    ] = setting(dict)


@pytest.mark.parametrize(
    ("name", "value", "arguments"),
    [
        ("max_mem", 3 * 2**29, ["--max-mem", "1536MiB"]),
        ("wait", 300.0, []),
        ("wait", 90.5, ["--wait", "90.5s"]),
        ("longer", 12345678.25, ["--wait", "12345678.25s"]),
        ("seeds", 3, ["--seeds", "3"]),
        ("name", None, []),
        ("fresh", True, ["--fresh"]),
        ("predict", False, ["--no-predict"]),
        ("predict", True, []),
        ("streaming", True, ["--streaming"]),
        ("streaming", False, ["--no-streaming"]),
        ("streaming", None, []),
        (
            "learning_rates",
            {"adamw": 3e-4, "sgd": 0.1},
            ["--learning-rate", "adamw=0.0003", "--learning-rate", "sgd=0.1"],
        ),
    ],
)
def test_an_option_writes_its_value_as_it_is_typed(name, value, arguments):
    option = option_of(Example, name)
    flag = {"--learning-rates": "--learning-rate"}.get(option.flag, option.flag)
    assert replace(option, flag=flag).arguments(value) == arguments
    if value is not None and not option.is_switch:
        written = arguments[1::2] if option.is_repeatable else option.format.write(value)
        assert option.parse(written) == value


# -- devices ---------------------------------------------------------------------------------------


def test_the_options_of_trials_have_the_names_of_the_request():
    request = SearchRequest(full_trainings=True, perplexity_seeds=3, memory_snapshot=True)
    for name, value in vars(request.trial_options).items():
        assert getattr(request, name.removesuffix("_seconds")) == value


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
