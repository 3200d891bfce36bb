"""Sentences on the pages have the names of fields, not of options of the command line."""

import ast
import html
import json
import re
from pathlib import Path

import pytest

import autotune
from autotune.service.pages.contexts import sentence
from autotune.service.pages.field_names import (
    FIELDS,
    LABELS,
    LABELS_OF_ACTIONS,
    LABELS_OF_FIT,
    in_fields,
)
from autotune.service.problems import Problem
from autotune.service.stream import streamed
from autotune.spec.queued_search import ServiceEvent
from tests.building.service import BEARER, serving, write_example

PACKAGE = Path(autotune.__file__).parent
NOT_ON_PAGES = ("cli", "exporters")
"""Packages whose texts are of the command line, or are commands themselves."""
BARE = re.compile(r"(?<![\w-])--[a-z][\w-]*(?! \(on the command line\))(?![\w=-])")
COMMAND = re.compile(r"\b(?:autotune|torchrun|accelerate|ray|nvidia-smi) [a-z-][^,;\n]*")


def texts_with_options():
    """Returns the texts of all errors and notes that could be on a page, and name an option."""
    found = set()
    for file in PACKAGE.rglob("*.py"):
        if file.relative_to(PACKAGE).parts[0] in NOT_ON_PAGES:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [
                    part.value if isinstance(part, ast.Constant) else "{VALUE}"
                    for part in node.values
                ]
                found.add("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return sorted(text for text in found if " --" in f" {text}" and "\n" not in text)


def bare_options(shown):
    return BARE.findall(COMMAND.sub("", shown))


def test_no_sentence_of_the_package_names_a_bare_option_on_a_page():
    texts = texts_with_options()
    assert len(texts) > 100
    for here in (LABELS, LABELS_OF_FIT, LABELS_OF_ACTIONS):
        assert {
            text: bare for text in texts if (bare := bare_options(in_fields(text, here=here)))
        } == {}


@pytest.mark.parametrize("keyword", FIELDS)
def test_the_option_of_a_field_is_its_label(keyword):
    option = FIELDS[keyword]
    for flag in (option.flag, option.synonym):
        if not (flag or "").startswith("--"):
            continue
        assert in_fields(f"use {flag} 3, or {flag}") == (
            f"use “{LABELS[keyword]}” 3, or “{LABELS[keyword]}”"
        )


@pytest.mark.parametrize("keyword", FIELDS)
def test_a_setting_that_is_invalid_is_called_as_its_field(keyword):
    shown = f"Invalid “{LABELS[keyword]}”: 'x' is none"
    assert in_fields(f"Invalid {keyword}: 'x' is none") == shown
    assert in_fields(f"Invalid body.{keyword}: 'x' is none") == shown
    of_file = f"a.toml: {keyword} = 3, Invalid {keyword}: 3"
    assert in_fields(of_file) == of_file


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("--max-mem is needed", "“Memory cap” is needed."),
        ("give it by --devices-per-trial", "Give it by “Devices per trial” (in a new search)."),
        ("--whole-depth predicts all", "--whole-depth (on the command line) predicts all."),
        ("run: autotune predict --from FILE", "Run: autotune predict --from FILE."),
        ("name it by --model", "Name it by “The config.json of its model”."),
        ("--max-memory is none", "--max-memory (on the command line) is none."),
    ],
)
def test_a_sentence_of_the_fit_page_says_where_a_field_is(text, shown):
    assert sentence(text, here=LABELS_OF_FIT) == shown


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    storage = f"sqlite:///{tmp_path_factory.mktemp('names')}/autotune.db"
    write_example(storage)
    with serving(storage) as client:
        yield client


@pytest.mark.parametrize(
    "text",
    [
        "seed_everything: 1\ntrainer: {precision: 16-mixed}\n",
        "stage: sft\nfinetuning_type: full\ncutoff_len: 8\nper_device_train_batch_size: 1\n",
        "[model]\nname = 'llama3'\nflavor = '9B'\n[training]\nseq_len = 8\n",
        "compute_environment: LOCAL_MACHINE\nnum_processes: 2\n",
        "[model]\nname = 'llama3'\nflavor = '8B'\n[parallelism]\ncontext_parallel_degree = -1\n",
        json.dumps({"model_type": "llama"}),
    ],
    ids=lambda text: text[:20],
)
def test_an_error_on_the_fit_page_names_no_bare_option(served, text):
    answer = served.get("/fit", params={"text": text}, headers=BEARER)
    assert answer.status_code == 422
    [shown] = re.findall(r'id="problem">(.*)</p>', answer.text)
    assert bare_options(html.unescape(shown)) == []


@pytest.mark.parametrize(
    "given",
    [
        {"max_mem": "1GiB", "width": "30", "heads": "4"},
        {"max_mem": "1GiB", "steps": "1"},
        {"max_mem": "1GiB", "scale": "large"},
        {"max_mem": "1GiB", "nodes_per_trial": "2"},
        {"max_mem": "1GiB", "vocab_size": "2"},
        {"max_mem": "1GiB", "text_column": "a", "dataset": "none.txt"},
    ],
    ids=str,
)
def test_an_error_on_the_page_of_a_new_search_names_no_bare_option(served, given):
    headers = {**BEARER, "Sec-Fetch-Site": "same-origin"}
    answer = served.post("/new", data=given, headers=headers, follow_redirects=False)
    assert answer.status_code == 422
    shown = html.unescape(" ".join(re.findall(r'<p class="error"[^>]*>(.*?)</p>', answer.text)))
    assert shown.strip()
    assert bare_options(shown) == []


# -- what the script of a page shows ---------------------------------------------------------------

ACTIONS = (PACKAGE / "service/pages/static/actions.js").read_text()
HEADERS_OF_ACTIONS = dict(
    re.findall(r'"?([\w-]+)"?: "([^"]+)"', re.search(r"headers: {(.*?)}", ACTIONS)[1])
)


@pytest.mark.parametrize("keyword", LABELS_OF_ACTIONS)
def test_a_dialog_has_a_field_of_each_name(keyword):
    assert re.search(rf'name: "{keyword}", label: "{LABELS_OF_ACTIONS[keyword]}\b', ACTIONS)


@pytest.fixture(scope="module")
def failing(served):
    """A server one of whose addresses answers as one that rejects an option does."""

    @served.app.get("/api/v1/failing")
    def fail():
        raise Problem(422, "--trials 3 is less than --layers 4", hint="drop --storage")

    return served


def test_an_error_of_an_action_has_the_names_of_fields_in_the_dialog(failing):
    shown = failing.get("/api/v1/failing", headers={**BEARER, **HEADERS_OF_ACTIONS}).json()
    assert (shown["detail"], shown["hint"]) == (
        "“More trials” 3 is less than “Layers” (in a new search) 4",
        "drop --storage (on the command line)",
    )


@pytest.mark.parametrize("keyword", ["trials", "priority"])
def test_an_invalid_value_of_a_dialog_has_the_name_of_its_field_alone(served, keyword):
    headers = {**BEARER, **HEADERS_OF_ACTIONS}
    answer = served.post("/api/v1/searches/1/continue", json={keyword: [[]]}, headers=headers)
    shown = answer.json()
    assert shown["detail"].startswith(f"Invalid “{LABELS_OF_ACTIONS[keyword]}”")
    assert shown.get("hint", "") == ""


def test_a_program_is_told_of_options(failing):
    shown = failing.get("/api/v1/failing", headers=BEARER).json()
    assert (shown["detail"], shown["hint"]) == (
        "--trials 3 is less than --layers 4",
        "drop --storage",
    )


def test_a_notice_comes_with_the_names_of_fields():
    event = ServiceEvent(
        number=1, search=2, study="s", kind="notice", at=0.0, data={"message": "use --max-mem 1GiB"}
    )
    data = json.loads(re.search(rb"data: (.*)", streamed(event).text)[1])
    assert data["message"] == "use --max-mem 1GiB"
    assert data["on_page"] == "use “Memory cap” 1GiB"
