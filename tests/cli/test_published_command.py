"""`show --reference` on a study made by hand, and `--scale`, as a user types them."""

import json

import pytest

from autotune.spec.space_file import load_space
from autotune.spec.workload import make_workload
from tests.building.commands import run_here
from tests.building.studies import MIB, keep, measured, open_store
from tests.building.studies import definition as study_definition

pytestmark = pytest.mark.usefixtures("one_trial_server")

TABLE = """
[techniques]
checkpointing = ["none", "block"]
[workload]
layers = 2
width = 32
heads = 2
sequence_length = 32
global_batch = 4
[[configurations]]
name = "plain"
[[configurations]]
name = "check | pointed"
checkpointing = "block"
[scales.double]
layers = 4
[reference]
source = "a paper"
measured_on = "one GPU"
control = "plain"
[reference.rows]
plain = { peak_memory = "20GiB", tokens_per_second = 1000, perplexity = 12.5 }
"check | pointed" = { peak_memory = "10GiB", tokens_per_second = 800, perplexity = 12.5 }
"""
PEAKS = {"plain": 40 * MIB, "check | pointed": 10 * MIB}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with `table.toml`, its study `mine`, and a study `plain` without a table."""
    folder = tmp_path_factory.mktemp("reference")
    (folder / "table.toml").write_text(TABLE)
    space = load_space(str(folder / "table.toml"))
    with open_store(f"sqlite:///{folder}/studies/autotune.db") as store:
        definition = study_definition(
            "mine", space=space, workload=make_workload("cpu", space.workload)
        )
        store.create_study(definition, trials_wanted=2)
        for name, config in definition.legal_space().named.items():
            result = measured(peak_memory_bytes=PEAKS[name], device_bytes=PEAKS[name])
            keep(store, config, result, study="mine", name=name)
        store.create_study(study_definition("plain"), trials_wanted=1)
    return folder


def test_measured_and_published_are_compared_with_their_difference(folder):
    ended = run_here("show", "mine", "--reference", "--json", folder=folder)
    answer = json.loads(ended.stdout)
    row = answer["rows"][1]
    assert (row["saved"], row["published_saved"], row["saved_difference"]) == (0.75, 0.5, 0.25)
    assert (answer["control"], answer["source"]) == ("plain", "a paper")


@pytest.mark.parametrize("width", ["60", "80", "140"])
def test_the_table_says_every_row_in_full_whatever_the_terminal(folder, width):
    ended = run_here("show", "mine", "--reference", folder=folder, COLUMNS=width)
    for words in ("check | pointed", "75.0 %", "50.0 %", "+25.0", "a paper, on one GPU"):
        assert words in ended.stdout


def test_markdown_keeps_a_name_in_its_cell(folder):
    ended = run_here("show", "mine", "--reference", "--markdown", folder=folder)
    assert r"| check \| pointed | 10.00 MiB | 10.00 GiB |" in ended.stdout


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("show", "plain", "--reference"), "'plain'"),
        (("show", "mine", "--reference", "--csv"), "--csv"),
        (("predict", "--scale", "tiny"), "--scale"),
        (("explain", "--scale", "tiny"), "--scale"),
        (("fit", "--max-mem", "1GiB", "--scale", "tiny"), "--scale"),
        (("predict", "--space", "table.toml", "--scale", "huge"), "double"),
        (("search", "--scale", "tiny"), "'default'"),
    ],
)
def test_what_has_no_table_or_no_scale_is_rejected_by_name(arguments, named, folder):
    ended = run_here(*arguments, folder=folder)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert named in ended.stderr.replace("CSV", "--csv")
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
def test_a_scale_is_predicted_in_its_size(folder):
    peaks = []
    for scale in ((), ("--scale", "double")):
        arguments = ("predict", "--space", "table.toml", *scale, "--device", "cpu", "--json")
        ended = run_here(*arguments, folder=folder)
        peaks.append(json.loads(ended.stdout)["predictions"][-1]["peak_memory_bytes"])
    assert peaks[1] > 1.5 * peaks[0]
