"""inductor's cache: in a folder of the study or of the user, never in one of another user."""

import hashlib
import io
import os
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

from autotune.analysis.pick import DEFAULT_PREFERENCES
from autotune.cli.live import PlainDisplay
from autotune.execution.compile_cache import CompilerCaches
from autotune.execution.local import LocalExecutor
from autotune.study.events import Notice
from autotune.study.progress import Progress
from autotune.study.request import SearchRequest
from autotune.study.search import search
from tests.building.light_server import LIGHT_COMMAND
from tests.building.trial_servers import STAND_IN, STAND_IN_COMMAND

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


@pytest.fixture(autouse=True)
def cache_home(tmp_path, monkeypatch):
    home, temporary = tmp_path / "cache", tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    return home


@pytest.fixture
def notes():
    return []


@pytest.fixture
def caches(notes):
    with closing(CompilerCaches(notes.append)) as opened:
        yield opened


@pytest.fixture
def spaced(tmp_path):
    return tmp_path / "my studies" / "one"


def plant(cache_home):
    """A folder of the predictable name, which everybody can write to."""
    (cache_home / "autotune").mkdir(parents=True)
    (cache_home / "autotune").chmod(0o777)


def test_the_cache_is_in_the_folder_of_the_study(caches, tmp_path):
    cache = tmp_path / "one" / "inductor"
    assert caches.environment(tmp_path / "one") == {
        VARIABLE: str(cache),
        "TRITON_CACHE_DIR": str(cache / "triton"),
    }


def test_a_study_with_a_space_in_its_path_has_a_cache_without_one(caches, spaced, cache_home):
    cache = Path(caches.environment(spaced)[VARIABLE])
    assert " " not in str(cache)
    assert cache.parent == cache_home / "autotune" / "inductor"


def test_the_next_search_of_that_study_has_the_same_cache(caches, spaced, notes):
    with closing(CompilerCaches(notes.append)) as first:
        known = first.environment(spaced)
    assert (caches.environment(spaced), notes) == (known, [])


def test_another_study_has_another_cache(caches, spaced):
    assert caches.environment(spaced) != caches.environment(spaced.with_name("two"))


def test_what_lies_in_the_temporary_folder_under_a_name_that_can_be_known_is_not_used(
    caches, spaced, tmp_path
):
    own = hashlib.sha256(str(spaced / "inductor").encode()).hexdigest()[:16]
    planted = tmp_path / "tmp" / f"autotune-inductor-{own}"
    planted.mkdir(mode=0o777)
    assert caches.environment(spaced)[VARIABLE] != str(planted)


def test_a_planted_cache_is_not_used_and_one_note_says_so(caches, spaced, cache_home, notes):
    plant(cache_home)
    used = {
        caches.environment(folder)[VARIABLE] for folder in (spaced, spaced.with_name("two"), spaced)
    }
    assert len(used) == 2
    assert not any(one.startswith(str(cache_home)) for one in used)
    (note,) = notes
    assert f"{cache_home / 'autotune'} is open to others (mode 777)" in note


def test_a_temporary_cache_is_removed_with_its_search(spaced, cache_home, tmp_path, notes):
    plant(cache_home)
    with closing(CompilerCaches(notes.append)) as caches:
        Path(caches.environment(spaced)[VARIABLE]).mkdir()
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_permanent_cache_outlives_its_search(spaced, notes):
    with closing(CompilerCaches(notes.append)) as caches:
        cache = Path(caches.environment(spaced)[VARIABLE])
        cache.mkdir()
    assert cache.is_dir()


def test_where_the_home_has_a_space_as_well_the_cache_is_temporary(
    monkeypatch, caches, spaced, notes, tmp_path
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "my cache"))
    assert " " not in caches.environment(spaced)[VARIABLE]
    assert len(notes) == 1


def environment_of(executor):
    """Of its server, once that runs: before, and after its end, the kernel shows nothing."""
    executor.check_device("cpu")
    return Path(f"/proc/{executor.server_pid}/environ").read_bytes().split(b"\0")


def test_no_task_of_a_trial_server_uses_the_default_cache_of_torch_or_the_users_of_triton(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "of all programs"))
    with LocalExecutor(tmp_path / "work", server_command=LIGHT_COMMAND) as executor:
        environment = environment_of(executor)
    assert f"{VARIABLE}={tmp_path / 'work' / 'inductor'}".encode() in environment
    assert f"TRITON_CACHE_DIR={tmp_path / 'work' / 'inductor' / 'triton'}".encode() in environment


def test_a_display_says_what_could_not_be_done_as_usual():
    written = io.StringIO()
    progress = Progress(preferences=DEFAULT_PREFERENCES)
    with PlainDisplay(progress, Console(file=written, width=140)) as shown:
        shown(Notice(message="the cache is elsewhere"))
    assert written.getvalue() == "Note: the cache is elsewhere.\n"


@pytest.mark.slow
def test_a_search_next_to_a_planted_cache_goes_on_with_one_note(
    spaced, cache_home, monkeypatch, one_trial_server
):
    plant(cache_home)
    spaced.mkdir(parents=True)
    monkeypatch.chdir(spaced)
    events = []
    request = SearchRequest(
        name="one",
        space=str(STAND_IN.with_name("space.toml")),
        device="cpu",
        sampler="random",
        trials=1,
        predict=False,
        fresh=True,
        confirm=False,
    )
    executor = partial(LocalExecutor, server_command=STAND_IN_COMMAND)
    result = search(request, listener=events.append, make_executor=executor)
    assert result.trials[0].is_finished
    notes = [event.message for event in events if isinstance(event, Notice)]
    assert len([note for note in notes if "the cache of compiled code" in note]) == 1
    assert os.listdir(cache_home / "autotune") == []
