"""The largest value whose need stays under a cap, found with few looks at the need.

Pure; knows nothing of models.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

GROWTH = 16
"""While nothing is known to be too large, a guess is at most so many times further along than what
fits."""

_SAFE_EVERY = 4
"""Every fourth guess ignores the lines and halves (or doubles), so that no need, however bent,
takes long."""


@dataclass(frozen=True, kw_only=True)
class Largest:
    """The end of a search: `value` fits and `successor`, the next value, does not."""

    value: int | None
    """None: not even the smallest value fits."""
    successor: int | None
    """None: there is no next value."""
    needs: Mapping[int, int]
    """Of every value looked at."""


def find_largest(
    need: Callable[[int], int], *, cap: int, values: Sequence[int], start: int
) -> Largest:
    """The value of `values`, ascending, with a need of at most `cap` and a successor that is known to need more.

    `need` is asked once a value. Where it grows with the value the answer is the largest that fits;
    where it does not, the answer is still what it says it is. From `start` it goes to twice or half
    of it, and a line through the two guesses where the cap is met: of a straight need four values
    are looked at, two of them small and quick to predict.
    """
    needs: dict[int, int] = {}
    below, above = (
        -1,
        len(values),
    )  # places of the largest value known to fit, and of the smallest known not to
    place = max(0, bisect_right(values, start) - 1)
    while above - below > 1:
        needs[values[place]] = size = need(values[place])
        below, above = (place, above) if size <= cap else (below, place)
        place = _next_place(needs, cap=cap, values=values, below=below, above=above)
    return Largest(
        value=values[below] if below >= 0 else None,
        successor=values[above] if above < len(values) else None,
        needs=needs,
    )


def _next_place(
    needs: Mapping[int, int], *, cap: int, values: Sequence[int], below: int, above: int
) -> int:
    """A place between `below` and `above`, where there is one."""
    is_open = above == len(values)
    safe = min(2 * below + 1, above - 1) if is_open else (below + above) // 2
    root = _where_a_line_meets(cap, needs)
    if root is None or len(needs) % _SAFE_EVERY == 0:
        return max(safe, below + 1)
    place = bisect_right(values, root) - 1
    if is_open:
        return min(max(place, below + 1), GROWTH * (below + 1) - 1, above - 1)
    return max(place, below + 1) if below <= place < above else max(safe, below + 1)


def _where_a_line_meets(cap: int, needs: Mapping[int, int]) -> int | None:
    """The value at which the line through the two needs nearest the cap meets it; None if there is no such line."""
    if len(needs) < 2:
        return None
    nearest = sorted(needs.items(), key=lambda point: abs(point[1] - cap))[:2]
    (first, first_need), (second, second_need) = sorted(nearest)
    rise = second_need - first_need
    return first + (cap - first_need) * (second - first) // rise if rise > 0 else None
