"""The perplexity of pretrained weights before any training, with trials that take no time."""

import json
from concurrent.futures import Future

import numpy
import pytest
from safetensors.numpy import save_file

from autotune.errors import TrialLost
from autotune.execution.tasks import Train
from autotune.spec.attempt import FinishedTrial
from autotune.spec.provenance import MEASURED
from autotune.spec.result import Measurement
from autotune.study.events import Notice
from autotune.study.request import SearchRequest
from autotune.study.search import search
from tests.building.studies import open_store
from tests.quick_study.quick_executor import QuickExecutor
from tests.quick_study.worker import SPACE

MODEL = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 256,
}
KNOWN = Measurement(outcome="ok", perplexity=12.5, perplexity_source=MEASURED)
TOO_LARGE = Measurement(outcome="out_of_memory", message="asked for 32 GiB")


class Machine(QuickExecutor):
    """Evaluates untrained weights with `endings` in turn: measurements, or errors."""

    endings = ()

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self._endings = iter(type(self).endings)

    def call(self, task, **options):
        if not isinstance(task, Train) or not task.training.evaluates_only:
            return super().call(task, **options)
        evaluated.append(task.training.config)
        ending, done = next(self._endings), Future()
        if isinstance(ending, Exception):
            done.set_exception(ending)
        else:
            done.set_result(FinishedTrial(measurement=ending, seconds=0.5))
        return done

    def check_device(self, device):
        """It works again."""


evaluated = []
"""The configurations that weights were evaluated in, of all machines of a test."""


@pytest.fixture
def searched(tmp_path, monkeypatch):
    """searched(ending, ..., name=...) runs a search with pretrained weights; returns its result."""
    monkeypatch.chdir(tmp_path)
    evaluated.clear()
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODEL))
    save_file({"weight": numpy.zeros(1, numpy.float32)}, folder / "model.safetensors")

    def run(*endings, listener=lambda event: None, pretrained=True, goes_on=False, **options):
        monkeypatch.setattr(Machine, "endings", endings)
        settings = {"name": "study", "fresh": not goes_on, "trials": 3, **options}
        workload = {"model": str(folder), "pretrained": pretrained, "tokenizer": "bytes"}
        request = SearchRequest(
            storage=f"sqlite:///{tmp_path}/quick.db",
            space=str(SPACE),
            max_mem=1024**3,
            device="cpu",
            sampler="random",
            workload={} if goes_on else workload,
            **settings,
        )
        return search(request, make_executor=Machine, listener=listener)

    return run


def test_it_is_measured_before_the_trials_and_no_trial_is_counted(searched):
    result = searched(KNOWN)
    assert (result.initial_perplexity, len(result.trials)) == (12.5, 3)
    assert [(config.precision, config.micro_batch_size) for config in evaluated] == [("fp32", 1)]
    assert result.to_dict()["initial_perplexity"] == 12.5


def test_a_study_that_goes_on_does_not_measure_it_again(searched):
    searched(KNOWN)
    assert searched(trials=5, goes_on=True).initial_perplexity == 12.5


def test_a_model_without_pretrained_weights_has_none(searched):
    result = searched(pretrained=False)
    assert (result.initial_perplexity, evaluated) == (None, [])


def test_weights_that_are_too_large_in_fp32_are_evaluated_in_bf16(searched):
    result = searched(TOO_LARGE, KNOWN)
    assert [config.precision for config in evaluated] == ["fp32", "bf16-true"]
    assert (result.initial_perplexity, result.initial_perplexity_remark) == (12.5, "in bf16-true")


@pytest.mark.parametrize(
    ("endings", "reason"),
    [
        ((TOO_LARGE, TOO_LARGE), "out of memory"),
        ((Measurement(outcome="crashed", message="a bad file"),), "crashed: a bad file"),
        ((TrialLost("the process was killed"),), "the process was killed"),
    ],
)
def test_where_it_fails_the_search_goes_on_and_says_why(searched, endings, reason):
    notices = []
    result = searched(*endings, listener=notices.append)
    assert len(result.trials) == 3
    assert (result.initial_perplexity, result.initial_perplexity_remark) == (None, reason)
    assert any(isinstance(one, Notice) and reason in one.message for one in notices)


def test_what_has_failed_is_measured_by_the_next_search(searched):
    searched(TOO_LARGE, TOO_LARGE)
    assert searched(KNOWN, trials=4, goes_on=True).initial_perplexity == 12.5


def test_another_study_of_the_same_workload_reuses_it(searched, tmp_path):
    searched(KNOWN)
    assert searched(name="second", fresh=False).initial_perplexity == 12.5
    with open_store(f"sqlite:///{tmp_path}/quick.db") as store:
        assert len(store.confirmations("second")) >= 1
