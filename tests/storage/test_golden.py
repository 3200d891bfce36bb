"""A database that an earlier version has written is shown, continued and exported as it was.

`golden/README.md` says how the databases were made.
"""

import dataclasses
import json
import sqlite3
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path

import pytest

import autotune
from autotune.execution.tasks import Prepare
from autotune.storage.tokens import Tokens
from autotune.study.check import check_studies
from autotune.study.request import SearchRequest
from autotune.study.search import search
from tests.building.studies import open_store
from tests.building.whole_study import run_command
from tests.quick_study.quick_executor import QuickExecutor

GOLDEN = Path(__file__).parent / "golden"
VERSIONS = ("0.1", "0.2", "0.2.1")
STUDY = "golden"


@pytest.fixture(params=VERSIONS)
def version(request):
    return request.param


@pytest.fixture
def before(version):
    """What the version itself showed of its study."""
    return json.loads((GOLDEN / f"{version}.show.json").read_text(encoding="utf-8"))


@pytest.fixture
def url(version, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("text.jsonl", "space.toml"):
        (tmp_path / name).write_bytes((GOLDEN / name).read_bytes())
    with closing(sqlite3.connect("autotune.db")) as connection:
        connection.executescript((GOLDEN / f"{version}.sql").read_text(encoding="utf-8"))
    return "sqlite:///autotune.db"


def known_then(now, before):
    """Returns what is shown now without the keys that came later, also deeper down."""
    if isinstance(before, dict):
        return {key: known_then(now[key], value) for key, value in before.items()}
    if isinstance(before, list) and len(now) == len(before):
        return [known_then(*pair) for pair in zip(now, before, strict=True)]
    return now


def test_what_an_earlier_version_showed_is_shown(url, before, monkeypatch, capsys):
    code, out, _ = run_command(monkeypatch, capsys, "show", STUDY, "--json", "--storage", url)
    shown = json.loads(out)
    assert code == 0
    assert known_then(shown, before) == before


def test_the_tokens_of_an_earlier_version_go_on_beside_those_with_a_webhook(url):
    with closing(sqlite3.connect("autotune.db")) as connection, connection:
        connection.execute(
            "INSERT INTO autotune_tokens (name, digest, read_only) VALUES ('ada', 'a', 1)"
        )
    with open_store(url) as store:
        tokens = Tokens(store.database)
        tokens.add("bob", webhook="http://127.0.0.1:9/of-bob")
        assert [(token.name, token.role) for token in tokens.all()] == [
            ("ada", "reader"),
            ("bob", "member"),
        ]
        assert tokens.webhooks() == {"bob": "http://127.0.0.1:9/of-bob"}


class _SameMachine(QuickExecutor):
    """Runs no trial, and takes itself for the machine and the text of the study."""

    def __init__(self, folder, *, study, **options):
        super().__init__(folder, **options)
        self._study = study

    def probe(self, *_):
        return self._study.device, {}

    def identify(self, *_):
        return self._study.device

    def call(self, task, **options):
        future = super().call(task, **options)
        if not isinstance(task, Prepare):
            return future
        prepared = Future()
        text_sha256 = self._study.workload.text_sha256
        prepared.set_result(dataclasses.replace(future.result(), text_sha256=text_sha256))
        return prepared


def test_a_study_of_an_earlier_version_is_continued(url, before):
    with open_store(url, create=False) as store:
        study, _ = store.definition(STUDY)
    result = search(
        SearchRequest(name=STUDY, storage=url, trials=6, confirm=False, predict=False),
        make_executor=lambda folder, **options: _SameMachine(folder, study=study, **options),
    )
    assert len(before["trials"]) == 4
    trials = [trial.to_dict() for trial in result.trials]
    assert known_then(trials[:4], before["trials"]) == before["trials"]
    assert [trial["outcome"] for trial in trials[4:]] == ["ok", "ok"]
    assert check_studies(url).findings == ()


def test_the_pick_of_an_earlier_version_is_exported_for_a_trainer(url, before, tmp_path):
    written = autotune.export(STUDY, "pytorch", out=tmp_path / "pick", storage=url)
    pick = before["trials"][before["pick"]]
    assert known_then(written.record.to_dict(), pick) == pick
    (script,) = (file for file in written.files if file.suffix == ".py")
    compile(script.read_text(), script.name, "exec")


def test_a_study_of_an_earlier_version_is_moved_to_another_database(
    url, before, monkeypatch, capsys
):
    moved = "sqlite:///moved.db"
    for arguments in (
        ("studies", "export", STUDY, "--out", "exported.db", "--storage", url),
        ("studies", "import", "exported.db", "--storage", moved),
    ):
        assert run_command(monkeypatch, capsys, *arguments)[0] == 0
    _, out, _ = run_command(monkeypatch, capsys, "show", STUDY, "--json", "--storage", moved)
    assert known_then(json.loads(out), before) == {**before, "storage": moved}
