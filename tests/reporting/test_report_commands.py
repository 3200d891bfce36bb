"""The commands of a report, run by bash with an `autotune` that records its arguments."""

import subprocess
from dataclasses import replace

import pytest
import typer.main

from autotune.analysis.pick import Preferences
from autotune.analysis.published_comparison import is_of_published_size
from autotune.analysis.tolerance import Tolerance
from autotune.cli import app
from autotune.cli.requests import settings_typed
from autotune.reporting.report import commands, contents
from autotune.spec.config import LegalityContext, TrainingConfig
from autotune.spec.model_choice import with_model_config
from autotune.spec.model_file import model_name
from autotune.spec.search_space import bind_space
from autotune.spec.setting import options_of
from autotune.spec.space_file import load_space
from autotune.spec.workload import Workload, make_workload
from tests.building.reports import TARGETS, view_of
from tests.building.studies import definition

CONFIG = TrainingConfig(
    precision="bf16-mixed",
    compile="block",
    memory_budget=0.35,
    micro_batch_size=4,
    optimizer_fusion="kernel",
)
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 2048,
}
HOSTILE = "x'; touch hacked; $(touch hacked) `touch hacked`\nEND_OF_FILE\ntouch hacked\n\\\"\x1b[2J"


def arguments(command, folder):
    """Returns the arguments `autotune` is called with, and the files written next to it."""
    told = folder / "told"
    program = f'autotune() {{ printf "%s\\0" "$@" > {told}; }}\n{command}'
    subprocess.run(["bash", "-c", program], cwd=folder, check=True, capture_output=True)
    return told.read_text().split("\0")[:-1]


def option(words, name):
    return words[words.index(name) + 1] if name in words else None


def rerun(defined, folder, *, config=CONFIG):
    words = arguments(commands.rerun_command(defined, number=12, config=config), folder)
    return words, load_space(str(folder / option(words, "--space")))


def settings_of(words):
    """The workload settings in a command line, as `autotune search` reads them."""
    search = typer.main.get_group(app).commands["search"]
    parameters = search.make_context("search", list(words)).params
    options = {name: option for name, option in options_of(Workload).items() if option.is_typed}
    return with_model_config(settings_typed(options.values(), parameters))


# -- one trial -------------------------------------------------------------------------------------


def test_a_rerun_is_of_the_one_configuration(tmp_path):
    _, space = rerun(definition(), tmp_path)
    assert bind_space(space, LegalityContext(global_batch=8), unavailable={}).named == {
        "trial 12": CONFIG
    }
    assert not space.techniques


def test_a_rerun_has_the_workload_to_the_last_setting(tmp_path):
    workload = make_workload(
        "cpu", {"steps": 33, "seed": 5, "gradient_clipping": 0.5, "learning_rates": {"sgd": 1e-5}}
    )
    _, space = rerun(definition(workload=workload), tmp_path)
    assert make_workload("cpu", space.workload) == workload


@pytest.mark.parametrize(
    ("cap_bytes", "size"),
    [(8 * 1024**3, "8GiB"), (75 * 1024**2, "75MiB"), (1536, "1536"), (3 * 1024, "3KiB")],
)
def test_a_rerun_has_the_cap_to_the_byte(cap_bytes, size, tmp_path):
    words, _ = rerun(definition(cap_bytes=cap_bytes), tmp_path)
    assert option(words, "--max-mem") == size


def test_a_rerun_is_a_study_of_its_own_on_the_same_kind_of_device(tmp_path):
    words, _ = rerun(definition("tour"), tmp_path)
    assert (option(words, "--name"), option(words, "--device")) == ("tour-trial-12", "cpu")
    assert "--fresh" in words  # it would find the trial measured already


def test_a_rerun_begins_with_the_baseline_of_its_study(tmp_path):
    space = load_space("peak_memory")
    _, written = rerun(definition(space=space), tmp_path)
    assert written.defaults.get("optimizer") == space.defaults.get("optimizer")


@pytest.mark.parametrize("name", [HOSTILE, "../up", "a b", "-x", ""])
def test_a_name_that_no_file_can_have_is_none_in_a_command(name, tmp_path):
    words, _ = rerun(definition(name), tmp_path)
    assert option(words, "--name") == "study-trial-12"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["study-trial-12.toml", "told"]


def test_nothing_of_a_workload_is_run_by_the_shell(tmp_path):
    workload = make_workload("cpu", {"dataset": HOSTILE, "dataset_config": HOSTILE})
    _, space = rerun(definition(workload=workload), tmp_path)
    assert space.workload["dataset"] == HOSTILE
    assert not (tmp_path / "hacked").exists()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model": "my model.py:make"}, ["--model", "my model.py:make"]),
        ({"model": "script", "script": "tr'ain.py"}, ["--script", "tr'ain.py"]),
    ],
    ids=["function", "script"],
)
def test_code_is_named_on_the_command_line(settings, words, tmp_path):
    workload = make_workload("cpu")
    workload = type(workload)(**{**workload.to_dict(), **settings})
    for command in (commands.rerun_command, commands.search_command):
        more = (
            {"number": 12, "config": CONFIG} if command is commands.rerun_command else {"trials": 5}
        )
        given = arguments(command(definition(workload=workload), **more), tmp_path)
        assert given[given.index(words[0]) : given.index(words[0]) + 2] == words


def llama(**settings):
    return make_workload("cpu", {"model": model_name(LLAMA), "model_config": LLAMA, **settings})


def test_the_config_of_a_model_is_written_next_to_the_space(tmp_path, monkeypatch):
    _, space = rerun(definition(workload=llama(layers=3)), tmp_path)
    monkeypatch.chdir(tmp_path)
    assert make_workload("cpu", space.workload) == llama(layers=3)


def test_a_size_that_a_config_does_not_specify_is_in_no_command(tmp_path, monkeypatch):
    mamba = {name: value for name, value in LLAMA.items() if "heads" not in name}
    workload = make_workload("cpu", {"model": model_name(mamba), "model_config": mamba})
    defined = definition(workload=workload)
    _, space = rerun(defined, tmp_path)
    monkeypatch.chdir(tmp_path)
    assert make_workload("cpu", space.workload) == workload
    assert "None" not in commands.search_command(defined, trials=3)


# -- the whole search ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {
            "steps": 77,
            "sequence_length": 64,
            "evaluation_sequences": 8,
            "learning_rate_warmup_steps": 3,
            "seed": 9,
        },
        {"dataset": HOSTILE, "streaming": True, "held_out_split": "test", "packing": "padded"},
        {
            "learning_rates": {"adamw": 1e-05, "adamw-8bit": 0.25},
            "gradient_clipping": 1.5,
            "schedule": "cosine",
        },
        {
            "tokenizer": "bpe",
            "vocab_size": 4000,
            "feed_forward_width": 96,
            "layers": 2,
            "width": 64,
            "heads": 2,
        },
        {"model": "deep-one", "global_batch": 4},
    ],
    ids=lambda settings: " ".join(settings) or "defaults",
)
@pytest.mark.parametrize("space", ["quick", "default"])
def test_a_search_says_every_setting_that_is_not_the_usual_one(space, settings, tmp_path):
    loaded = load_space(space)
    workload = make_workload("cpu", loaded.workload, settings)
    command = commands.search_command(definition(space=loaded, workload=workload), trials=30)
    words = arguments(command, tmp_path)
    assert make_workload("cpu", loaded.workload, settings_of(words[1:])) == workload
    assert not (tmp_path / "hacked").exists()


def test_a_search_says_nothing_that_is_the_usual_one(tmp_path):
    workload = make_workload("cpu", load_space("quick").workload)
    made = definition(
        "tour", space=load_space("quick"), workload=workload, sampler="ehvi", cap_bytes=48 * 1024**2
    )
    assert commands.search_command(made, trials=16) == (
        "autotune search --name tour-again --fresh --space quick --max-mem 48MiB --device cpu "
        "--trials 16"
    )


def test_a_search_of_a_config_that_was_a_file_brings_the_file(tmp_path, monkeypatch):
    quick = load_space("quick")
    workload = llama(layers=3, **quick.workload)
    words = arguments(
        commands.search_command(definition(space=quick, workload=workload), trials=3), tmp_path
    )
    monkeypatch.chdir(tmp_path)
    assert make_workload("cpu", quick.workload, settings_of(words[1:])) == workload


def test_a_space_that_is_not_shipped_is_written_out(tmp_path):
    made = definition()
    words = arguments(commands.search_command(made, trials=5), tmp_path)
    written = load_space(str(tmp_path / option(words, "--space")))
    assert {**written.to_dict(), "name": ""} == {**made.space.to_dict(), "name": ""}
    assert (option(words, "--sampler"), option(words, "--trials")) == ("nsga2", "5")


# -- reading the study -----------------------------------------------------------------------------


def test_what_reads_a_study_says_where_it_is_and_how_it_was_picked():
    preferences = Preferences(
        tolerance=Tolerance(speed=0.1), prefer="smallest", max_perplexity_increase=0.05
    )
    text = commands.reading_command(
        "report", "tour", storage="sqlite:///my db", preferences=preferences
    )
    assert text == (
        "autotune report tour --storage 'sqlite:///my db' --tolerance speed=0.1 --prefer smallest "
        "--max-perplexity-increase 0.05"
    )


def test_what_is_usual_is_left_out_of_what_reads_a_study():
    assert (
        commands.reading_command("show", "tour", storage="sqlite:///studies/autotune.db")
        == "autotune show tour"
    )


def test_an_export_names_trial_and_target():
    template = contents.compute(view_of(study="tour"), version="1", targets=TARGETS).export_template
    filled = template.replace(commands.NUMBER, "3").replace(commands.TARGET, "trl")
    assert filled == "autotune export tour --trial 3 --to trl"


def test_a_study_at_a_scale_is_repeated_at_that_scale(tmp_path):
    space = load_space("peak_memory").at_scale("tiny")
    workload = make_workload("cpu", space.workload)
    words = arguments(
        commands.search_command(definition(space=space, workload=workload), trials=11), tmp_path
    )
    assert (option(words, "--space"), option(words, "--scale")) == ("peak_memory", "tiny")
    assert "--layers" not in words


def test_a_written_space_at_a_scale_is_repeated_at_that_scale(tmp_path):
    """Else its scaled sizes would pass for those of its published table."""
    shipped = load_space("peak_memory").at_scale("tiny")
    space = replace(shipped, defaults={**shipped.defaults, "loss": "chunked"})
    workload = make_workload("cpu", space.workload)
    words = arguments(
        commands.search_command(definition(space=space, workload=workload), trials=11), tmp_path
    )
    written = load_space(str(tmp_path / option(words, "--space"))).at_scale(
        option(words, "--scale")
    )
    assert (written.scale, written.workload) == ("tiny", space.workload)
    assert not is_of_published_size(written, workload)


@pytest.mark.parametrize("split", [None, "validation", "test"])
def test_a_search_says_the_splits_of_another_dataset_than_its_space_has(split, tmp_path):
    """Also where they are called as those of the space: another dataset takes them with it."""
    space = load_space("peak_memory")
    workload = make_workload(
        "cpu", space.workload, {"dataset": "other/hub", "held_out_split": split}
    )
    words = arguments(
        commands.search_command(definition(space=space, workload=workload), trials=11), tmp_path
    )
    assert make_workload("cpu", space.workload, settings_of(words[1:])) == workload
