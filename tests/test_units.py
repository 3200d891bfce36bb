import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.errors import InvalidSize
from autotune.units import (
    different_sizes,
    format_amount,
    format_decimal,
    format_duration,
    format_enough,
    format_percent,
    format_size,
    parse_duration,
    parse_size,
)

KIB, MIB, GIB, TIB = 1024, 1024**2, 1024**3, 1024**4
UNITS = {
    "": 1,
    "B": 1,
    "KB": 1e3,
    "MB": 1e6,
    "GB": 1e9,
    "TB": 1e12,
    "KiB": KIB,
    "MiB": MIB,
    "GiB": GIB,
    "TiB": TIB,
}


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("8GiB", 8 * GIB),
        ("8GB", 8 * 10**9),
        ("8192MiB", 8 * GIB),
        ("8e9", 8 * 10**9),
        ("8E+9", 8 * 10**9),
        ("8.5GiB", int(8.5 * GIB)),
        ("0.5 KiB", 512),
        (" 48 MiB ", 48 * MIB),
        ("1", 1),
        ("12B", 12),
        ("2TiB", 2 * TIB),
        ("1.5TB", 1_500_000_000_000),
    ],
)
def test_a_size_as_people_write_it_is_read(text, size_bytes):
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "GiB",
        "8,5GiB",
        "8 gib",
        "8gb",
        "8G",
        "8GiBs",
        "8 Gi B",
        "8GiB 4",
        "8 8GiB",
        "-1",
        "-8GiB",
        "+8GiB",
        "0",
        "0GiB",
        "0.4B",
        "1e-3GiB",
        "0x10",
        "8_000",
        ".5GiB",
        "8.GiB",
        "8.5.1GiB",
        "nan",
        "inf",
        "infGiB",
        "1e400",
        "1e400GiB",
        "1e308TiB",
        "80%",
        "all",
        "8GiB\n8GiB",
        "\N{FULLWIDTH DIGIT EIGHT}GiB",
        "\N{ARABIC-INDIC DIGIT EIGHT}GiB",
    ],
)
def test_what_is_not_a_size_is_rejected_by_name(text):
    with pytest.raises(InvalidSize) as raised:
        parse_size(text)
    assert repr(text) in raised.value.message


def test_a_rejected_size_comes_with_an_example():
    with pytest.raises(InvalidSize) as raised:
        parse_size("8 gib")
    assert "8GiB" in raised.value.hint


@given(st.text(max_size=12))
def test_any_text_is_a_size_above_zero_or_rejected(text):
    try:
        size_bytes = parse_size(text)
    except InvalidSize:
        return
    assert size_bytes > 0


@given(st.integers(1, 10**6), st.sampled_from(sorted(UNITS)), st.sampled_from(["", " "]))
def test_a_whole_number_of_any_unit_is_exact(number, unit, gap):
    assert parse_size(f"{number}{gap}{unit}") == number * int(UNITS[unit])


@given(st.integers(1, 2**53))
def test_a_number_of_bytes_is_read_back_exactly(size_bytes):
    assert parse_size(str(size_bytes)) == size_bytes


@given(st.integers(1, 900 * TIB))
def test_a_formatted_size_is_read_back_within_what_it_shows(size_bytes):
    assert parse_size(format_size(size_bytes)) == pytest.approx(size_bytes, rel=0.0065)


@given(st.integers(1, 1023 * GIB))
def test_a_size_that_is_enough_is_not_less_and_as_short(size_bytes):
    assert size_bytes <= parse_size(format_enough(size_bytes)) <= size_bytes * 1.011 + 1


@given(st.integers(min_value=1, max_value=2**40))
def test_a_formatted_size_has_one_to_four_digits_before_the_point(size_bytes):
    assert re.fullmatch(r"\d{1,4}(\.\d{1,2})? (B|KiB|MiB|GiB)", format_size(size_bytes))


@pytest.mark.parametrize(
    ("size_bytes", "other_bytes", "words"),
    [
        (4 * MIB, 3 * MIB, ("4.00 MiB", "3.00 MiB")),
        (4 * MIB, 4 * MIB, ("4.00 MiB", "4.00 MiB")),
        (4_409_524, 4_409_300, ("4,409,524 B", "4,409,300 B")),
    ],
)
def test_sizes_that_differ_have_different_words(size_bytes, other_bytes, words):
    assert different_sizes(size_bytes, other_bytes) == words


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (250 * MIB, "250.0 MiB"),
        (8 * GIB, "8.00 GiB"),
        (3 * TIB, "3.00 TiB"),
        (-2 * MIB, "-2.00 MiB"),
    ],
)
def test_a_size_is_written_in_its_unit(size_bytes, text):
    assert format_size(size_bytes) == text


# -- durations -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("90s", 90),
        ("0.5s", 0.5),
        ("30m", 1800),
        ("1h30m", 5400),
        ("1h 30m", 5400),
        ("1.5h", 5400),
        ("2d", 172800),
        (" 4m ", 240),
        ("1e3", 1000),
    ],
)
def test_a_duration_as_people_write_it_is_read(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text",
    [
        "",
        "m",
        "-1",
        "-30m",
        "0",
        "0s",
        "0h0m",
        "1,5h",
        "30 min",
        "30M",
        "1h30",
        "1:30",
        "nan",
        "inf",
        "nans",
        "1e400",
        "1e400s",
        "1e308d",
        "1 30",
        "3 0m",
        "forever",
    ],
)
def test_what_is_not_a_duration_is_rejected_by_name(text):
    with pytest.raises(InvalidSize) as raised:
        parse_duration(text)
    assert repr(text) in raised.value.message


@given(st.text(max_size=12))
def test_any_text_is_a_finite_duration_above_zero_or_rejected(text):
    try:
        seconds = parse_duration(text)
    except InvalidSize:
        return
    assert 0 < seconds < math.inf


@given(st.integers(1, 99 * 3600))
def test_a_formatted_duration_is_read_back_within_what_it_shows(seconds):
    shown = 60 if seconds >= 3600 else 1
    assert abs(parse_duration(format_duration(seconds)) - seconds) <= shown


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (4.21, "4.2 s"),
        (59.94, "59.9 s"),
        (60, "1 m 00 s"),
        (185, "3 m 05 s"),
        (3599.7, "1 h 00 m"),
        (7800, "2 h 10 m"),
    ],
)
def test_a_duration_is_written_in_its_units(seconds, text):
    assert format_duration(seconds) == text


def test_just_under_a_minute_is_not_sixty_seconds():
    assert format_duration(59.97) == "1 m 00 s"


@pytest.mark.parametrize(
    ("share", "digits", "sign", "text"),
    [
        (0.62, 0, False, "62"),
        (0.00034, 0, False, "0.034"),
        (-0.00034, 0, True, "-0.034"),
        (0.004, 0, False, "0.4"),
        (0.00034, 2, True, "+0.03"),
        (0.000034, 1, False, "0.0034"),
        (1e-9, 0, False, "0"),
        (0.0, 2, True, "0"),
        (1.5, 1, True, "+150.0"),
    ],
)
def test_a_small_share_is_not_shown_as_none(share, digits, sign, text):
    assert format_percent(share, digits=digits, sign=sign) == text


@pytest.mark.parametrize(
    ("amount", "text"),
    [(0, "0 B"), (999.4, "999 B"), (999.6, "1 kB"), (1.9e11, "190 GB"), (3.5e21, "3.5e+03 EB")],
)
def test_an_amount_has_a_decimal_prefix_and_three_digits(amount, text):
    assert format_amount(amount, "B") == text


@pytest.mark.parametrize(
    ("number", "words"), [(23.914, "23.91"), (1234.5, "1,234.50"), (2.34e67, "2.34e+67")]
)
def test_a_large_number_has_an_exponent_and_no_seventy_digits(number, words):
    assert format_decimal(number) == words
