"""The kind of segments is the trial's, every other setting of the allocator is the user's."""

import os

import pytest

from autotune.execution.server import client
from autotune.exporters import TARGETS
from autotune.exporters.launch import before_torch
from autotune.spec.config import TrainingConfig
from autotune.system.allocator_settings import own_settings
from autotune.techniques.allocator import set_allocator
from tests.exporters.recipes import recipe

TODAY, BEFORE = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
OWN = "max_split_size_mb:128,garbage_collection_threshold:0.8"


def by_trial(allocator):
    set_allocator(allocator)


def by_exported_code(allocator):
    code = "\n".join(["import os", *before_torch(TrainingConfig(allocator=allocator))])
    exec(code, {})


@pytest.fixture
def settings(monkeypatch):
    """settings(name="value") sets the variables of the environment, and no other of these."""

    for name in (TODAY, BEFORE):
        monkeypatch.setenv(name, "")  # so that what a test sets is undone
        monkeypatch.delenv(name)

    def change(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return change


@pytest.mark.parametrize("set_segments", [by_trial, by_exported_code])
@pytest.mark.parametrize("name", [TODAY, BEFORE])
def test_expandable_segments_leave_the_other_settings_as_they_are(set_segments, name, settings):
    settings(**{name: OWN})
    set_segments("expandable")
    assert own_settings() == os.environ[TODAY] == f"{OWN},expandable_segments:True"


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("allocator", ["default", "expandable"])
def test_what_an_export_sets_holds_in_any_torch(target, allocator):
    """Before 2.10 torch knows the older name alone, and 2.13 prefers it."""
    asked = recipe(TrainingConfig(micro_batch_size=8, allocator=allocator))
    export = TARGETS[target].write(asked, TARGETS[target].versions[0])
    for text in (export.command, *export.files.values()):
        assert (TODAY in text) == (BEFORE in text)


def test_default_segments_of_a_trial_leave_the_other_settings_as_they_are(settings):
    settings(**{BEFORE: OWN})
    set_allocator("default")
    assert own_settings() == f"{OWN},expandable_segments:False"


@pytest.mark.parametrize(("allocator", "last"), [("default", False), ("expandable", True)])
def test_the_kind_of_segments_of_a_trial_comes_last(allocator, last, settings):
    """Of a key that is there twice torch takes the later value."""
    settings(**{TODAY: f"expandable_segments:{not last},{OWN}"})
    set_allocator(allocator)
    assert own_settings().endswith(f",expandable_segments:{last}")


@pytest.mark.parametrize("set_segments", [by_trial, by_exported_code])
def test_without_settings_of_a_user_only_ours_are_made(set_segments, settings):
    settings()
    set_segments("default")
    assert own_settings() == ""
    set_segments("expandable")
    assert own_settings() == "expandable_segments:True"


def test_the_older_name_comes_first_as_in_torch(settings):
    settings(**{TODAY: "garbage_collection_threshold:0.5", BEFORE: OWN})
    assert own_settings() == OWN


def test_a_trial_is_started_with_the_settings_of_the_user(settings):
    settings(**{BEFORE: OWN})
    assert client._environment_of_trials("mark")[BEFORE] == OWN


def test_another_backend_that_nothing_counts_is_left_out(settings):
    settings(**{TODAY: f"backend:cudaMallocAsync,{OWN}"})
    set_allocator("expandable")
    assert os.environ[TODAY] == f"{OWN},expandable_segments:True"
