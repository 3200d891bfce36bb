import dataclasses
import json

import pytest

from autotune.errors import InvalidInput
from autotune.spec.published_table import Figures, Reference, read_reference
from autotune.spec.reading import parse

GIB = 1024**3
TABLE = {
    "source": "a paper",
    "measured_on": "one GPU",
    "control": "plain",
    "rows": {
        "plain": {"peak_memory": "20GiB", "tokens_per_second": 1000, "perplexity": 12.5},
        "fused": {"peak_memory": "10GiB"},
    },
}
NAMES = ("plain", "fused", "never published")


def read(**changes):
    return read_reference({**TABLE, **changes}, names=NAMES)


def test_a_size_is_read_with_its_unit():
    assert read().rows["plain"].peak_memory_bytes == 20 * GIB


def test_a_figure_that_a_row_omits_is_none():
    assert read().rows["fused"] == Figures(peak_memory_bytes=10 * GIB)


def test_a_reference_is_the_same_after_a_trip_through_json():
    reference = read(torch="2.8")
    assert parse(Reference, json.loads(json.dumps(dataclasses.asdict(reference)))) == reference


def test_a_reference_written_as_a_table_is_read_back_as_it_was():
    reference = read(torch="2.8")
    assert read_reference(reference.to_table(), names=NAMES) == reference


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"source": None}, "source"),
        ({"measured_on": 7}, "measured_on"),
        ({"torch": 2.8}, "torch"),
        ({"rows": {}}, "rows"),
        ({"rows": []}, "rows"),
        ({"page": 3}, "page"),
        ({"control": "unknown"}, "unknown"),
        ({"control": "never published"}, "never published"),
        ({"rows": {"unknown": {}}}, "unknown"),
        ({"rows": {"plain": 7}}, "plain"),
        ({"rows": {"plain": {"memory": "1GiB"}}}, "memory"),
        ({"rows": {"plain": {"peak_memory": "8,5GiB"}}}, "8,5GiB"),
        ({"rows": {"plain": {"peak_memory": 8}}}, "plain.peak_memory"),
        ({"rows": {"plain": {"perplexity": -1}}}, "plain.perplexity"),
        ({"rows": {"plain": {"tokens_per_second": True}}}, "plain.tokens_per_second"),
    ],
)
def test_an_invalid_table_is_rejected_with_the_key(changes, named):
    with pytest.raises(InvalidInput) as raised:
        read(**changes)
    assert named in raised.value.message
    assert raised.value.hint
