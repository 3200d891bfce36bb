"""Keys changed in a text: lines of other keys stay as they are, and anchors keep their values."""

import difflib
import json
import tomllib

import pytest
import yaml

from autotune.exporters.into.edited import (
    REMOVED,
    CannotEdit,
    changed_content,
    edited,
    same_content,
)

YAML = """\
# head
batch: &batch 4 # of a step
eval_batch: *batch

bf16: yes
"optim": 'adamw'
kwargs: &kwargs
  use_reentrant: true   # slow
others: *kwargs
modules:   # which
- q_proj
- v_proj
empty:
template: |
  {{ a }}

  {{ b }}

flow: {a: 1, b: [1, 2]}
merged:
  <<: *kwargs
  z: 1
"""


def lines(before, after):
    """Returns the lines that were taken out, and those that were put in."""
    found = list(difflib.ndiff(before.splitlines(), after.splitlines()))
    return [[line[2:] for line in found if line[0] == sign] for sign in "-+"]


def change(text, path, value, suffix=".yaml"):
    """Returns the changed text, which says what it should."""
    changed = edited(text, {path: value}, suffix=suffix)
    parse = {".yaml": yaml.safe_load, ".json": json.loads, ".toml": tomllib.loads}[suffix]
    assert same_content(parse(changed), changed_content(parse(text), {path: value}))
    return changed


@pytest.mark.parametrize(
    ("path", "value", "taken_out", "put_in"),
    [
        (("bf16",), False, ["bf16: yes"], ["bf16: no"]),
        (("optim",), "adafactor", ["\"optim\": 'adamw'"], ["\"optim\": 'adafactor'"]),
        (("empty",), 3, ["empty:"], ["empty: 3"]),
        (("flow", "a"), 2, ["flow: {a: 1, b: [1, 2]}"], ["flow: {a: 2, b: [1, 2]}"]),
        (("flow", "c"), 2, ["flow: {a: 1, b: [1, 2]}"], ["flow: {a: 1, b: [1, 2], c: 2}"]),
        (("flow", "b"), REMOVED, ["flow: {a: 1, b: [1, 2]}"], ["flow: {a: 1}"]),
        (("empty",), REMOVED, ["empty:"], []),
        (("new",), {"a": {"b": 1}}, [], ["new:", "  a:", "    b: 1"]),
        (("kwargs_of_new",), True, [], ["kwargs_of_new: true"]),
        (("template",), REMOVED, ["template: |", "  {{ a }}", "", "  {{ b }}"], []),
    ],
)
def test_only_the_lines_of_the_key_change(path, value, taken_out, put_in):
    assert lines(YAML, change(YAML, path, value)) == [taken_out, put_in]


def test_a_list_that_becomes_a_text_leaves_the_comment_of_its_key():
    changed = change(YAML, ("modules",), "all-linear")
    assert lines(YAML, changed) == [
        ["modules:   # which", "- q_proj", "- v_proj"],
        ["modules: all-linear   # which"],
    ]


def test_what_an_alias_stands_for_stays_where_its_anchor_is_changed():
    changed = change(YAML, ("batch",), 8)
    assert lines(YAML, changed) == [
        ["batch: &batch 4 # of a step", "eval_batch: *batch"],
        ["batch: 8 # of a step", "eval_batch: &batch 4"],
    ]


def test_a_table_with_an_anchor_is_changed_for_one_of_its_places():
    says = yaml.safe_load(change(YAML, ("kwargs", "use_reentrant"), False))
    assert says["kwargs"] == {"use_reentrant": False}
    assert says["others"] == {"use_reentrant": True}
    assert says["merged"] == {"use_reentrant": True, "z": 1}


def test_a_key_below_an_alias_is_written_out_there_alone():
    changed = change(YAML, ("others", "every"), 2)
    assert lines(YAML, changed) == [
        ["others: *kwargs"],
        ["others: {use_reentrant: true, every: 2}"],
    ]


def test_a_key_that_is_merged_is_written_beside_the_merge():
    changed = change(YAML, ("merged", "use_reentrant"), False)
    assert lines(YAML, changed) == [[], ["  use_reentrant: false"]]


def test_a_merged_key_is_taken_out_by_no_value():
    says = yaml.safe_load(change(YAML, ("merged", "use_reentrant"), REMOVED))
    assert says["merged"] == {"use_reentrant": None, "z": 1}


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
@pytest.mark.parametrize("end", ["", "\n"])
def test_line_ends_are_those_of_the_file(line_end, end):
    text = "a: 1\nb:\n    c: 2".replace("\n", line_end) + end.replace("\n", line_end)
    changed = change(text, ("b", "d"), True)
    assert changed == text.removesuffix(line_end) + line_end + "    d: true" + (
        line_end if end else ""
    )


JSON = '{\n\t"a": 1,\n\t"b": {\n\t\t"c": 1e-5\n\t},\n\t"z": "\\u00e9"\n}\n'


def test_json_keeps_its_tabs_numbers_and_escapes():
    changed = change(JSON, ("b", "d"), True, suffix=".json")
    assert lines(JSON, changed) == [[], ['\t\t"d": true,']]
    assert lines(JSON, change(JSON, ("a",), 2, suffix=".json")) == [['\t"a": 1,'], ['\t"a": 2,']]


def test_a_table_in_json_is_indented_as_the_others():
    changed = change(JSON, ("q",), {"x": 1}, suffix=".json")
    assert lines(JSON, changed) == [[], ['\t"q": {', '\t\t"x": 1', "\t},"]]


def test_json_on_one_line_stays_on_it():
    changed = edited('{"a":1,"b":{}}', {("b", "c"): True}, suffix=".json")
    assert changed == '{"a":1,"b":{"c": true}}'


def test_toml_keeps_comments_and_numbers():
    text = "[a]\nx = 1_000  # many\ny = 'literal'\n\n[b]\nz=false\n"
    changed = change(text, ("a", "x"), 5, suffix=".toml")
    assert lines(text, changed) == [["x = 1_000  # many"], ["x = 5  # many"]]
    assert lines(text, change(text, ("b", "z"), True, suffix=".toml")) == [["z=false"], ["z=true"]]


@pytest.mark.parametrize("text", ["- {a: 1}\n", "just text\n"])
def test_a_text_that_has_no_such_place_is_refused(text):
    with pytest.raises(CannotEdit):
        edited(text, {("a",): 2}, suffix=".yaml")
