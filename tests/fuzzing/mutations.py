"""Strategies of hypothesis that change valid values: trees of JSON or TOML, and bytes.

A tree is what `json.loads` returns. One or two places of it are changed: a leaf becomes an extreme
value, a key is removed, renamed or given twice, a list grows or is emptied, two parts swap places,
a part is wrapped into lists. What a tree of Python cannot hold is written by way of two types:
`Verbatim` stands for text of the file itself, such as a number of thousands of digits, and
`Repeated` is a key that can stand in a table twice.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

from hypothesis import strategies

Draw = Callable[[strategies.SearchStrategy[Any]], Any]
Path = tuple[int, ...]
"""The way to a part of a tree: of each table and list on it the number of the part."""


class Verbatim(str):
    """Text that a file has as it is, without quotes."""


class Repeated(str):
    """A key that is not equal to one of the same text."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)


NUMBERS: tuple[Any, ...] = (
    0,
    -1,
    1,
    2,
    2**31 - 1,
    2**31,
    -(2**31) - 1,
    2**53 + 1,
    2**63 - 1,
    2**63,
    -(2**63) - 1,
    2**64,
    10**300,
    -(10**300),
    10**400,
    0.0,
    -0.0,
    0.1,
    -1.5,
    5e-324,
    1e-300,
    1e300,
    -1e300,
    float("nan"),
    float("inf"),
    float("-inf"),
)
TEXTS: tuple[str, ...] = (
    "",
    " ",
    "a",
    "0",
    "-1",
    "nan",
    "none",
    "\x1b[2J\x1b[1;31mred",
    "\x1b]0;title\x07",
    "\x9b31m",
    "a\0b",
    "\ud800",
    "\u202egnp.exe\u2066",
    "line\r\nline\n\ttab\u2028\x85",
    "../../outside",
    "/outside",
    "~/outside",
    "C:\\outside",
    ".",
    "..",
    "<script>alert(1)</script>",
    "%s%n{0}{x}$(x)`x`",
    "'\"\\",
    "--help",
    "[bold]x[/nope]",
    "\u0660\u0661",
    "\N{GRINNING FACE}" * 3,
    "e\u0301\u200d\ufeff",
    "x" * 300,
    "x" * 70_000,
)
OTHERS: tuple[Any, ...] = (None, True, False, [], {}, [[]], {"": None}, {"a": 1}, [0, "a", None])
VERBATIM: tuple[str, ...] = (
    "1e999",
    "-1e999",
    "1e-999",
    "9" * 5000,
    "0.1" + "0" * 5000,
    "-0",
    "[" * 2000 + "]" * 2000,
    "[" * 100_000 + "]" * 100_000,
)
_MOST_LEAVES = 2000
"""To which a list is lengthened: a larger one only takes longer."""


# -- trees -----------------------------------------------------------------------------------------


def changed_trees(
    valid: Sequence[Any], *, verbatim: Sequence[str] = VERBATIM
) -> strategies.SearchStrategy[Any]:
    """Returns a strategy of trees, each a valid one with mostly one or two changes."""

    @strategies.composite
    def changed_tree(draw: Draw) -> Any:
        tree = deepcopy(draw(strategies.sampled_from(valid)))
        for _ in range(draw(strategies.sampled_from((1, 1, 1, 2, 2, 3)))):
            tree = _changed(draw, tree, verbatim)
        return tree

    return changed_tree()


def _changed(draw: Draw, tree: Any, verbatim: Sequence[str]) -> Any:
    places = list(_places(tree))
    place = draw(strategies.sampled_from(places))
    part = _part(tree, place)
    change = draw(strategies.sampled_from(_changes_of(part, is_root=not place)))
    if change == "swap":
        return _swapped(tree, place, draw(strategies.sampled_from(places)))
    if change == "remove":
        return _without(tree, place)
    if change == "rename":
        return _renamed(tree, place, draw(strategies.sampled_from(TEXTS)))
    if change == "repeat key":
        return _with_key_twice(tree, place, draw(_replacements(part, verbatim)))
    return _replaced(tree, place, _new_part(draw, part, change, verbatim))


def _changes_of(part: Any, *, is_root: bool) -> list[str]:
    """Returns the names of the changes that are possible, those first that shrink to little."""
    changes = []
    if isinstance(part, dict | list):
        changes += ["empty", "add", "replace"]
        if part:
            changes += ["lengthen"] if isinstance(part, list) else []
    else:
        changes += ["replace"] * 4
    changes += ["wrap"]
    if not is_root:
        changes += ["remove", "swap", "rename", "repeat key"]
    return changes


def _new_part(draw: Draw, part: Any, change: str, verbatim: Sequence[str]) -> Any:
    if change == "empty":
        return type(part)()
    if change == "add":
        value = draw(_replacements(0, verbatim))
        if isinstance(part, list):
            return [*part, value]
        return {**part, draw(strategies.sampled_from(TEXTS)): value}
    if change == "lengthen":
        most = max(2, _MOST_LEAVES // sum(1 for _ in _places(part)))
        return part * min(most, draw(strategies.sampled_from((2, 3, 100, _MOST_LEAVES))))
    if change == "wrap":
        for _ in range(draw(strategies.sampled_from((1, 2, 30)))):
            part = [part]
        return part
    return draw(_replacements(part, verbatim))


def _replacements(part: Any, verbatim: Sequence[str]) -> strategies.SearchStrategy[Any]:
    """Returns a strategy of extreme values, half of them of the type of `part`."""
    same_type: Sequence[Any] = OTHERS
    if isinstance(part, bool):
        same_type = (True, False)
    elif isinstance(part, int | float):
        same_type = (*_near(part), *NUMBERS)
    elif isinstance(part, str):
        same_type = (*TEXTS, part + "\x1b[2J", part + "\u202e", part.upper(), part[:1], part * 2)
    others = [*NUMBERS, *TEXTS, *OTHERS, *map(Verbatim, verbatim)]
    return strategies.one_of(strategies.sampled_from(same_type), strategies.sampled_from(others))


def _near(number: float) -> list[Any]:
    """Returns numbers beside `number`; a whole one stays whole in most of them."""
    near: list[Any] = [number + 1, number - 1, -number, number * 2, number // 2]
    try:
        near += [float(number), int(number), number * 1000003]
    except (OverflowError, ValueError):
        pass
    return near


def _places(tree: Any, here: Path = ()) -> Iterator[Path]:
    yield here
    for number, part in enumerate(_parts(tree)):
        yield from _places(part, (*here, number))


def _parts(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return list(tree.values())
    return tree if isinstance(tree, list) else []


def _part(tree: Any, place: Path) -> Any:
    for number in place:
        tree = _parts(tree)[number]
    return tree


def _at_parent(tree: Any, place: Path, change: Callable[[list[tuple[Any, Any]]], Any]) -> Any:
    """Returns the tree after `change` of the (key, value) pairs of the parent of `place`."""
    parent = _part(tree, place[:-1])
    if isinstance(parent, dict):
        pairs = list(parent.items())
        change(pairs)
        return _replaced(tree, place[:-1], dict(pairs))
    pairs = list(enumerate(parent))
    change(pairs)
    return _replaced(tree, place[:-1], [value for _, value in pairs])


def _replaced(tree: Any, place: Path, value: Any) -> Any:
    if not place:
        return value
    number, *below = place
    inner = _replaced(_parts(tree)[number], tuple(below), value)
    if isinstance(tree, dict):
        keys = list(tree)
        return {key: inner if key is keys[number] else old for key, old in tree.items()}
    return [inner if index == number else old for index, old in enumerate(tree)]


def _without(tree: Any, place: Path) -> Any:
    return _at_parent(tree, place, lambda pairs: pairs.pop(place[-1]))


def _renamed(tree: Any, place: Path, key: str) -> Any:
    def rename(pairs: list[tuple[Any, Any]]) -> None:
        pairs[place[-1]] = (key, pairs[place[-1]][1])

    return _at_parent(tree, place, rename)


def _with_key_twice(tree: Any, place: Path, value: Any) -> Any:
    def repeat(pairs: list[tuple[Any, Any]]) -> None:
        pairs.append((Repeated(pairs[place[-1]][0]), value))

    return _at_parent(tree, place, repeat)


def _swapped(tree: Any, first: Path, second: Path) -> Any:
    """Returns the tree with two parts swapped; the same where one holds the other."""
    shorter = min(len(first), len(second))
    if first[:shorter] == second[:shorter]:
        return tree
    of_first, of_second = _part(tree, first), _part(tree, second)
    return _replaced(_replaced(tree, first, of_second), second, of_first)


# -- text ------------------------------------------------------------------------------------------

_MARK = "verbatim-b1946ac9:"


def json_text(tree: Any) -> str:
    """Returns a tree as JSON; NaN and infinities as Python writes them."""
    return _with_verbatim(json.dumps(_marked(tree)))


def json_bytes(tree: Any) -> bytes:
    return json_text(tree).encode()


def toml_bytes(tree: Any) -> bytes:
    """Returns a tree as TOML, a line for each of its keys; something else as itself.

    TOML has no null, for which an empty text stands.
    """
    if not isinstance(tree, dict):
        return _toml_value(tree).encode(errors="surrogatepass")
    lines = [f"{_toml_string(key)} = {_toml_value(value)}\n" for key, value in tree.items()]
    return "".join(lines).encode(errors="surrogatepass")


def _marked(tree: Any) -> Any:
    if isinstance(tree, Verbatim):
        return f"{_MARK}{tree}:"
    if isinstance(tree, dict):
        return {key: _marked(value) for key, value in tree.items()}
    return list(map(_marked, tree)) if isinstance(tree, list) else tree


def _with_verbatim(text: str) -> str:
    return re.sub(f'"{_MARK}([^:"]*):"', lambda found: found[1], text)


def _toml_value(value: Any) -> str:
    if isinstance(value, Verbatim):
        return str(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        entries = (f"{_toml_string(key)} = {_toml_value(part)}" for key, part in value.items())
        return "{ " + ", ".join(entries) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    if isinstance(value, int | float):
        return repr(value)
    return _toml_string(value or "")


def _toml_string(text: str) -> str:
    """Returns a basic string of TOML; a lone surrogate, which TOML cannot have, stays as it is."""
    return f'"{_ESCAPED_IN_TOML.sub(_toml_escape, text)}"'


_ESCAPED_IN_TOML = re.compile(r'["\\\x00-\x1f\x7f]')


def _toml_escape(found: re.Match[str]) -> str:
    return f"\\u{ord(found[0]):04X}"


# -- bytes -----------------------------------------------------------------------------------------

_INSERTED = (
    b"\0",
    b"\xff",
    b"\xed\xa0\x80",
    b"\x1b[2J",
    b"\n",
    b" ",
    b'"',
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b"-",
    b"0",
    b"9" * 20,
    b"\xef\xbb\xbf",
)


def changed_bytes(valid: Sequence[bytes]) -> strategies.SearchStrategy[bytes]:
    """Returns a strategy of bytes, each valid ones with one or two small changes."""
    return strategies.sampled_from(valid).flatmap(with_changed_bytes)


@strategies.composite
def with_changed_bytes(draw: Draw, content: bytes) -> bytes:
    for _ in range(draw(strategies.sampled_from((1, 1, 1, 2)))):
        start = draw(strategies.integers(0, len(content)))
        end = min(len(content), start + draw(strategies.sampled_from((1, 2, 4, 16, 100))))
        before, part, after = content[:start], content[start:end], content[end:]
        change = draw(strategies.sampled_from(("delete", "flip", "insert", "double", "truncate")))
        if change == "delete":
            content = before + after
        elif change == "flip" and part:
            flipped = part[0] ^ (1 << draw(strategies.integers(0, 7)))
            content = before + bytes([flipped]) + part[1:] + after
        elif change == "insert":
            content = before + draw(strategies.sampled_from(_INSERTED)) + part + after
        elif change == "double":
            content = before + part + part + after
        elif change == "truncate":
            content = before
    return content


def changed_files(
    trees: Sequence[Any], to_bytes: Callable[[Any], bytes], *, verbatim: Sequence[str] = VERBATIM
) -> strategies.SearchStrategy[bytes]:
    """Returns a strategy of files: three of four have a changed tree, one changed bytes."""
    of_trees = changed_trees(trees, verbatim=verbatim).map(to_bytes)
    of_bytes = changed_bytes([to_bytes(tree) for tree in trees])
    # Not one_of, which leaves out what it is given twice.
    return strategies.sampled_from((of_trees, of_trees, of_trees, of_bytes)).flatmap(lambda s: s)
