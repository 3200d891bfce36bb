"""Scripts that others wrote, with our lines: searched, and trained with the export of the pick."""

from pathlib import Path

import pytest

from studies.compressed import read_json
from studies.your_script import real_scripts
from studies.your_script.real_scripts import SCRIPTS, Edit, NotFetched

RESULTS = Path(real_scripts.__file__).with_name("real_scripts.json.xz")


def test_our_lines_are_counted_by_the_lines_of_the_original():
    edits = (Edit(1, "first\nsecond"), Edit(2, "instead", instead_of=1))
    assert real_scripts.edited("a\nb\nc\nd\n", edits) == "a\nfirst\nsecond\nb\ninstead\nd\n"


def test_a_file_of_another_commit_is_not_searched(tmp_path):
    script = SCRIPTS["nanoGPT"]
    (tmp_path / "nanoGPT").mkdir()
    (tmp_path / "nanoGPT" / "train.py").write_text("print('another')\n")
    with pytest.raises(NotFetched, match=f"train.py is not the file of commit {script.commit}"):
        real_scripts.fetch(script, "train.py", tmp_path)


@pytest.mark.parametrize(
    ("speeds", "within"), [((100, 104), True), ((100, 106), False), ((106, 100), False)]
)
def test_two_picks_count_as_one_where_the_noise_covers_their_speeds(speeds, within):
    trials = [
        {
            "config": {"micro_batch_size": number},
            "tokens_per_second": speed,
            "tokens_per_second_spread": 2.5,
            "perplexity": 10.0,
        }
        for number, speed in enumerate(speeds)
    ]
    found = real_scripts.compare({"trials": trials, "pick": 0}, {"trials": trials, "pick": 1})
    assert (found["same"], found["within_noise"]) == (False, within)


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_the_stored_results_are_of_this_commit_and_these_lines(script):
    found = read_json(RESULTS)[script.repository]
    assert found["commit"] == script.commit
    assert found["edits"] == [vars(edit) for edit in script.edits]


@pytest.mark.network
@pytest.mark.parametrize("name", SCRIPTS)
def test_its_pick_is_that_of_full_trainings_and_its_export_keeps_the_promised_peak(name, tmp_path):
    real_scripts.make_given(tmp_path / "given")
    found = real_scripts.study(SCRIPTS[name], tmp_path, None)
    assert found["picks"]["same"] or found["picks"]["within_noise"]
    promised = found["export"]["promised_peak_bytes"]
    assert found["export"]["peak_memory_bytes"] == pytest.approx(promised, rel=0.01)
