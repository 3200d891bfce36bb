"""Studies as lines of JSON: export is complete, import is atomic, on SQLite and PostgreSQL."""

import errno
import hashlib
import io
import json
import math
from dataclasses import asdict

import pytest
from sqlalchemy import update

from autotune.errors import InvalidInput, StudyMismatch, UnknownStudy
from autotune.storage.tables import STUDIES
from autotune.storage.tables import TRIALS as TRIALS_TABLE
from tests.building.studies import config, definition, keep, measured, open_store
from tests.building.whole_study import CONFIRMATIONS, TRIALS, write_whole_study


def exported(store, *names):
    return list(store.exported(names or store.names(), version="1.2.3"))


def bring_in(store, lines, **options):
    return store.import_studies(io.BytesIO(b"".join(lines)), source="x.jsonl", **options)


def signed(lines):
    """With a last line that fits the others."""
    body = b"".join(lines)
    end = {"kind": "end", "lines": len(lines), "sha256": hashlib.sha256(body).hexdigest()}
    return [*lines, json.dumps(end).encode() + b"\n"]


def changed(line, **values):
    return json.dumps({**json.loads(line), **values}).encode() + b"\n"


@pytest.fixture
def other(tmp_path):
    with open_store(f"sqlite:///{tmp_path}/other.db") as store:
        yield store


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    """Of a study without a running attempt."""
    url = f"sqlite:///{tmp_path_factory.mktemp('lines')}/autotune.db"
    write_whole_study(url, running=False)
    with open_store(url) as store:
        return exported(store)


@pytest.fixture
def several(other, lines):
    """A store with three studies."""
    for name in ("one", "two", "three"):
        bring_in(other, lines, name=name)
    return other


# -- out -------------------------------------------------------------------------------------------


def test_every_row_of_a_study_is_a_line(store_url):
    write_whole_study(store_url)
    with open_store(store_url) as store:
        kinds = [json.loads(line)["kind"] for line in exported(store)]
    assert kinds == [
        "studies",
        "study",
        *["trial"] * TRIALS,
        *["prediction"] * 4,
        *["attempt"] * 8,
        *["confirmation"] * len(CONFIRMATIONS),
        "end",
    ]


def test_only_the_studies_that_were_named_come_out(several):
    found = [json.loads(line) for line in exported(several, "three", "one")]
    assert found[0]["studies"] == ["three", "one"]
    assert [line["name"] for line in found if line["kind"] == "study"] == ["three", "one"]


def test_the_error_for_a_missing_study_lists_the_existing_ones(other):
    other.create_study(definition("there"), trials_wanted=1)
    with pytest.raises(UnknownStudy, match="no study 'elsewhere'") as raised:
        exported(other, "elsewhere")
    assert "there" in raised.value.hint


def test_a_running_search_does_not_change_what_is_being_exported(store_url):
    write_whole_study(store_url, running=False)
    with open_store(store_url) as store:
        before = exported(store)
        lines = store.exported(["by-hand"], version="1.2.3")
        first = next(lines)
        keep(store, config(6), measured())
        assert [first, *lines] == before


def test_a_number_that_is_not_finite_comes_out_as_null(other):
    other.create_study(definition(), trials_wanted=1)
    keep(other, config(0), measured())
    with other._database.writing() as connection:
        odd = {**asdict(measured()), "perplexity": math.nan}
        connection.execute(update(TRIALS_TABLE).values(measurement=odd))
    (trial,) = (json.loads(line) for line in exported(other) if b'"trial", "number"' in line)
    assert trial["measurement"]["perplexity"] is None


# -- there and back --------------------------------------------------------------------------------


class FailingDisk(io.BytesIO):
    """A file of which the second line cannot be read."""

    def readline(self, *most):
        if self.tell() > 0:
            raise OSError(errno.EIO, "Input/output error")
        return super().readline(*most)


def test_a_disk_that_fails_during_an_import_is_one_sentence(other, lines):
    with pytest.raises(InvalidInput, match=r"^x\.jsonl cannot be read: Input/output error\n"):
        other.import_studies(FailingDisk(b"".join(lines)), source="x.jsonl")
    assert other.names() == []


def test_what_was_imported_comes_out_as_it_went_in(store_url, lines):
    with open_store(store_url) as store:
        imported = bring_in(store, lines)
        assert (imported.studies, imported.trials) == (("by-hand",), TRIALS - 1)
        assert exported(store) == lines


def test_a_study_goes_to_postgresql_and_back_unchanged(tmp_path, postgres_url):
    first, last = (f"sqlite:///{tmp_path}/{name}.db" for name in ("first", "last"))
    write_whole_study(first, running=False)
    passed = []
    for source, target in ((first, postgres_url), (postgres_url, last)):
        with open_store(source) as old, open_store(target) as new:
            bring_in(new, exported(old))
            passed += [exported(old), exported(new)]
            assert new.trials("by-hand") == old.trials("by-hand")
            assert new.definition("by-hand") == old.definition("by-hand")
            assert new.forecasts("by-hand") == old.forecasts("by-hand")
            assert new.confirmations("by-hand") == old.confirmations("by-hand")
    assert passed == [passed[0]] * 4


def test_results_keep_the_order_in_which_they_came(lines, other, tmp_path):
    bring_in(other, lines)
    with open_store(f"sqlite:///{tmp_path}/again.db") as again:
        bring_in(again, exported(other))
        numbers = [
            [one.number for one in store.changes("by-hand", since=-1).records]
            for store in (other, again)
        ]
    assert numbers[0] == numbers[1] != sorted(numbers[0])


def test_a_running_attempt_is_expired_after_the_import(store_url, other):
    write_whole_study(store_url)
    with open_store(store_url) as store:
        bring_in(other, exported(store))
        assert len(store.attempts.running("by-hand")) == 1
    assert other.attempts.running("by-hand") == []
    assert keep(other, config(5)).ordinal == 2


def test_a_study_can_be_imported_into_its_own_database_under_another_name(store_url, lines):
    with open_store(store_url) as store:
        bring_in(store, lines)
        bring_in(store, lines, name="copy")
        assert store.names() == ["by-hand", "copy"]
        assert store.trials("copy") == store.trials("by-hand")
        assert store.confirmations("copy") == store.confirmations("by-hand")


# -- refused ---------------------------------------------------------------------------------------


def error_of(store, lines, **options):
    """What bringing them in raises; nothing was changed by it."""
    before = [(name, store.trials(name)) for name in store.names()]
    with pytest.raises((InvalidInput, StudyMismatch)) as raised:
        bring_in(store, lines, **options)
    assert [(name, store.trials(name)) for name in store.names()] == before
    assert raised.value.hint
    return raised.value.message


def test_the_error_for_an_existing_name_has_the_option_for_another(other, lines):
    bring_in(other, lines)
    with pytest.raises(StudyMismatch, match="a study 'by-hand'") as raised:
        bring_in(other, lines)
    assert "--name NEW" in raised.value.hint
    assert len(other.trials("by-hand")) == TRIALS - 1


def test_the_error_lists_all_existing_names(several):
    assert "studies three, one in" in error_of(several, exported(several, "three", "one"))


def test_a_new_name_is_for_a_file_with_one_study(several, tmp_path):
    with open_store(f"sqlite:///{tmp_path}/new.db") as new:
        assert "one, two, three" in error_of(new, exported(several), name="new")


@pytest.mark.parametrize("kept", [*range(15), 18, 22])
def test_the_error_for_a_truncated_file_has_the_number_of_its_last_line(other, lines, kept):
    message = error_of(other, lines[:kept])
    assert message == (
        "x.jsonl is empty" if kept == 0 else f"x.jsonl is truncated: it ends after line {kept}"
    )


@pytest.mark.parametrize("kept_bytes", [5000, 6001, -2, -60])
def test_a_file_that_ends_within_a_line_is_rejected(other, lines, kept_bytes):
    assert "truncated" in error_of(other, [b"".join(lines)[:kept_bytes]])


def test_every_changed_digit_is_noticed(other, lines):
    """One in each line; a line that has none is the first of a study."""
    for place, line in enumerate(lines[:-1]):
        at = next((at for at in range(len(line) - 1, 0, -1) if line[at : at + 1].isdigit()), None)
        if at is not None:
            digit = str((int(line[at : at + 1]) + 1) % 10).encode()
            error_of(
                other, [*lines[:place], line[:at] + digit + line[at + 1 :], *lines[place + 1 :]]
            )


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda x: [x[0], *x[2:]], "line 2 of x.jsonl"),
        (
            lambda x: [*x[:4], *x[5:]],
            "line 5 of x.jsonl cannot be read: it is trial 3, where 2 is next",
        ),
        (lambda x: [*x[:3], b"nonsense\n", *x[3:]], "line 4 of x.jsonl is no JSON"),
        (lambda x: [*x[:3], b"\xff\xfe\n", *x[3:]], "line 4 of x.jsonl is no JSON"),
        (lambda x: [*x[:3], b"[]\n", *x[3:]], "line 4 of x.jsonl is no JSON object"),
        (lambda x: [*x[:3], b"\n", *x[3:]], "line 4 of x.jsonl is no JSON"),
        (lambda x: [*x, b"{}\n"], "something follows its last line"),
        (lambda x: [changed(x[0], format=0), *x[1:]], "has format 0, this autotune reads"),
        (
            lambda x: [changed(x[0], format=4), *x[1:]],
            "has format 4, this autotune reads formats up to 3",
        ),
        (lambda x: [changed(x[0], kind="trial"), *x[1:]], "is not a file of exported studies"),
        (lambda x: [b'{"some": "other"}\n'], "is not a file of exported studies"),
        (lambda x: [b"SQLite format 3\0" + bytes(100)], "is not a file of exported studies"),
        (lambda x: [b"name,value\n", b"a,1\n"], "is not a file of exported studies"),
    ],
)
def test_a_changed_file_is_rejected(other, lines, change, named):
    assert named in error_of(other, change(lines))


@pytest.mark.parametrize(
    ("place", "values", "named"),
    [
        (0, {"studies": []}, "names no studies"),
        (0, {"studies": ["another"]}, "line 2 of x.jsonl cannot be read"),
        (0, {"studies": ["../../up"]}, "'../../up' cannot be a study's name"),
        (1, {"name": "another"}, "line 2 of x.jsonl cannot be read"),
        (1, {"workload": {}}, "line 2"),
        (1, {"sampler": "nonesuch"}, "sampler is 'nonesuch'"),
        (1, {"cap_bytes": 2**63}, "cap_bytes is 9223372036854775808"),
        (1, {"trials_wanted": 2**31}, "trials_wanted is 2147483648"),
        (1, {"created_at": "yesterday"}, "line 2"),
        (1, {"surprise": 1}, "there is no 'surprise' in a study"),
        (2, {"config": {"precision": "fp77"}}, "'fp77'"),
        (2, {"config": {"precision": "fp32"}}, "has fingerprint"),
        (2, {"name": "x" * 201}, "name is 'xxx"),
        (2, {"name": "a\0b"}, "name is"),
        (2, {"measurement": {"outcome": "splendid"}}, "line 3"),
        (2, {"measurement": None}, "date without a result"),
        (2, {"measurement": "text"}, "line 3 of x.jsonl cannot be read: measurement is 'text'"),
        (2, {"revision": 1000}, "has revision 1000"),
        (7, {"prediction": {}}, "line 8"),
        (12, {"trial": 77}, "there is no trial 77"),
        (12, {"trial": "first"}, "trial is 'first'"),
        (12, {"state": "idle"}, "there is no state 'idle'"),
        (12, {"kind": "wish"}, "line 13"),
        (18, {"ordinal": 2}, "line 19 of x.jsonl cannot be read: it is confirmation 2, where 1 is"),
        (18, {"id": "x" * 33}, "id is 'xxx"),
        (18, {"result": [1]}, "result is [1]"),
        (18, {"result": {"kind": "guess"}}, "there is no kind 'guess' of confirmation"),
        (18, {"fingerprint": "abcdefabcdef"}, "has fingerprint"),
        (22, {"created_at": "yesterday"}, "line 23"),
    ],
)
def test_the_error_for_impossible_content_has_the_number_of_its_line(
    other, lines, place, values, named
):
    """Also where the last line fits it."""
    body = [changed(line, **values) if at == place else line for at, line in enumerate(lines[:-1])]
    assert named in error_of(other, signed(body))


def test_a_study_that_was_written_by_a_later_autotune_does_not_come_out(other):
    other.create_study(definition(), trials_wanted=1)
    with other._database.writing() as connection:
        connection.execute(update(STUDIES).values(schema_version=99))
    with pytest.raises(Exception, match="schema 99"):
        exported(other)
