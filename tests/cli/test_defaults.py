"""Defaults from autotune.toml, pyproject.toml and the environment: what applies, and what may."""

import pytest
import typer.main

from autotune.cli import app
from autotune.cli.defaults import REJECTED_IN_FILES
from autotune.cli.requests import settings_typed
from autotune.cli.search_run import continue_command
from autotune.spec.config import TECHNIQUES
from autotune.spec.setting import all_options_of, options_of
from autotune.spec.workload import Workload
from autotune.study.request import SearchRequest
from tests.building.commands import run_here
from tests.building.studies import measured, write_study

ROOT = typer.main.get_group(app)


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    """A repository in which commands run; nothing above it counts."""
    folder = tmp_path / "project"
    (folder / "deep" / "down").mkdir(parents=True)
    (folder / ".git").mkdir()
    monkeypatch.chdir(folder)
    return folder


def parsed(line, *, root=()):
    """Returns the parameters of a command line, with the defaults that apply."""
    words = line.split()
    with ROOT.make_context("autotune", list(root)) as parent:
        return ROOT.commands[words[0]].make_context(words[0], words[1:], parent=parent).params


def rejected(line, *, folder, **environment):
    ended = run_here(*line.split(), folder=folder, **environment)
    lines = ended.stderr.splitlines()
    assert (ended.returncode, ended.stdout, len(lines)) == (2, "", 2), ended.stderr
    assert [each.partition(":")[0] for each in lines] == ["error", "hint"]
    return ended.stderr


# -- what applies ----------------------------------------------------------------------------------


def test_the_command_line_comes_before_the_environment_before_the_file(project, monkeypatch):
    (project / "autotune.toml").write_text("layers = 1\nwidth = 1\nheads = 1\n")
    monkeypatch.setenv("AUTOTUNE_DEFAULT_LAYERS", "2")
    monkeypatch.setenv("AUTOTUNE_DEFAULT_WIDTH", "2")
    values = parsed("search --layers 3")
    assert (values["layers"], values["width"], values["heads"]) == ("3", "2", "1")
    assert values["vocab_size"] is None


@pytest.mark.parametrize(
    ("key", "variable", "text", "parameter", "value"),
    [
        ('max-mem = "8GiB"', "MAX_MEM", "8GiB", "max_mem", "8GiB"),
        ('max_mem = "8GiB"', "MAX_MEM", "8GiB", "max_mem", "8GiB"),
        ("trials = 12", "TRIALS", "12", "trials", "12"),
        ("trial-time-limit = 90", "TRIAL_TIME_LIMIT", "90", "trial_time_limit", "90"),
        ("gradient-clipping = 1", "GRADIENT_CLIPPING", "1", "gradient_clipping", "1"),
        ("no-predict = true", "NO_PREDICT", "yes", "no_predict", True),
        ("streaming = false", "STREAMING", "0", "streaming", False),
        (
            'learning-rate = ["adamw=1e-3", "sgd=0.1"]',
            "LEARNING_RATE",
            "adamw=1e-3 sgd=0.1",
            "learning_rate",
            ["adamw=1e-3", "sgd=0.1"],
        ),
        ('tolerance = "speed=0.1"', "TOLERANCE", "speed=0.1", "tolerance", ["speed=0.1"]),
    ],
)
def test_a_value_of_every_kind_is_read_from_file_and_environment(
    key, variable, text, parameter, value, project, monkeypatch
):
    monkeypatch.setenv(f"AUTOTUNE_DEFAULT_{variable}", text)
    assert parsed("search")[parameter] == value
    monkeypatch.delenv(f"AUTOTUNE_DEFAULT_{variable}")
    (project / "autotune.toml").write_text(key)
    assert parsed("search")[parameter] == value


def test_a_key_at_the_top_holds_where_an_option_means_the_same(project):
    (project / "autotune.toml").write_text(
        'layers = 2\nmax-mem = "8GiB"\nspace = "quick"\ntrials = 5\nscale = "tiny"\n'
    )
    assert parsed("search")["space"] == "quick"
    assert (parsed("fit")["layers"], parsed("fit")["max_mem"]) == ("2", "8GiB")
    assert (parsed("predict")["layers"], parsed("predict")["space"]) == ("2", None)
    drawn = parsed("plot mine")
    assert (drawn["trials"], drawn["scale"]) == (None, None)


def test_the_table_of_a_command_comes_before_the_top(project):
    (project / "pyproject.toml").write_text(
        "[tool.autotune]\nlayers = 1\n[tool.autotune.predict]\nlayers = 2\nprecision = 'fp8'\n"
    )
    assert parsed("search")["layers"] == "1"
    assert (parsed("predict")["layers"], parsed("predict")["precision"]) == ("2", "fp8")
    assert parsed("explain")["precision"] is None


@pytest.mark.parametrize(
    ("default", "line"),
    [
        ("workers = 4", "search --devices 2"),
        ('device = "cuda:1"', "search --devices all"),
        ('devices = "4"', "search --workers 2"),
        ('devices = "cuda:1"', "search --device cpu"),
    ],
)
def test_a_default_does_not_name_devices_beside_those_that_are_given(default, line, project):
    (project / "autotune.toml").write_text(f"[search]\n{default}\n")
    name = default.partition(" ")[0]
    assert parsed("search")[name] is not None
    assert parsed(line)[name] is None


@pytest.mark.parametrize(
    ("line", "parameter"),
    [
        ("explain mine 3", "layers"),
        ("predict --study mine --trial 3", "layers"),
        ("search --script train.py", "layers"),
        ("search --script train.py", "tokenizer"),
        ("search --model deep-one", "layers"),
        ("search --dataset other.txt", "text_column"),
        ("search --space quick", "scale"),
    ],
)
def test_a_default_does_not_apply_where_what_is_given_excludes_it(line, parameter, project):
    (project / "autotune.toml").write_text(
        'layers = 2\nmax-mem = "8GiB"\ntokenizer = "bpe"\ntext-column = "body"\nscale = "tiny"\n'
    )
    assert parsed(line)[parameter] is None


def test_the_storage_of_the_environment_is_that_of_every_command(project, monkeypatch):
    monkeypatch.setenv("AUTOTUNE_DEFAULT_STORAGE", "sqlite:///elsewhere.db")
    for line in ("search", "show mine", "studies", "compare a b"):
        assert parsed(line)["storage"] == "sqlite:///elsewhere.db"
    assert "elsewhere.db" in run_here("studies", "check", folder=project).stderr


def test_the_storage_has_a_variable_of_its_own_and_its_password_is_not_printed(tmp_path):
    url = "postgresql+psycopg://ada:very-secret@127.0.0.1:1/studies"
    ended = run_here("studies", folder=tmp_path, AUTOTUNE_STORAGE=url)
    assert "ada:***@127.0.0.1:1" in ended.stderr
    assert "very-secret" not in ended.stderr


@pytest.mark.parametrize("command", ["show mine", "report mine", "plot mine", "export mine"])
def test_a_study_is_read_of_the_server_of_the_environment_unless_a_database_is_named(
    command, monkeypatch
):
    monkeypatch.setenv("AUTOTUNE_SERVER", "http://gpu-box:8321")
    assert parsed(command)["server"] == "http://gpu-box:8321"
    assert parsed(f"{command} --storage sqlite:///studies/autotune.db")["server"] is None
    assert parsed(command, root=["--no-defaults"])["server"] is None
    monkeypatch.setenv("AUTOTUNE_DEFAULT_SERVER", "http://other:8321")
    assert parsed(command)["server"] == "http://other:8321"
    monkeypatch.setenv("AUTOTUNE_STORAGE", "sqlite:///elsewhere.db")
    monkeypatch.delenv("AUTOTUNE_DEFAULT_SERVER")
    assert parsed(command)["server"] is None


@pytest.mark.parametrize("command", ["search", "studies", "show mine --reference"])
def test_what_runs_here_does_not_ask_the_server_of_the_environment(command, monkeypatch):
    monkeypatch.setenv("AUTOTUNE_SERVER", "http://gpu-box:8321")
    assert parsed(command)["server"] is None


def test_where_a_study_is_not_found_the_hint_says_where_else_it_may_be(project):
    assert "for a study of a server: --server URL" in rejected("show mine", folder=project)
    write_study(f"sqlite:///{project}/a.db", [measured()], name="other")
    named = f"show mine --storage sqlite:///{project}/a.db"
    assert "--server" not in rejected(named, folder=project)
    server = {"AUTOTUNE_SERVER": "http://gpu-box:8321/?token=secret"}
    there = rejected(named, folder=project, **server)
    assert "for a study of a server: --server http://gpu-box:8321\n" in there


def test_without_defaults_none_applies(project, monkeypatch):
    (project / "autotune.toml").write_text("layers = [")
    monkeypatch.setenv("AUTOTUNE_DEFAULT_NONSENSE", "1")
    assert parsed("search", root=["--no-defaults"])["layers"] is None


def test_help_is_shown_whatever_the_files_say(project):
    (project / "autotune.toml").write_text("layers = [")
    ended = run_here("search", "--help", folder=project)
    assert (ended.returncode, ended.stderr) == (0, "")


# -- which file ------------------------------------------------------------------------------------


def test_the_nearest_file_counts_up_to_the_root_of_the_repository(project, monkeypatch):
    (project.parent / "autotune.toml").write_text("layers = 1\n")
    monkeypatch.chdir(project / "deep" / "down")
    assert parsed("search")["layers"] is None
    (project / "autotune.toml").write_text("layers = 2\n")
    assert parsed("search")["layers"] == "2"
    (project / "deep" / "pyproject.toml").write_text("[project]\nname = 'none of ours'\n")
    assert parsed("search")["layers"] == "2"
    (project / "deep" / "pyproject.toml").write_text("[tool.autotune]\nlayers = 3\n")
    assert parsed("search")["layers"] == "3"
    (project / "deep" / "autotune.toml").write_text("layers = 4\n")
    assert parsed("search")["layers"] == "4"


def test_outside_a_repository_and_home_only_the_current_folder_counts(tmp_path, monkeypatch):
    (tmp_path / "shared" / "mine").mkdir(parents=True)
    (tmp_path / "shared" / "autotune.toml").write_text("layers = 1\n")
    monkeypatch.setenv("HOME", str(tmp_path / "project"))
    monkeypatch.chdir(tmp_path / "shared" / "mine")
    assert parsed("search")["layers"] is None
    monkeypatch.chdir(tmp_path / "shared")
    assert parsed("search")["layers"] == "1"


def test_a_path_in_a_file_is_relative_to_it(project, monkeypatch):
    (project / "text").mkdir()
    (project / "my.toml").touch()
    (project / "autotune.toml").write_text('space = "my.toml"\ndataset = "./text"\n')
    monkeypatch.chdir(project / "deep")
    values = parsed("search")
    assert (values["space"], values["dataset"]) == ("../my.toml", "../text")


# -- what is said of it ----------------------------------------------------------------------------


def test_what_comes_from_a_file_and_the_environment_is_printed(project, monkeypatch, capsys):
    (project / "autotune.toml").write_text('layers = 2\nname = "my-study"\nfresh = true\n')
    monkeypatch.setenv("AUTOTUNE_DEFAULT_TRIALS", "7")
    parsed("search --layers 3")
    assert capsys.readouterr().err.splitlines() == [
        "defaults from autotune.toml: name = my-study, fresh = True",
        "defaults from the environment: trials = 7",
    ]


def test_what_comes_from_a_file_is_in_the_command_that_continues_the_study(project):
    (project / "autotune.toml").write_text(
        'trial-time-limit = "90s"\ndevices = "2"\nprefer = "smallest"\ntolerance = ["speed=0.1"]\n'
    )
    values = parsed("search")
    options = [option for option in all_options_of(SearchRequest).values() if option.is_typed]
    typed = settings_typed(options, values)
    request = SearchRequest.of(
        {each.name: each.parse(typed[each.name]) for each in options if each.name in typed}
    )
    command = continue_command("mine", request)
    for words in ("--trial-time-limit 90s", "--devices 2", "--prefer smallest", "speed=0.1"):
        assert words in command


def test_a_study_that_differs_by_a_default_is_answered_below_that_default(project):
    write_study(f"sqlite:///{project}/studies/autotune.db", [measured()], name="mine")
    (project / "autotune.toml").write_text("layers = 77\n")
    ended = run_here("search", "--name", "mine", folder=project)
    assert "defaults from autotune.toml: layers = 77" in ended.stderr
    assert "was begun with --layers" in ended.stderr


# -- what is rejected ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('script = "train.py"', "script = 'train.py' would run code"),
        ('model = "mine.py:build"', "model = 'mine.py:build' would run code"),
        ('model = "package.module:build"', "would run code"),
        ('storage = "sqlite:///x.db"', "would choose where studies are stored"),
        ('[search]\nstorage = "sqlite:///x.db"', "storage = 'sqlite:///x.db' would choose"),
        ('ray = "ray://elsewhere:10001"', "would choose which cluster gets your code and data"),
    ],
)
def test_a_file_may_name_neither_code_nor_storage(content, expected, project):
    (project / "autotune.toml").write_text(content)
    text = rejected("search", folder=project)
    assert expected in text
    assert "a file that is found in a folder may not" in text


HARMLESS_TEXTS = """
    adapter_init adapter_scaling compile_time_limit compute_capability context database_wait
    dataset dataset_config dataset_split device devices expires group held_out_split kind
    log_format max_device_hours_per_person max_mem max_time model modules_to_save_dtype name
    packing pick prefer profile prompt_format role root_path sampler scale schedule space state
    step_time_limit study target_version text_column time_budget time_limit to tokenizer torch
    trial_time_limit trials vary x y
"""
"""Options that take any text, and that a file may set, beside techniques: none names code, a place
to write to, or somebody who is sent something. `model` is looked at."""


def kinds_of(command):
    """Returns the requests of a command and of its subcommands."""
    command = command.load() if hasattr(command, "load") else command
    found = [command.callback.kind] if hasattr(command.callback, "kind") else []
    for inner in getattr(command, "commands", {}).values():
        found += kinds_of(inner)
    return found


def test_every_option_that_takes_any_text_is_rejected_in_a_file_or_known_to_be_harmless():
    texts = {
        option.parameter
        for kind in kinds_of(typer.main.get_command(app))
        for option in all_options_of(kind).values()
        if option.is_typed and not option.is_argument
        if not option.is_switch and not option.is_repeatable
        if option.format.takes_text or option.format.range is None
    }
    assert texts - set(REJECTED_IN_FILES) - set(TECHNIQUES) == set(HARMLESS_TEXTS.split())


@pytest.mark.parametrize("command", ["report mine", "plot mine", "export mine --to pytorch"])
def test_a_file_may_not_say_which_files_are_written(command, project):
    (project / "autotune.toml").write_text(f'[{command.split()[0]}]\nout = "../victim.html"\n')
    assert "would choose which files are written" in rejected(command, folder=project)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("layerz = 3", "autotune.toml: there is no option layerz\nhint: did you mean 'layers'"),
        ("[serch]\nlayers = 3", "there is no option serch\nhint: did you mean 'search'"),
        ("[search]\nlayerz = 3", "there is no option layerz\nhint: did you mean 'layers'"),
        ("search = 3", "autotune.toml: search = 3 is not a table"),
        ('layers = "six"', "autotune.toml: Invalid --layers: 'six'"),
        ("layers = true", "Invalid --layers: 'True'"),
        ("layers = 2.5", "Invalid --layers: '2.5'"),
        ('gradient-clipping = "x"', "autotune.toml: Invalid --gradient-clipping: 'x'"),
        ("fresh = 7", "autotune.toml: Invalid value for '--fresh'"),
        ('"--layers" = 3', "there is no option --layers"),
        ("layers = [", "autotune.toml is not valid TOML"),
        ('layers = "\\u001b[31m"', "autotune.toml: Invalid --layers"),
    ],
)
def test_an_invalid_file_is_one_error_that_names_file_and_key(content, expected, project):
    (project / "autotune.toml").write_text(content)
    assert expected in rejected("search", folder=project)


@pytest.mark.parametrize(
    ("variable", "text", "expected"),
    [
        ("LAYERZ", "3", "the environment: there is no option layerz\nhint: did you mean 'layers'"),
        ("LAYERS", "six", "the environment: Invalid --layers: 'six'"),
        ("FRESH", "maybe", "the environment: Invalid value for '--fresh'"),
        ("VARY", "width", "the environment: there is no option vary"),
    ],
)
def test_an_invalid_variable_is_one_error_that_names_it(variable, text, expected, project):
    name = f"AUTOTUNE_DEFAULT_{variable}"
    assert expected in rejected("search", folder=project, **{name: text})


def test_every_option_of_the_workload_can_have_a_default(project):
    typed = [option for option in options_of(Workload).values() if option.is_typed]
    harmless = [option for option in typed if option.flag != "--script"]
    lines = []
    for option in harmless:
        value = '"x"' if not option.choices else f'"{option.choices[0]}"'
        if option.is_switch:
            value = "true"
        elif option.is_repeatable:
            value = '["adamw=1"]' if option.format.metavar.endswith("RATE") else '["x"]'
            value = '["q_proj=1"]' if option.format.metavar == "LAYER=NUMBER" else value
        elif (numbers := option.format.range) is not None:
            value = "1" if numbers.most >= 1 else "0.5"
        lines.append(f"{option.flag.removeprefix('--')} = {value}")
    (project / "autotune.toml").write_text("\n".join(lines))
    given = parsed("search")
    assert [option.flag for option in harmless if given[option.parameter] is None] == []
