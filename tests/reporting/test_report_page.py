"""The HTML of a report: one document that makes no request and escapes hostile text."""

import itertools
import json
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from autotune.printable import printable
from autotune.reporting.rendering import script_json
from autotune.reporting.report.page import page
from tests.building.reports import (
    BASELINE,
    FAST,
    HOSTILE,
    SMALL,
    TARGETS,
    hostile_view,
    nothing_view,
    plain_view,
    report_of,
    view_of,
)
from tests.building.results import trial

FETCHING = {"src", "href", "data", "srcset", "poster", "action"}


class Document(HTMLParser):
    """Elements with attributes, JSON blocks by id, and the text outside of scripts and styles."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.words, self.blocks = [], [], {}
        self._open = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "input"):
            self._open.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self._open, f"</{tag}> ends nothing"
        opened, _ = self._open.pop()
        assert opened == tag, f"</{tag}> ends <{opened}>"

    def handle_data(self, data):
        tag, attributes = self._open[-1] if self._open else ("", {})
        if attributes.get("type") == "application/json":
            self.blocks[attributes["id"]] = data
        elif tag not in ("script", "style"):
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def pages():
    views = {
        "plain": plain_view(),
        "hostile": hostile_view(),
        "nothing": nothing_view(),
        "empty": view_of(()),
    }
    return {name: page(report_of(view)) for name, view in views.items()}


@pytest.fixture(scope="module")
def documents(pages):
    return {name: Document(text) for name, text in pages.items()}


KINDS = ("plain", "hostile", "nothing", "empty")


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_is_one_document_in_which_every_element_is_ended(documents, kind):
    assert [len(documents[kind].all(tag)) for tag in ("html", "head", "body", "main", "h1")] == [
        1
    ] * 5


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_fetches_nothing(documents, kind):
    addresses = [
        v
        for _, attributes in documents[kind].elements
        for n, v in attributes.items()
        if n in FETCHING
    ]
    assert [address for address in addresses if not address.startswith(("data:", "#"))] == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_forbids_requests_and_scripts_that_are_not_its_own(documents, kind):
    policy = next(m["content"] for m in documents[kind].all("meta") if m.get("http-equiv"))
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "'unsafe-inline'" not in policy.partition("script-src")[2].partition(";")[0]


@pytest.mark.parametrize("kind", KINDS)
def test_plotly_is_inside_once(pages, kind):
    assert pages[kind].count("plotly.js v") == 1


@pytest.mark.parametrize("kind", KINDS)
def test_headings_leave_no_level_out(documents, kind):
    levels = [int(tag[1]) for tag, _ in documents[kind].elements if tag in ("h1", "h2", "h3", "h4")]
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))


@pytest.mark.parametrize("kind", KINDS)
def test_every_part_that_is_linked_is_there(documents, kind):
    ids = {attributes["id"] for _, attributes in documents[kind].elements if "id" in attributes}
    assert {attributes["href"][1:] for attributes in documents[kind].all("a")} <= ids


@pytest.mark.parametrize("kind", KINDS)
def test_no_id_is_there_twice(documents, kind):
    ids = [attributes["id"] for _, attributes in documents[kind].elements if "id" in attributes]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("kind", KINDS)
def test_every_table_has_a_caption_and_every_figure_words(documents, kind):
    document = documents[kind]
    assert len(document.all("caption")) == len(document.all("table"))
    drawings = [attributes for attributes in document.all("div") if "data-figure" in attributes]
    assert all(len(attributes["aria-label"]) > 20 for attributes in drawings)


def test_hostile_text_adds_no_element(documents):
    plain = Document(page(report_of(hostile_view("words"))))
    assert [tag for tag, _ in documents["hostile"].elements] == [tag for tag, _ in plain.elements]


def test_hostile_text_is_shown_as_it_is(documents):
    assert documents["hostile"].text.count(HOSTILE) >= 5


def test_hostile_text_in_the_data_is_unchanged(documents):
    assert json.loads(documents["hostile"].blocks["details"])["facts"]["message"]["values"] == [
        HOSTILE
    ]


@pytest.mark.parametrize(
    "text", ["</script>", "<!--", "-->", "<script>", "\u2028", "&lt;", HOSTILE]
)
def test_json_in_a_page_holds_no_character_that_html_reads(text):
    written = script_json({"a": [text]})
    assert not set("<>&\u2028\u2029") & set(written)
    assert json.loads(written) == {"a": [printable(text)]}


def test_the_page_says_what_an_earlier_study_measured():
    pick = replace(FAST, reused_from=trial(3, "<b>"))
    text = page(report_of(plain_view(trials=(BASELINE, SMALL, pick))))
    assert "from trial 3 of study &#39;&lt;b&gt;&#39;</div>" in text
    assert "; measured as trial 3 of study" in text
    assert "1 of them from earlier studies" in text


def test_the_page_says_the_answer_first(documents):
    parts = [attributes["id"] for attributes in documents["plain"].all("section")]
    assert parts == ["answer", "front", "ladder", "memory", "trials", "left-out", "study", "repeat"]


def test_a_figure_that_has_nothing_to_show_is_left_out(documents):
    assert "memory" not in [attributes["id"] for attributes in documents["empty"].all("section")]


def test_the_page_of_a_study_without_a_pick_says_so(documents):
    assert "Nothing that was tried trains under 256.0 MiB." in documents["nothing"].text
    assert "The closest miss needs 300.0 MiB" in documents["nothing"].text


def test_the_page_of_a_study_without_a_trial_says_so(documents):
    assert "No trial has finished yet." in documents["empty"].text


def test_targets_of_an_export_can_be_chosen(documents):
    assert [attributes["value"] for attributes in documents["plain"].all("option")] == list(TARGETS)


def test_without_a_target_no_export_is_offered():
    assert Document(page(report_of(plain_view(), targets={}))).all("option") == []


@pytest.mark.parametrize(("device", "expected"), [("cpu", 0), ("cuda:0", 1)])
def test_memory_on_the_device_has_a_column_where_it_is_another(device, expected):
    heads = Document(page(report_of(plain_view(device=device)))).all("th")
    assert sum(head.get("data-key") == "device_bytes" for head in heads) == expected


def test_everything_is_in_the_page_without_javascript(documents):
    for text in (
        "How to repeat it",
        "autotune search --name a-study-again",
        "256.0 MiB",
        "Cannot be combined",
    ):
        assert text in documents["plain"].text
