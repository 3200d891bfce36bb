"""Bisection: finds the largest value whose need is within a cap, with few evaluations of the need.

Pure functions, which know nothing of models.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

GROWTH = 16
"""While no value is known to be too large, the index of a guess grows by this factor at most."""

_SAFE_EVERY = 4
"""Every fourth guess halves (or doubles) instead of following a line, so that a need of any shape
takes few evaluations."""


@dataclass(frozen=True, kw_only=True)
class Largest:
    """The result: `value` fits and `successor`, the next value, does not."""

    value: int | None
    """None: not even the smallest value fits."""
    successor: int | None
    """None: there is no next value."""
    needs: Mapping[int, int]
    """The need of every value evaluated."""


def find_largest(
    need: Callable[[int], int], *, cap: int, values: Sequence[int], start: int
) -> Largest:
    """Returns a value with a need within `cap` whose successor in `values` needs more.

    `values` are ascending. If the need grows with the value, the result is the largest value that
    fits. `need` is called at most once for each value: first at `start`, then at about twice or
    half of it, and then where a line through two guesses meets the cap. For a linear need that is
    four calls, two of them for small values, which are quick to predict.
    """
    needs: dict[int, int] = {}
    below = -1  # index of the largest value known to fit
    above = len(values)  # index of the smallest value known not to fit
    index = max(0, bisect_right(values, start) - 1)
    while above - below > 1:
        size = need(values[index])
        needs[values[index]] = size
        if size <= cap:
            below = index
        else:
            above = index
        index = _next_index(needs, cap=cap, values=values, below=below, above=above)
    return Largest(
        value=values[below] if below >= 0 else None,
        successor=values[above] if above < len(values) else None,
        needs=needs,
    )


def find_smallest(
    need: Callable[[int], int], *, cap: int, values: Sequence[int], start: int
) -> Largest:
    """Returns a value with a need within `cap` whose predecessor needs more; the need falls.

    `successor` of the result is the next smaller value. Otherwise as `find_largest`.
    """
    found = find_largest(
        lambda negative: need(-negative),
        cap=cap,
        values=[-value for value in reversed(values)],
        start=-start,
    )
    return Largest(
        value=None if found.value is None else -found.value,
        successor=None if found.successor is None else -found.successor,
        needs={-value: size for value, size in found.needs.items()},
    )


def _next_index(
    needs: Mapping[int, int], *, cap: int, values: Sequence[int], below: int, above: int
) -> int:
    """Returns an index between `below` and `above`, if there is one."""
    is_open = above == len(values)
    safe = min(2 * below + 1, above - 1) if is_open else (below + above) // 2
    root = _value_on_line(cap, needs)
    if root is None or len(needs) % _SAFE_EVERY == 0:
        return max(safe, below + 1)
    index = bisect_right(values, root) - 1
    if is_open:
        return min(max(index, below + 1), GROWTH * (below + 1) - 1, above - 1)
    if below <= index < above:
        return max(index, below + 1)
    return max(safe, below + 1)


def _value_on_line(cap: int, needs: Mapping[int, int]) -> int | None:
    """Returns the value where the line through the two needs nearest to the cap meets the cap.

    None if there are fewer than two needs, or the line does not rise.
    """
    if len(needs) < 2:
        return None
    nearest = sorted(needs.items(), key=lambda point: abs(point[1] - cap))[:2]
    (first, first_need), (second, second_need) = sorted(nearest)
    rise = second_need - first_need
    if rise <= 0:
        return None
    return first + (cap - first_need) * (second - first) // rise
