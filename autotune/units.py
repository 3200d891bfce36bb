"""Parse and format sizes in bytes and durations. Text that is not exact is rejected."""

import math
import re
import sys
from decimal import Decimal

from autotune.errors import InvalidSize

_BYTES_PER_UNIT = {
    "": 1,
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", start=1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", start=1)},
}
LARGEST_SIZE_BYTES = 2**62
"""Far more than any device has, and small enough for an integer column of any database."""

LONGEST_SECONDS = 1e9

_SECONDS_PER_UNIT = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_NUMBER = r"[0-9]+(?:\.[0-9]+)?(?:[eE]\+?[0-9]+)?"


def parse_size(text: str) -> int:
    """Returns the bytes of `8GiB`, `8GB`, `8192MiB` or `8e9`. Raises InvalidSize for other text."""
    match = re.fullmatch(rf"({_NUMBER}) *([A-Za-z]*)", text.strip(" "))
    if match is None or match[2] not in _BYTES_PER_UNIT:
        hint = (
            "write a number and a unit with a decimal point: 8GiB, 8.5GB, 8192MiB or plain bytes "
            "such as 8e9"
        )
        if match is not None and (near := _units_like(match[2])):
            hint = f"write {' or '.join(f'{match[1]}{unit}' for unit in near)}"
        if text.strip().startswith("-"):
            hint = "a size is positive: give for example 8GiB"
        raise InvalidSize(f"{text!r} is not a memory size", hint=hint)
    size_bytes = float(match[1]) * _BYTES_PER_UNIT[match[2]]
    if not 1 <= size_bytes < LARGEST_SIZE_BYTES:
        raise InvalidSize(f"{text!r} is not a possible memory size", hint="give for example 8GiB")
    return int(size_bytes)


def _units_like(given: str) -> list[str]:
    """Returns the units that differ from `given` in case, or by the letters after the first."""
    typed = given.lower()
    return [unit for unit in reversed(_BYTES_PER_UNIT) if typed in (unit.lower(), unit[:1].lower())]


def parse_percent(text: str) -> float | None:
    """Returns the share that `5%` or `0.5 %` is; None for other text."""
    match = re.fullmatch(rf"({_NUMBER}) *%", text)
    return None if match is None else float(match[1]) / 100


def format_size(size_bytes: float) -> str:
    """Format bytes in the binary unit that gives one to four digits before the decimal point."""
    size = float(size_bytes)
    if abs(size) < 1024:
        return f"{size:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if abs(size) < 1024:
            decimals = 1 if size >= 100 else 2
            return f"{size:.{decimals}f} {unit}"
    size /= 1024
    return f"{size:.2f} TiB"


def format_enough(size_bytes: int) -> str:
    """Returns a size as `format_size` does, rounded up: it is enough where given."""
    words = format_size(size_bytes)
    if parse_size(words) >= size_bytes:
        return words
    number, unit = words.split()
    last_digit = Decimal(1).scaleb(int(Decimal(number).as_tuple().exponent))
    return f"{Decimal(number) + last_digit} {unit}"


def different_sizes(size_bytes: int, other_bytes: int) -> tuple[str, str]:
    """Returns both sizes in words that differ if they do: in bytes where rounding hides it."""
    words = format_size(size_bytes), format_size(other_bytes)
    if words[0] == words[1] and size_bytes != other_bytes:
        return f"{size_bytes:,} B", f"{other_bytes:,} B"
    return words


def format_decimal(number: float, *, digits: int = 2) -> str:
    """Returns a number with decimals; from a million on three digits and an exponent."""
    return f"{number:,.{digits}f}" if abs(number) < 1e6 else f"{number:.3g}"


def exact_size(size_bytes: int) -> str:
    """Returns a size in the largest unit that represents it exactly: `48MiB`."""
    for unit, size in (("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
        if size_bytes % size == 0:
            return f"{size_bytes // size}{unit}"
    return str(size_bytes)


def format_percent(share: float, *, digits: int = 0, sign: bool = False) -> str:
    """Returns a share as percent, without the unit: `12`, `0.034`, and with `sign` `+12`.

    Rounds to `digits` decimals, or to two significant digits where those would turn a share into 0.
    Less than 0.001 % is 0: such differences are rounding errors of floats.
    """
    percent = 100 * share
    if abs(percent) < 0.001:
        return "0"
    plus = "+" if sign else ""
    if round(percent, digits) != 0:
        return f"{percent:{plus}.{digits}f}"
    digits = 1 - math.floor(math.log10(abs(percent)))
    return f"{percent:{plus}.{digits}f}".rstrip("0")


def format_amount(amount: float, unit: str) -> str:
    """Format an amount with decimal prefixes, in three digits: `1.04 TFLOP`, `39.4 GB`."""
    prefixes = ("", "k", "M", "G", "T", "P", "E")
    power = 0
    while float(f"{amount:.3g}") >= 1000 and power < len(prefixes) - 1:
        amount /= 1000
        power += 1
    return f"{amount:.3g} {prefixes[power]}{unit}"


def format_estimate(number: float) -> str:
    """Format a number that is about right, in three digits: `52,300`."""
    return f"{float(f'{number:.3g}'):,.0f}" if number >= 100 else f"{number:.3g}"


def format_rate(per_second: float, unit: str) -> str:
    """Format a rate with decimal prefixes, in three digits: `1.04 TFLOP/s`, `39.4 GB/s`."""
    return f"{format_amount(per_second, unit)}/s"


def parse_duration(text: str) -> float:
    """Returns the seconds of `90s`, `30m`, `1h30m` or a plain number of seconds.

    Raises InvalidSize for other text.
    """
    stripped = text.strip(" ")
    if re.fullmatch(_NUMBER, stripped):
        seconds = float(stripped)
    elif re.fullmatch(rf"(?:{_NUMBER} *[smhd] *)+", stripped):
        parts = re.findall(rf"({_NUMBER}) *([smhd])", stripped)
        seconds = sum(float(number) * _SECONDS_PER_UNIT[unit] for number, unit in parts)
    else:
        raise InvalidSize(f"{text!r} is not a duration", hint="write for example 90s, 30m or 1h30m")
    if not 0 < seconds < LONGEST_SECONDS:
        raise InvalidSize(
            f"{text!r} is not a possible duration",
            hint="give a duration above zero, for example 30m",
        )
    return seconds


def exact_duration(seconds: float) -> str:
    """Returns a duration that `parse_duration` reads as exactly these seconds: `1.5s`, `10m`."""
    if seconds % 60 == 0:
        return f"{seconds / 60:.0f}m"
    # A decimal number prints every digit and no exponent, if asked to.
    return f"{Decimal(repr(seconds)):f}".removesuffix(".0") + "s"


def is_positive_number(value: object) -> bool:
    """Whether `value` is a finite number above zero; bool is not a number here."""
    return (
        not isinstance(value, bool)
        and isinstance(value, int | float)
        and 0 < value <= sys.float_info.max
    )


def format_duration(seconds: float) -> str:
    """Format seconds as `4.2 s`, `3 m 05 s` or `2 h 10 m`."""
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} m {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} m"
