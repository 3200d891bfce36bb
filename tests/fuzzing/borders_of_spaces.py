"""Borders of TOML: search-space files, the published table in one, and a file of defaults."""

import contextlib
import io
import json
import random
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from typer.exceptions import TyperException
from typer.main import get_command

from autotune.cli import app
from autotune.cli.published import print_reference
from autotune.cli.requests import Given, request_of, settings_typed
from autotune.errors import InvalidInput, InvalidSpace
from autotune.spec.config import LegalityContext
from autotune.spec.published_table import Reference
from autotune.spec.reading import parse
from autotune.spec.search_space import SearchSpace, bind_space
from autotune.spec.setting import all_options_of
from autotune.spec.space_content import named_spaces
from autotune.spec.space_file import TABLES, load_space
from autotune.spec.space_text import space_text
from autotune.spec.workload import make_workload
from autotune.study.request import SearchRequest
from autotune.study.sampler.distributions import decide
from tests.building import views
from tests.building.results import record, study_result
from tests.building.views import four_trials, study_view
from tests.fuzzing.judging import Border, Reader
from tests.fuzzing.mutations import changed_files, toml_bytes

_EVERYTHING: dict[str, Any] = {
    "description": "one of everything",
    "techniques": {
        "precision": ["fp32", "bf16-mixed"],
        "checkpointing": ["none", "block"],
        "compile": ["none", "block"],
        "memory_budget": {"from": 0.5, "to": 1.0, "step": 0.25},
        "micro_batch_size": "divisors",
    },
    "conditions": [{"if": {"compile": ["block"]}, "then": {"checkpointing": ["none"]}}],
    "defaults": {"optimizer_fusion": "foreach"},
    "configurations": [
        {"name": "control", "micro_batch_size": 4},
        {"name": "every block", "checkpointing": "block"},
    ],
    "workload": {
        "steps": 24,
        "layers": 2,
        "learning_rates": {"adamw": 3e-4},
        "gradient_clipping": 1.0,
    },
    "scales": {"tiny": {"layers": 1, "width": 64}},
    "reference": {
        "source": "https://example.org/table",
        "measured_on": "one GPU, torch 2.8",
        "torch": "2.8.0",
        "control": "control",
        "rows": {
            "control": {
                "peak_memory": "21.165GiB",
                "tokens_per_second": 2765,
                "perplexity": 152.1,
            },
            "every block": {"peak_memory": "9GiB"},
        },
    },
}
_EXTENDING: dict[str, Any] = {
    "extends": "quick",
    "techniques": {"micro_batch_size": {"from": 1, "to": 8, "step": 1}},
    "workload": {"steps": 8},
}


def _spaces() -> list[Any]:
    named = [tomllib.loads(file.read_text()) for file in named_spaces().values()]
    return [_EVERYTHING, _EXTENDING, *named]


class _Spaces(Reader):
    """Loads a space, writes and loads it again, and samples configurations."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "space.toml"
        self._again = folder / "again.toml"

    def passes_first_check(self, given: bytes) -> bool:
        try:
            content = tomllib.loads(given.decode("utf-8-sig"))
        except (ValueError, RecursionError):
            return False
        return any(isinstance(content.get(table), dict | list) for table in TABLES)

    def read(self, given: bytes) -> Iterator[str]:
        self._file.write_bytes(given)
        space = load_space(str(self._file))
        text = space_text(space, about=f"{space.name}: {space.description}")
        yield text
        self._again.write_text(text, encoding="utf-8")
        again = replace(load_space(str(self._again)), name=space.name)
        assert again == space, "the text of a space is read as another space"
        assert parse(SearchSpace, space.to_dict()) == space
        for scale in (None, *space.scales):
            settings = space.at_scale(scale).workload
            try:
                workload = make_workload("cpu", settings)
            except InvalidInput:
                continue  # as at a search, which has other settings, too
            yield workload.describe()
        context = LegalityContext(global_batch=8)
        try:
            legal = bind_space(space, context, unavailable={})
        except InvalidSpace:
            return  # nothing in it is legal with this batch
        for line in legal.excluded:
            assert line
        if legal.values:
            draws = random.Random(0)
            for _ in range(2):
                config = decide(legal, lambda _name, values: draws.choice(values))
                assert config in legal
                yield config.fingerprint


@contextmanager
def _reading_spaces(folder: Path) -> Iterator[Reader]:
    yield _Spaces(folder)


SPACE_FILE = Border(
    first_check="it is TOML and has at least one of the tables of a search space",
    inputs=lambda: changed_files(_spaces(), toml_bytes),
    valid=lambda: [toml_bytes(space) for space in _spaces()],
    reader=_reading_spaces,
    modules=(
        "spec/space_file.py",
        "spec/space_content.py",
        "spec/space_text.py",
        "spec/search_space.py",
    ),
)


# -- the published table ---------------------------------------------------------------------------


class _Tables(Reader):
    """Loads a space with a changed table, and compares a study with it."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "space.toml"
        trials = [*four_trials(), record(4, config=views.config(micro_batch_size=4))]
        self._result = study_result(trials, baseline=0)

    def passes_first_check(self, given: bytes) -> bool:
        try:
            table = tomllib.loads(given.decode()).get("reference")
        except (ValueError, RecursionError):
            return False
        return isinstance(table, dict) and isinstance(table.get("rows"), dict)

    def read(self, given: bytes) -> Iterator[str]:
        self._file.write_bytes(given)
        space = load_space(str(self._file))
        if space.reference is None:
            return
        assert parse(Reference, json.loads(json.dumps(asdict(space.reference)))) == (
            space.reference
        )
        view = study_view(self._result, space=space)
        for form in ({}, {"as_json": True}, {"as_markdown": True}):
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                print_reference(view, **form)
            yield out.getvalue()


@contextmanager
def _reading_tables(folder: Path) -> Iterator[Reader]:
    yield _Tables(folder)


def _with_reference(reference: Any) -> bytes:
    space = {
        "description": "published",
        "techniques": {"checkpointing": ["none", "block"]},
        "configurations": [{"name": "control"}, {"name": "every block", "checkpointing": "block"}],
    }
    return toml_bytes({**space, "reference": reference})


PUBLISHED_TABLE = Border(
    first_check="it is TOML in which the table and its rows are tables",
    inputs=lambda: changed_files([_EVERYTHING["reference"]], _with_reference),
    valid=lambda: [_with_reference(_EVERYTHING["reference"])],
    reader=_reading_tables,
    modules=(
        "spec/published_table.py",
        "analysis/published_comparison.py",
        "cli/published.py",
    ),
)


# -- autotune.toml ---------------------------------------------------------------------------------

_DEFAULTS: tuple[dict[str, Any], ...] = (
    {
        "max-mem": "8GiB",
        "trials": 24,
        "time-budget": "30m",
        "dataset": "text.txt",
        "quiet": True,
        "confirm-share": 0.1,
        "predict": {"device": "cpu"},
        "show": {"prefer": "balanced"},
    },
    {"space": "quick", "layers": 2, "vocab-size": 512, "learning-rate": ["adamw=1e-3"], "seed": 3},
    {"tool": {"autotune": {"max-mem": "8GiB", "sampler": "tpe", "until-converged": False}}},
)


class _Defaults(Reader):
    """Gives the defaults of a file to commands, up to where a command would begin."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "project"
        self._folder.mkdir()
        (self._folder / "text.txt").write_text("text")

    def passes_first_check(self, given: bytes) -> bool:
        try:
            return bool(tomllib.loads(given.decode("utf-8-sig")))
        except (ValueError, RecursionError):
            return False

    def read(self, given: bytes) -> Iterator[str]:
        is_project = given.startswith(b'"tool"')
        for file in self._folder.glob("*.toml"):
            file.unlink()
        name = "pyproject.toml" if is_project else "autotune.toml"
        (self._folder / name).write_bytes(given)
        group: Any = get_command(app)
        told = io.StringIO()
        with contextlib.chdir(self._folder), contextlib.redirect_stderr(told):
            for arguments in (["search"], ["predict"], ["show", "quick"]):
                with group.make_context("autotune", list(arguments)) as parent:
                    command = group.commands[arguments[0]]
                    found = command.make_context(arguments[0], arguments[1:], parent=parent)
                    self._use(found)
        yield told.getvalue()

    def _use(self, context: Any) -> None:
        """Make the request of a search, as its command does."""
        if "trials" in context.params:
            options = [one for one in all_options_of(SearchRequest).values() if one.is_typed]
            given = Given[SearchRequest](context)
            given.update(settings_typed(options, context.params))
            request_of(SearchRequest, given)


@contextmanager
def _reading_defaults(folder: Path) -> Iterator[Reader]:
    yield _Defaults(folder)


DEFAULTS = Border(
    first_check="it is TOML with at least one key",
    inputs=lambda: changed_files(_DEFAULTS, toml_bytes),
    valid=lambda: [toml_bytes(each) for each in _DEFAULTS],
    reader=_reading_defaults,
    modules=("cli/defaults.py",),
    errors=(InvalidInput, TyperException),
)
