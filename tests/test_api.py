"""The Python interface: results with methods, and functions that take a study's name."""

import json
import pickle
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

import autotune
from autotune.errors import IllegalConfiguration, InvalidInput, StorageUnavailable, UnknownStudy
from autotune.predictor.predict import predict
from autotune.reporting.figures import FIGURES
from autotune.reporting.plain_tables import CSV_COLUMNS
from autotune.spec.config import TrainingConfig
from autotune.spec.prediction import Forecast, PredictionRequest
from autotune.spec.workload import make_workload
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

SIZES = {"layers": 2, "width": 32, "heads": 2, "sequence_length": 32, "global_batch": 4}


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """A database with `by-hand` of four trials, trial 3 the fastest, and `too-tight`."""
    url = f"sqlite:///{tmp_path_factory.mktemp('api')}/autotune.db"
    with open_store(url) as store:
        workload = make_workload("cpu", {**SIZES, "steps": 12, "text_sha256": "f" * 64})
        device = study_result().device  # whose peaks are known
        store.create_study(definition(workload=workload, device=device), trials_wanted=4)
        for number in range(4):
            chosen = TrainingConfig(
                micro_batch_size=(4, 2, 1, 4)[number], precision=PRECISIONS[number]
            )
            peak = (37 + number) * MIB
            store.store_forecast(
                "by-hand", Forecast(config=chosen, prediction=predicted(peak=peak))
            )
            measurement = measured(
                peak_memory_bytes=peak,
                device_bytes=peak,
                tokens_per_second=1000.0 + 200.0 * number,
                model_flops_per_token=1e6,
                recomputed_flops_per_token=0.0,
            )
            keep(store, chosen, measurement)
    write_study(
        url,
        [measured(peak_memory_bytes=2 * CAP_BYTES, device_bytes=2 * CAP_BYTES, outcome="over_cap")],
        name="too-tight",
    )
    return url


NOT_HERE = ("timeline", "importance")
"""The one is predicted on the spot, the other needs more trials; `test_plot_command.py` has both.
"""
PRECISIONS = ("fp32", "fp32", "fp32", "bf16-mixed")


@pytest.fixture
def result(url):
    return autotune.show("by-hand", storage=url)


def test_a_result_is_the_study_result_that_it_always_was(result):
    assert isinstance(result, autotune.StudyResult)
    assert result.to_dict()["pick"] == result.pick.number == 3


def test_a_result_can_be_sent_to_another_process(result):
    assert pickle.loads(pickle.dumps(result)) == result


def test_the_text_of_a_result_is_its_pick_and_has_no_password(result):
    text = repr(autotune.Result.of(result, url="postgresql://me:secret@host/db", preferences=None))
    assert "Pick: #3" in text
    assert "secret" not in text
    assert len(text) < 1000


def test_a_notebook_gets_html(result):
    assert "<table" in result._repr_html_()


@pytest.mark.parametrize("kind", [kind for kind in FIGURES if kind not in NOT_HERE])
def test_every_kind_of_figure_is_drawn_with_its_title(kind, result):
    drawn = result.plot(kind)
    assert drawn.data
    assert FIGURES[kind].title in drawn.layout.title.text


def test_a_figure_shows_the_pick_of_the_preferences_of_its_result(url):
    smallest = autotune.Preferences(prefer="smallest")
    result = autotune.show("by-hand", storage=url, preferences=smallest)
    stars = [trace for trace in result.plot().data if trace.name == "pick" and trace.x]
    assert result.pick.number == 0
    assert [list(star.x) for star in stars if star.x[0]] == [[37.0]]


def test_an_option_of_another_figure_is_an_error(result):
    with pytest.raises(InvalidInput, match="takes no --trials"):
        result.plot("pareto", trials=[1])


@pytest.mark.parametrize("call", [autotune.plot, autotune.explain, autotune.write_report])
def test_an_unknown_study_is_an_error(call, url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnknownStudy):
        call("nothing", storage=url)


@pytest.mark.parametrize(
    ("call", "near"),
    [
        (lambda: autotune.search(max_memm="8GiB"), "'max_mem'"),
        (lambda: autotune.search(learning_rate=1e-3), "'learning_rates'"),
        (lambda: autotune.predict(layer=3), "'layers'"),
        (lambda: autotune.predict(configuration={"checkpoint": "block"}), "'checkpointing'"),
        (lambda: autotune.fit(max_mem="1GiB", sequence_lenght=3), "'sequence_length'"),
    ],
)
def test_a_misspelt_keyword_is_answered_with_what_was_meant(call, near, one_trial_server):
    with pytest.raises(InvalidInput) as raised:
        call()
    assert f"did you mean {near}" in raised.value.hint
    assert "sha256" not in raised.value.hint


@pytest.mark.parametrize("configuration", [[1], "block", TrainingConfig()])
@pytest.mark.parametrize("function", [autotune.predict, autotune.fit])
def test_a_configuration_that_is_no_dictionary_is_answered_with_one(function, configuration):
    with pytest.raises(InvalidInput, match="is no dictionary of fields") as raised:
        function(configuration=configuration)
    assert 'configuration={"checkpointing": "block"}' in raised.value.hint


@pytest.mark.parametrize("number", [4, 99, -1])
def test_a_trial_that_is_not_there_is_an_error_that_names_those_that_are(number, result):
    with pytest.raises(InvalidInput, match=f"has no trial {number}") as raised:
        result.trial(number)
    assert "its trials are 0 to 3" in raised.value.hint


def test_a_hint_stands_below_the_message_of_a_traceback(result):
    with pytest.raises(InvalidInput) as raised:
        result.trial(4)
    assert "hint: its trials are 0 to 3" in "".join(traceback.format_exception(raised.value))


def test_one_number_is_no_list_of_trials(result):
    with pytest.raises(InvalidInput, match="trials = 3 is no list"):
        result.plot("memory", trials=3)


def test_a_trial_is_running_while_a_worker_has_it(tmp_path):
    url = f"sqlite:///{tmp_path}/autotune.db"
    with open_store(url) as store:
        store.create_study(definition(), trials_wanted=1)
        attempt = keep(store, TrainingConfig())
        assert "1 running" in repr(autotune.show("by-hand", storage=url))
        store.attempts.release(attempt.id, cause="stopped")
        assert "1 interrupted" in repr(autotune.show("by-hand", storage=url))


def test_studies_are_listed_and_compared_by_name(url):
    assert [study.name for study in autotune.studies(storage=url)] == ["by-hand", "too-tight"]
    assert autotune.compare("by-hand", "too-tight", storage=url).data
    with pytest.raises(InvalidInput, match="by-hand alone cannot be compared"):
        autotune.compare("by-hand", storage=url)


@pytest.mark.slow
def test_a_report_is_written_to_the_named_file_and_is_that_of_the_command(result, url, tmp_path):
    file = result.write_report(tmp_path / "new folder" / "one.html")
    assert "by-hand" in file.read_text()
    other = autotune.write_report("by-hand", tmp_path / "other.html", storage=url)
    assert other.read_text() == file.read_text()


def test_a_report_is_no_picture(result, tmp_path):
    with pytest.raises(InvalidInput, match=r"cannot be written as .*one\.png"):
        result.write_report(tmp_path / "one.png")


def test_a_report_in_a_place_that_is_no_folder_is_an_error(result, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageUnavailable):
        result.write_report(tmp_path / "file" / "one.html")


def test_the_pick_is_exported_and_says_what_to_do_with_it(result, tmp_path):
    written = result.export("pytorch", out=tmp_path / "made")
    assert {file.name for file in written.files} == {"train.py", "autotune_config.json"}
    assert all(file.exists() for file in written.files)
    assert written.record.number == 3
    assert "python train.py" in str(written)


def test_a_trial_is_exported_by_the_name_of_its_study(url, tmp_path):
    autotune.export("by-hand", "pytorch", trial=1, out=tmp_path / "made", storage=url)
    assert autotune.load_config(tmp_path / "made" / "autotune_config.json").micro_batch_size == 2


def test_files_of_another_content_are_replaced_only_if_that_is_asked_for(result, tmp_path):
    (tmp_path / "train.py").write_text("mine")
    with pytest.raises(InvalidInput, match="already exists"):
        result.export("pytorch", out=tmp_path)
    result.export("pytorch", out=tmp_path, overwrite=True)
    assert (tmp_path / "train.py").read_text() != "mine"


def test_what_a_target_cannot_express_is_an_error_if_it_must_be_complete(result, tmp_path):
    with pytest.raises((IllegalConfiguration, InvalidInput)):
        result.export("axolotl", trial=2, out=tmp_path / "made", strict=True, target_version="none")


@pytest.mark.parametrize("call", ["export", "explain"])
def test_a_study_without_a_pick_needs_a_trial(call, url):
    result = autotune.show("too-tight", storage=url)
    arguments = ("pytorch",) if call == "export" else ()
    with pytest.raises(InvalidInput, match="no feasible trial to pick") as error:
        getattr(result, call)(*arguments)
    # `explain` has no option --trial.
    assert error.value.hint == "name a trial, see autotune show too-tight"


def test_the_frame_has_a_row_for_each_trial_and_the_columns_of_the_csv(result):
    frame = result.to_pandas()
    assert list(frame.index) == [0, 1, 2, 3]
    assert [frame.index.name, *frame.columns] == list(CSV_COLUMNS)
    assert frame.peak_memory_bytes.max() == 40 * MIB
    assert list(frame[frame.pick].index) == [3]


def test_what_was_not_measured_is_missing_in_the_frame(url):
    frame = autotune.show("too-tight", storage=url).to_pandas()
    assert frame.final_loss.isna().all()


# -- predictions -----------------------------------------------------------------------------------


def test_a_prediction_from_python_is_the_predictors_own(one_trial_server):
    prediction = autotune.predict(configuration={"checkpointing": "block"}, device="cpu", **SIZES)
    config = TrainingConfig(checkpointing="block", micro_batch_size=SIZES["global_batch"])
    own = predict(
        PredictionRequest(workload=make_workload("cpu", SIZES), config=config, device="cpu")
    )
    assert prediction.bytes_by_category == own.bytes_by_category


@pytest.mark.slow
def test_a_trial_is_predicted_by_the_name_of_its_study(url, one_trial_server):
    of_trial = autotune.predict("by-hand", trial=1, storage=url)
    described = autotune.predict(configuration={"micro_batch_size": 2}, device="cpu", **SIZES)
    assert of_trial.peak_memory_bytes == described.peak_memory_bytes


def test_a_study_and_a_description_contradict_each_other(url):
    with pytest.raises(InvalidInput, match="layers: the study sets workload"):
        autotune.predict("by-hand", layers=3, storage=url)


def test_a_trial_without_a_study_is_an_error():
    with pytest.raises(InvalidInput, match="trial 3 is of no study"):
        autotune.fit(trial=3, max_mem="1GiB")


@pytest.mark.slow
def test_the_largest_model_is_found_for_the_configuration_and_cap_of_a_study(
    url, one_trial_server, tmp_path
):
    found = autotune.fit("by-hand", trial=1, max_mem="1MiB", confirm=False, storage=url)
    (row,) = found.rows
    assert row.config.micro_batch_size == 2
    assert row.prediction.upper_bound_bytes <= 1 * MIB
    assert f"{row.value} layer" in str(found)
    command = ("fit", "by-hand", "--trial", "1", "--max-mem", "1MiB", "--no-trial", "--json")
    ended = run_here(*command, "--quiet", "--storage", url, folder=tmp_path)
    assert json.loads(ended.stdout) == json.loads(json.dumps(found.to_dict()))


@pytest.mark.slow
def test_the_largest_model_is_found_for_a_description(one_trial_server):
    found = autotune.fit(
        max_mem="1MiB",
        device="cpu",
        configuration={"checkpointing": "block"},
        vary="seq-len",
        confirm=False,
        **SIZES,
    )
    assert found.best.config.checkpointing == "block"


def test_a_fit_needs_a_cap():
    with pytest.raises(InvalidInput, match="there is no memory cap"):
        autotune.fit(**SIZES)


# -- the package -----------------------------------------------------------------------------------


LATE = ("Client", "LightningCallback", "TrainerCallback")
"""Each imports a library that takes time, so that `from autotune import *` leaves it out."""


def test_only_what_is_public_is_listed():
    code = (
        "import autotune, autotune.study.search\n"
        "print(*(name for name in dir(autotune) if not name.startswith('__')))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == sorted([*autotune.__all__, *LATE])


def test_everything_that_is_listed_is_there_and_says_what_it_is():
    for name in autotune.__all__:
        assert getattr(autotune, name).__doc__


@pytest.mark.slow
def test_a_callback_of_a_trainer_that_is_not_installed_names_it():
    code = (
        "import sys, autotune\n"
        "for missing in ('transformers', 'lightning', 'pytorch_lightning'):\n"
        "    sys.modules[missing] = None\n"
        "for callback in ('TrainerCallback', 'LightningCallback'):\n"
        "    print(hasattr(autotune, callback))\n"
        "    try:\n"
        "        getattr(autotune, callback)\n"
        "    except AttributeError as error:\n"
        "        print(error)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.count("False") == 2
    assert "autotune.TrainerCallback needs transformers" in ran.stdout
    assert "autotune.LightningCallback needs lightning" in ran.stdout


def test_type_checkers_find_the_annotations():
    assert (Path(autotune.__file__).parent / "py.typed").exists()
