"""`autotune plot`: every kind and format, on a database made by hand."""

import json
import os
import shutil
import sys

import pytest

from autotune.cli import main
from autotune.reporting.figures import FIGURES
from autotune.spec.config import TrainingConfig
from autotune.spec.prediction import Forecast
from autotune.spec.result import Measurement
from tests.building.commands import run_here
from tests.building.results import study_result
from tests.building.studies import (
    CAP_BYTES,
    MIB,
    definition,
    keep,
    measured,
    open_store,
    write_study,
)
from tests.building.views import predicted

HAND_MADE = (
    "pareto",
    "parallel",
    "importance",
    "ladder",
    "memory",
    "roofline",
    "history",
    "predicted",
    "predicted-speed",
)
"""All but the timeline, which is predicted on the spot."""


def configs():
    """Different configurations of the space, the baseline first."""
    for size in (8, 4, 2, 1):
        for precision in ("fp32", "bf16-mixed"):
            for compile in ("none", "block"):
                for checkpointing in ("none", "block") if compile == "none" else ("none",):
                    yield TrainingConfig(
                        micro_batch_size=size,
                        precision=precision,
                        compile=compile,
                        checkpointing=checkpointing,
                    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the study `by-hand` of 24 trials, and `too-tight` without a feasible one."""
    folder = tmp_path_factory.mktemp("figures")
    url = f"sqlite:///{folder}/studies/autotune.db"
    tried = list(configs())
    with open_store(url, create=True) as store:
        device = study_result().device  # whose peaks are known
        store.create_study(definition(device=device), trials_wanted=len(tried))
        for number, config in enumerate(tried):
            peak = (60 - number) * MIB
            store.store_forecast(
                "by-hand", Forecast(config=config, prediction=predicted(peak=peak))
            )
            measurement = measured(
                peak_memory_bytes=peak,
                device_bytes=peak,
                tokens_per_second=1000.0 + number,
                model_flops_per_token=1e6,
                recomputed_flops_per_token=0.0,
            )
            keep(store, config, measurement, seconds=1.5)
    failed = [Measurement(outcome="out_of_memory", message="out of memory")] * 2
    write_study(url, failed, name="too-tight", cap_bytes=CAP_BYTES)
    return folder


@pytest.fixture
def run(folder, monkeypatch, capsys):
    """run("by-hand") is (exit code, stdout, stderr) of the command, in this process."""
    monkeypatch.chdir(folder)

    def command(*arguments):
        monkeypatch.setattr(sys, "argv", ["autotune", "plot", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, *capsys.readouterr()

    return command


@pytest.fixture
def complaint(run):
    """Returns the error and the hint of a rejected command, which prints nothing else."""

    def error_lines(*arguments):
        code, out, lines = run(*arguments)
        assert (code, out) == (2, ""), lines
        assert [line.partition(":")[0] for line in lines.splitlines()] == ["error", "hint"], lines
        return lines

    return error_lines


@pytest.fixture
def drawn(run, tmp_path):
    """The figure that a command writes as JSON."""

    def figure(*arguments):
        code, _, stderr = run(*arguments, "--out", str(tmp_path / "figure.json"))
        assert code == 0, stderr
        return json.loads((tmp_path / "figure.json").read_text())

    return figure


@pytest.mark.slow
@pytest.mark.parametrize("kind", HAND_MADE)
def test_every_kind_is_written_as_the_figure_it_is(kind, drawn):
    figure = drawn("by-hand", kind)
    assert figure["data"]


def test_every_kind_is_tested_here():
    assert {*HAND_MADE, "timeline"} == set(FIGURES)


def test_a_kind_has_its_own_file_next_to_the_studies(run, folder):
    code, out, stderr = run("by-hand", "history")
    assert (code, out) == (0, "studies/by-hand-history.html\n"), stderr
    page = (folder / "studies" / "by-hand-history.html").read_text()
    assert page.count("* plotly.js v") == 1
    assert FIGURES["history"].title in page


def test_axes_are_the_requested_ones(drawn):
    layout = drawn("by-hand", "--x", "speed", "--y", "perplexity")["layout"]
    assert [layout[axis]["title"]["text"] for axis in ("xaxis", "yaxis")] == [
        "tokens per second",
        "perplexity",
    ]


def test_named_trials_are_shown(drawn):
    figure = drawn("by-hand", "memory", "--trials", "3,1")
    assert [text.partition("</b>")[0] for text in figure["layout"]["yaxis"]["ticktext"]] == [
        "<b>#3",
        "<b>#1",
    ]


@pytest.mark.slow
def test_the_timeline_is_that_of_the_trial_that_is_named(drawn, one_trial_server):
    figure = drawn("by-hand", "timeline", "--trial", "1")
    assert "#1 fp32, checkpointing block, micro-batch 8" in figure["layout"]["meta"]["note"]
    assert {trace["stackgroup"] for trace in figure["data"]} == {"memory"}


def test_a_preference_moves_the_pick(drawn):
    stars = [
        next(
            trace
            for trace in drawn("by-hand", "--prefer", prefer)["data"]
            if trace["name"] == "pick"
        )
        for prefer in ("smallest", "fastest")
    ]
    assert stars[0]["x"] == [37.0]
    assert stars[1]["y"] == [1023.0]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["by-hand", "pie"], "use one of pareto, parallel, importance"),
        (["by-hand", "--x", "height"], "memory, device-memory, speed, perplexity"),
        (["by-hand", "--x", "speed", "--y", "speed"], "name two different ones"),
        (["by-hand", "memory", "--trials", "99"], "its trials are 0 to 23"),
        (["by-hand", "timeline", "--trial", "99"], "its trials are 0 to 23"),
        (["by-hand", "history", "--feasible"], "--feasible is for parallel"),
        (["by-hand", "memory", "--trial", "0"], "memory takes --trials"),
        (["too-tight", "history"], "none of the 2 trials of study 'too-tight' is feasible"),
        (["too-tight", "importance"], "importance needs at least"),
        (["too-tight", "timeline"], "has no pick"),
        (["by-hand", "--out", "studies/autotune.db/x.html"], "cannot be written"),
        (["by-hand", "--out", "figure.jpeg"], ".html, .png, .svg, .json"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_answered_with_what_there_is(arguments, expected, complaint):
    assert expected in complaint(*arguments)


# -- pictures --------------------------------------------------------------------------------------

BROWSERS = ("chromium", "google-chrome", "chrome", "chromium-browser")
needs_a_browser = pytest.mark.skipif(
    not os.environ.get("BROWSER_PATH") and not any(shutil.which(name) for name in BROWSERS),
    reason="no Chrome or Chromium is installed",
)


@pytest.mark.slow
@needs_a_browser
@pytest.mark.parametrize(("suffix", "beginning"), [("png", b"\x89PNG"), ("svg", b"<svg")])
def test_a_figure_is_written_as_an_image_of_the_requested_size(suffix, beginning, run, folder):
    file = folder / f"picture.{suffix}"
    code, _, stderr = run("by-hand", "--out", str(file), "--width", "400", "--height", "300")
    assert code == 0, stderr
    content = file.read_bytes()
    assert content.startswith(beginning)
    width = (
        int.from_bytes(content[16:20], "big")
        if suffix == "png"
        else int(content.split(b'width="')[1].split(b'"')[0])
    )
    assert width == 400


def test_without_a_browser_there_is_one_sentence_and_html_still_works(complaint, monkeypatch):
    monkeypatch.setenv("BROWSER_PATH", "/nowhere/chromium")
    error = complaint("by-hand", "--out", "figure.png")
    assert "apt install chromium" in error
    assert ".html works without" in error


def test_without_the_package_of_an_extra_there_is_one_sentence(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "kaleido", None)
    ended = run_here("plot", "by-hand", "--out", "figure.png", folder=folder)
    assert ended.returncode == 2, ended.stderr
    assert [line.partition(":")[0] for line in ended.stderr.splitlines()] == ["error", "hint"]
    assert "autotune[images]" in ended.stderr


HALF_A_CHARACTER = "caf\udce9.txt: no such file"
"""What Python makes of a path that is no UTF-8."""


@pytest.mark.parametrize("command", ["plot", "report"])
def test_a_message_with_half_a_character_ends_no_page(command, tmp_path, monkeypatch, capsys):
    url = f"sqlite:///{tmp_path}/studies/autotune.db"
    write_study(url, [measured(), Measurement(outcome="crashed", message=HALF_A_CHARACTER)])
    monkeypatch.setattr(
        sys,
        "argv",
        ["autotune", command, "by-hand", "--storage", url, "--out", str(tmp_path / "page.html")],
    )
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0, capsys.readouterr().err
    assert "no such file" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize("form", [[], ["--csv"], ["--markdown"], ["--json"]], ids=str)
def test_a_message_with_half_a_character_ends_no_output(form, tmp_path):
    url = f"sqlite:///{tmp_path}/studies/autotune.db"
    write_study(url, [measured(), Measurement(outcome="crashed", message=HALF_A_CHARACTER)])
    ended = run_here("show", "by-hand", "--storage", url, *form, folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "file" in ended.stdout
