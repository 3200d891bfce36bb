"""Changes keys in the text of a YAML, JSON or TOML file, and not one character beside them.

A YAML library that loads and dumps a file changes lines that nobody asked for: ruamel.yaml gives
back 64 of the 200 examples in axolotl's repository byte for byte. So here PyYAML, by which the
trainers read, only says where each key and value stands, and the text between is replaced. JSON is
read as YAML, of which it is a part. tomlkit itself keeps what it does not change.

An anchor stands for its value at several places. A value that changes at one of them is written out
there, and the others keep theirs.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import tomlkit
import yaml
from tomlkit.exceptions import TOMLKitError

KeyPath = tuple[str, ...]
"""The keys that lead to a value, the outermost first."""

REMOVED = object()
"""In place of a value: the key is taken out."""


class CannotEdit(Exception):
    """The text has a form in which a key cannot be changed; the message is the key's path."""


def edited(text: str, changes: Mapping[KeyPath, Any], *, suffix: str) -> str:
    """Returns the text of a file of that suffix with the changes made, each in turn.

    Raises CannotEdit.
    """
    for path, value in changes.items():
        try:
            if suffix == ".toml":
                text = _edited_toml(text, path, value)
            else:
                text = _Text(text, is_json=suffix == ".json").changed(path, value)
        except (yaml.YAMLError, TOMLKitError, LookupError, TypeError) as error:
            raise CannotEdit(".".join(path)) from error
    return text


def changed_content(content: Mapping[str, Any], changes: Mapping[KeyPath, Any]) -> dict[str, Any]:
    """Returns the content of a file with the changes made: what the edited text must say.

    A key to take out that comes from a merged mapping stays, without a value.
    """
    changed = dict(content)
    for path, value in changes.items():
        name, rest = path[0], path[1:]
        if rest:
            inner = changed.get(name)
            if value is REMOVED and not isinstance(inner, Mapping):
                continue
            inner = inner if isinstance(inner, Mapping) else {}
            changed[name] = changed_content(inner, {rest: value})
        elif value is REMOVED:
            changed.pop(name, None)
        else:
            changed[name] = value
    return changed


def same_content(text_says: Any, wanted: Any) -> bool:
    """Returns whether two contents are equal, where a key without a value is as good as none."""
    if isinstance(text_says, Mapping) and isinstance(wanted, Mapping):
        names = {*text_says, *wanted}
        return all(same_content(text_says.get(name), wanted.get(name)) for name in names)
    return bool(text_says == wanted) and isinstance(text_says, bool) == isinstance(wanted, bool)


# -- TOML ------------------------------------------------------------------------------------------


def _edited_toml(text: str, path: KeyPath, value: Any) -> str:
    document = tomlkit.parse(text)
    table: Any = document
    for name in path[:-1]:
        if name not in table:
            if value is REMOVED:
                return text
            table[name] = tomlkit.table()
        table = table[name]
    if value is not REMOVED:
        table[path[-1]] = value
    elif path[-1] in table:
        del table[path[-1]]
    return tomlkit.dumps(document)


# -- YAML and JSON ---------------------------------------------------------------------------------


@dataclass(kw_only=True)
class _Node:
    """A value with its place in the text: `text[start:end]`, with its anchor."""

    kind: str
    """scalar, map, list or alias."""
    start: int
    end: int
    anchor: str | None = None
    """Its own, or that which an alias stands for."""
    in_braces: bool = False
    entries: "list[tuple[_Node, _Node]]" = field(default_factory=list)
    """Of a map: keys and values."""
    items: "list[_Node]" = field(default_factory=list)
    value: str = ""
    """Of a scalar."""

    def nodes(self) -> "Iterator[_Node]":
        """Yield this node and all below it, in the order of the text."""
        yield self
        for key, value in self.entries:
            yield from key.nodes()
            yield from value.nodes()
        for item in self.items:
            yield from item.nodes()

    def entry(self, name: str) -> "tuple[_Node, _Node] | None":
        return next((pair for pair in self.entries if pair[0].value == name), None)


def _tree(text: str) -> _Node:
    """Returns the tree of a text that has one document. Raises YAMLError."""
    events = iter(list(yaml.parse(text, Loader=yaml.SafeLoader)))

    def node(event: Any) -> _Node:
        start, end = event.start_mark.index, event.end_mark.index
        if isinstance(event, yaml.AliasEvent):
            return _Node(kind="alias", start=start, end=end, anchor=event.anchor)
        if isinstance(event, yaml.ScalarEvent):
            end = start + len(text[start:end].rstrip())
            return _Node(
                kind="scalar", start=start, end=end, anchor=event.anchor, value=event.value
            )
        made = _Node(
            kind="map" if isinstance(event, yaml.MappingStartEvent) else "list",
            start=start,
            end=end,
            anchor=event.anchor,
            in_braces=bool(event.flow_style),
        )
        while not isinstance(event := next(events), yaml.CollectionEndEvent):
            child = node(event)
            if made.kind == "map":
                made.entries.append((child, node(next(events))))
                child = made.entries[-1][1]
            else:
                made.items.append(child)
            made.end = max(made.end, child.end)
        if made.in_braces:
            made.end = event.end_mark.index
        return made

    for event in events:
        if isinstance(event, yaml.NodeEvent):
            return node(event)
    raise LookupError("the document has no value")


_BOOLEANS = {
    spelling: pair
    for pair in (
        ("true", "false"),
        ("True", "False"),
        ("TRUE", "FALSE"),
        ("yes", "no"),
        ("Yes", "No"),
        ("on", "off"),
        ("On", "Off"),
    )
    for spelling in pair
}
"""{spelling of a boolean in YAML 1.1: that of true and of false in the same style}."""


class _Text:
    """A text of YAML or JSON, and where its keys and values stand."""

    def __init__(self, text: str, *, is_json: bool) -> None:
        self._text = text
        self._is_json = is_json
        # To YAML a tab is no indentation. In JSON it can stand between values alone.
        self._root = _tree(text.replace("\t", " ") if is_json else text)
        self._line_end = "\r\n" if "\r\n" in text else "\n"
        self._stands_for: dict[int, _Node] = {}
        """{id of an alias: the node that it stands for, the last one before it of that name}."""
        named: dict[str, _Node] = {}
        for node in self._root.nodes():
            if node.anchor is not None and node.kind == "alias":
                self._stands_for[id(node)] = named[node.anchor]
            elif node.anchor is not None:
                named[node.anchor] = node

    def changed(self, path: KeyPath, value: Any) -> str:
        """Returns the text with one key set or taken out."""
        at = self._root
        for depth, name in enumerate(path):
            if at.kind != "map":
                raise LookupError(name)
            pair = at.entry(name)
            rest = path[depth + 1 :]
            if pair is None:
                return self._without_entry(at, name, rest, value)
            key, node = pair
            if others := self._others(node, also_below=not rest):
                # Another place has this very value: it keeps it, and the change is made here.
                return _Text(self._moved(others[0]), is_json=False).changed(path, value)
            if not rest:
                if value is REMOVED:
                    return self._removed(at, key, node)
                return self._replaced(key, node, value)
            if node.kind == "alias":
                return self._replaced(key, node, changed_content(self._says(node), {rest: value}))
            if node.kind != "map":
                if value is REMOVED:
                    return self._text
                return self._replaced(key, node, changed_content({}, {rest: value}))
            at = node
        raise LookupError("an empty path")

    # -- anchors -----------------------------------------------------------------------------------

    def _says(self, node: _Node) -> Any:
        """Returns the value of a node, as a trainer reads it."""
        if node.kind == "alias":
            node = self._stands_for[id(node)]
        loader = yaml.SafeLoader(self._text)
        waiting = [loader.get_single_node()]
        while waiting:
            each = waiting.pop()
            is_key = isinstance(each, yaml.ScalarNode) and node.kind != "scalar"
            if each.start_mark.index == node.start and not is_key:
                return loader.construct_document(each)
            if isinstance(each, yaml.MappingNode):
                waiting += [child for pair in each.value for child in pair]
            elif isinstance(each, yaml.SequenceNode):
                waiting += each.value
        raise LookupError(node.value)

    def _others(self, node: _Node, *, also_below: bool) -> list[_Node]:
        """Returns the aliases elsewhere of a node, and of what is below it."""
        if node.kind == "alias":
            return []
        inside = {id(each) for each in node.nodes()}
        changing = inside if also_below else {id(node)}
        return [
            each
            for each in self._root.nodes()
            if each.kind == "alias"
            and id(each) not in inside
            and id(self._stands_for[id(each)]) in changing
        ]

    def _moved(self, alias: _Node) -> str:
        """Returns the text with anchor and value at an alias; where it was, the value remains."""
        text, name = self._text, str(alias.anchor)
        node = self._stands_for[id(alias)]
        old = text[node.start : node.end]
        there = old
        if "\n" in old or "#" in old:
            there = f"&{name} {_one_line(self._says(node))}"
        bare = old[len(name) + 1 :].lstrip(" ")
        before = text[: node.start]
        if bare.startswith(("\r", "\n")):
            before = before.rstrip(" ")
        return before + bare + text[node.end : alias.start] + there + text[alias.end :]

    # -- one entry ---------------------------------------------------------------------------------

    def _without_entry(self, at: _Node, name: str, rest: KeyPath, value: Any) -> str:
        """Returns the text with a key that the mapping itself does not have."""
        merged = self._says(at) if at.entry("<<") else {}
        if value is REMOVED and name not in merged:
            return self._text
        changed = changed_content(merged, {(name, *rest): value})
        return self._inserted(at, name, changed.get(name))

    def _replaced(self, key: _Node, node: _Node, value: Any) -> str:
        text, start = self._text, node.start
        old = text[start : node.end]
        if node.kind in ("map", "list") and not node.in_braces:
            # The value stands below its key: it goes, and the line of the key stays.
            colon, line_end = text.index(":", key.end) + 1, self._end_of_line(key.end)
            comment = re.search(r"\s+#.*", text[colon:line_end])
            kept = comment.group() if comment else ""
            until = self._end_of_line(node.end)
            return f"{text[:colon]} {self._written(value)}{kept}{text[until:]}"
        if node.anchor is not None and node.kind != "alias":  # nothing stands for it
            start += len(node.anchor) + 1
            start += len(text[start:]) - len(text[start:].lstrip(" "))
            old = text[start : node.end]
        blank = "" if start < node.end or text[:start].endswith(" ") else " "
        return text[:start] + blank + self._written(value, old=old, at=key) + text[node.end :]

    def _removed(self, at: _Node, key: _Node, node: _Node) -> str:
        text = self._text
        index = next(i for i, pair in enumerate(at.entries) if pair[0] is key)
        if at.in_braces:
            if index + 1 < len(at.entries):
                return text[: key.start] + text[at.entries[index + 1][0].start :]
            if index:
                return text[: at.entries[index - 1][1].end] + text[node.end :]
            return text[: key.start] + text[node.end :]
        line_start = self._start_of_line(key.start)
        if text[line_start : key.start].strip():  # the first key after a dash
            raise LookupError(key.value)
        if len(at.entries) == 1 and at is not self._root:
            return text[: at.start] + "{}" + text[node.end :]
        until = self._end_of_line(max(key.end, node.end)) + len(self._line_end)
        return text[:line_start] + text[until:]

    def _inserted(self, at: _Node, name: str, value: Any) -> str:
        text = self._text
        quoted = json.dumps(name) if self._is_json else _one_line(name)
        if not at.entries:
            inner = f"{quoted}: {self._written(value)}"
            return (
                text[: at.start]
                + text[at.start : at.end].replace("{", "{" + inner, 1)
                + text[at.end :]
            )
        before_key, before = at.entries[self._neighbour(at, name)]
        indent = text[self._start_of_line(before_key.start) : before_key.start]
        on_own_line = not indent.strip()
        end = max(before.end, before_key.end)
        if at.in_braces:
            written = f"{quoted}: {self._written(value, at=before_key)}"
            if on_own_line:
                # Before the last line, which has no comma and stays as it is.
                at_end = before is at.entries[-1][1]
                comma = f",{self._line_end}{indent}"
                if at_end:
                    return text[: before_key.start] + written + comma + text[before_key.start :]
                return text[:end] + comma + written + text[end:]
            return f"{text[:end]}, {written}{text[end:]}"
        column = " " * self._column(before_key.start)
        end = self._end_of_line(end)
        return text[:end] + self._line_end + self._lines(column, quoted, value) + text[end:]

    def _neighbour(self, at: _Node, name: str) -> int:
        """Returns the index of the entry after which a new one stands: of the most alike name."""
        names = [key.value for key, _ in at.entries]

        def common(other: str) -> int:
            pairs = zip(name, other, strict=False)
            return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(name), len(other)))

        longest = max(map(common, names))
        if longest < _LEAST_COMMON:
            return len(names) - 1
        return max(index for index, other in enumerate(names) if common(other) == longest)

    def _lines(self, indent: str, name: str, value: Any) -> str:
        """Returns an entry of a block, with the entries of a table below it."""
        if isinstance(value, Mapping) and value:
            inner = [
                self._lines(indent + self._step(), _one_line(key), v) for key, v in value.items()
            ]
            return self._line_end.join([f"{indent}{name}:", *inner])
        return f"{indent}{name}: {self._written(value)}"

    def _step(self) -> str:
        """Returns the indentation of the first table below a key; two blanks without one."""
        for _, node in self._root.entries:
            if node.kind == "map" and not node.in_braces:
                return " " * self._column(node.entries[0][0].start)
        return "  "

    # -- text --------------------------------------------------------------------------------------

    def _written(self, value: Any, *, old: str = "", at: _Node | None = None) -> str:
        """Returns a value as text, in the style of what it replaces."""
        if self._is_json:
            if at is None or not isinstance(value, Mapping | list) or not value:
                return json.dumps(value, ensure_ascii=False)
            indent = self._text[self._start_of_line(at.start) : at.start]
            step = self._text[self._start_of_line(first := self._root.entries[0][0].start) : first]
            if indent.strip() or not step:
                return json.dumps(value, ensure_ascii=False)
            lines = json.dumps(value, ensure_ascii=False, indent=step).split("\n")
            return f"{self._line_end}{indent}".join(lines)
        if old in _BOOLEANS and isinstance(value, bool):
            return _BOOLEANS[old][0 if value else 1]
        if old[:1] in ("'", '"') and not isinstance(value, Mapping | list) and value is not None:
            plain = value if isinstance(value, str) else _one_line(value)
            if old[0] == '"':
                return json.dumps(plain, ensure_ascii=False)
            if plain.isprintable():
                doubled = plain.replace("'", "''")
                return f"'{doubled}'"
        return _one_line(value)

    def _start_of_line(self, position: int) -> int:
        return self._text.rfind("\n", 0, position) + 1

    def _end_of_line(self, position: int) -> int:
        """Returns where the line ends, before its line break."""
        end = self._text.find("\n", position)
        if end < 0:
            return len(self._text)
        return end - 1 if self._text[end - 1 : end] == "\r" else end

    def _column(self, position: int) -> int:
        return position - self._start_of_line(position)


_LEAST_COMMON = 4
"""Letters that two names begin with, if they belong together."""


class _WithoutAnchors(yaml.SafeDumper):  # type: ignore[misc]  # PyYAML has no types
    """Writes a value that stands at two places twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _one_line(value: Any) -> str:
    """Returns a value as YAML on one line."""
    text: str = yaml.dump(
        value,
        Dumper=_WithoutAnchors,
        default_flow_style=True,
        sort_keys=False,
        width=float("inf"),
        allow_unicode=True,
    )
    return text.removesuffix("\n").removesuffix("\n...")
