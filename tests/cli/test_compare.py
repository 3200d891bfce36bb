"""`autotune compare`, on a database made by hand."""

import json
import sys

import pytest

from autotune.cli import compare, main
from autotune.spec.workload import make_workload
from tests.building.studies import CAP_BYTES, MIB, measured, write_study


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Studies `one`, `tighter` with another cap, `deeper` with another workload, and `failed`."""
    folder = tmp_path_factory.mktemp("compare")
    url = f"sqlite:///{folder}/studies/autotune.db"
    baseline = measured(peak_memory_bytes=100 * MIB, device_bytes=100 * MIB, outcome="over_cap")
    write_study(url, [baseline, measured(peak_memory_bytes=40 * MIB)], name="one")
    small = measured(peak_memory_bytes=20 * MIB, device_bytes=20 * MIB)
    write_study(url, [baseline, small], name="tighter", cap_bytes=CAP_BYTES // 2)
    deeper = make_workload("cpu", {"steps": 24, "text_sha256": "f" * 64, "layers": 12})
    write_study(url, [baseline, measured()], name="deeper", workload=deeper)
    write_study(url, [baseline], name="failed")
    together = make_workload("cpu", {"steps": 24, "text_sha256": "f" * 64, "devices_per_trial": 2})
    half = measured(
        peak_memory_bytes=20 * MIB,
        tokens_per_second=1.5 * measured().tokens_per_second,
        devices=2,
        peak_memory_bytes_by_rank=(20 * MIB, 19 * MIB),
        communication_seconds=0.007,
        communication_share=0.257,
    )
    write_study(url, [baseline, half], name="together", workload=together)
    return folder


@pytest.fixture
def run(folder, monkeypatch, capsys):
    """run("one", "tighter") is (exit code, stdout, stderr) of the command, in this process."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "200")

    def command(*arguments):
        monkeypatch.setattr(sys, "argv", ["autotune", "compare", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, *capsys.readouterr()

    return command


@pytest.fixture
def output(run):
    def printed(*arguments):
        code, out, stderr = run(*arguments)
        assert code == 0, stderr
        return out

    return printed


def test_each_study_has_a_row_with_its_pick_and_what_it_saves(output):
    rows = output("one", "tighter").splitlines()
    assert [row.split()[-1] + row.split()[-2] for row in rows[1:3]] == ["%60", "%80"]
    assert "#1 trial 1" in rows[1]
    assert "40.00 MiB" in rows[1]


def test_each_study_has_a_line_with_its_workload_its_device_and_its_cap(output):
    line = next(line for line in output("one", "tighter").splitlines() if "tighter: " in line)
    assert line.startswith("tighter: gpt of ")
    assert line.endswith("cap 32.00 MiB")


def test_only_what_differs_is_printed(output):
    text = output("one", "tighter")
    assert "Different cap: 64.00 MiB / 32.00 MiB." in text
    assert "Different workload" not in text


def test_different_workloads_are_reported_as_incomparable(output):
    text = output("one", "deeper")
    assert "perplexities and speeds cannot be compared" in text
    assert "gpt of 12 layers" in text


def test_what_more_devices_gain_is_a_sentence(output):
    text = output("one", "together")
    assert (
        "together: 2 devices train 1.50 times as fast as 1 (scaling efficiency 75 %), with "
        "20.00 MiB on each instead of 40.00 MiB; 26 % of a profiled step is in collectives." in text
    )
    assert "Different number of devices: 1 / 2." in text
    assert "cannot be compared" not in text


def test_json_has_the_scaling_efficiency_of_each_study(output):
    studies = json.loads(output("one", "together", "--json"))["studies"]
    assert [(one["devices"], one["scaling_efficiency"]) for one in studies] == [(1, 1.0), (2, 0.75)]


def test_json_has_the_share_of_a_step_in_collectives_where_there_are_several_devices(output):
    studies = json.loads(output("one", "together", "--json"))["studies"]
    assert [one["communication_share"] for one in studies] == [None, 0.257]


def test_other_workloads_have_no_scaling_efficiency(output):
    studies = json.loads(output("deeper", "together", "--json"))["studies"]
    assert [one["speedup"] for one in studies] == [None, None]


def test_a_study_without_a_pick_has_a_row(output):
    assert "Nothing that was tried trains under 64.00 MiB." in output("one", "failed")


def test_the_figure_is_a_page_next_to_the_studies(folder, output):
    assert output("one", "tighter").splitlines()[-1] == "studies/compare-one-tighter.html"
    page = (folder / "studies" / "compare-one-tighter.html").read_text()
    assert page.count("* plotly.js v") == 1
    assert "one: #1" in page


def test_the_figure_is_written_to_the_given_file(output, tmp_path):
    output("one", "tighter", "--out", str(tmp_path / "both.json"))
    names = [trace["name"] for trace in json.loads((tmp_path / "both.json").read_text())["data"]]
    assert {"one", "pick of one", "tighter", "pick of tighter"} <= set(names)


def test_json_is_one_object_with_every_study(output):
    content = json.loads(output("one", "tighter", "--json"))
    assert [(side["study"], side["pick"], side["cap_bytes"]) for side in content["studies"]] == [
        ("one", 1, CAP_BYTES),
        ("tighter", 1, CAP_BYTES // 2),
    ]
    assert content["figure"] == "studies/compare-one-tighter.html"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["one"], "at least two different studies"),
        (["one", "one"], "at least two different studies"),
        (["one", "nope"], "'nope'"),
        (["one", "tighter", "--out", "both.gif"], ".html, .png, .svg, .json"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_answered_with_what_there_is(arguments, expected, run):
    code, out, complaint = run(*arguments)
    assert (code, out) == (2, "")
    assert expected in complaint


def test_every_trial_of_the_first_has_one_of_the_second_that_is_no_worse(output):
    told = output("one", "tighter", "--no-worse")
    assert (
        "1 of the 2 measured trials of one have another in tighter that is worse on no objective, "
        "and 1 more is on its front" in " ".join(told.split())
    )


def test_what_nothing_matches_is_none(output):
    assert (
        json.loads(output("one", "failed", "--no-worse", "--json"))["no_worse"][1]["found"] is None
    )


@pytest.mark.parametrize(
    ("studies", "expected"),
    [(("one", "deeper"), "workloads differ"), (("one", "tighter", "failed"), "not 3")],
)
def test_studies_that_cannot_be_compared_are_rejected(studies, expected, run):
    code, _, told = run(*studies, "--no-worse")
    assert (code, expected in told) == (2, True)


@pytest.mark.parametrize("name", ["one", "peak", "speed"])
def test_the_columns_of_matches_are_named_by_study_and_objective_whatever_the_study_is_called(name):
    heads = [str(column.header) for column in compare._matches_table((), name, "other").columns]
    assert heads == [f"{name}\n  other", "peak", "perplexity", "speed"]


@pytest.mark.parametrize("options", [(), ("--no-worse",)])
def test_at_80_columns_the_numbers_stand_in_a_table_that_is_not_wider(options, output, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = output("one", "tighter", *options).splitlines()
    assert lines[0].split() == ["study", "pick", "peak", "tokens/s", "perplexity", "saved"]
    assert "40.00 MiB" in lines[1]
    assert "32.00 MiB" in " ".join(lines)
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 40
