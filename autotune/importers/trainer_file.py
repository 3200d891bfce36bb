"""Reads a trainer's file: YAML, TOML or JSON, as data alone.

YAML is read by PyYAML, as the trainers themselves do, after its tree was looked at: tags, keys that
stand twice and anchors that multiply are one sentence each.
"""

import json
import re
from collections.abc import Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from autotune.errors import InvalidInput
from autotune.spec.user_files import parse_json, parse_toml, read_file
from autotune.spec.user_paths import expanded

LARGEST_BYTES = 2**18
"""Of a trainer's file: a hundred times what people write."""
MOST_VALUES = 20_000
"""Of a YAML file, with what its anchors repeat."""
MOST_LEVELS = 50
_FILLED_IN = re.compile(r"\{\{|\{%|\$\{|^\$[A-Za-z_]\w*$")
"""Jinja, and variables of the environment or of OmegaConf."""
_PROMPT_KEYS = ("type.format", "type.no_input_format", "type.system_format")
_CORE_TAG = "tag:yaml.org,2002:"
_OWN_TAGS = {
    f"{_CORE_TAG}{name}"
    for name in ("null", "bool", "int", "float", "str", "seq", "map", "set", "merge", "timestamp")
}


def read_trainer_file(path: Path) -> dict[str, Any]:
    """Returns the keys of a file. Raises InvalidInput, also for a value that something fills in."""
    text = read_file(expanded(str(path)), most_bytes=LARGEST_BYTES)
    return parse_trainer_file(text, path)


def parse_trainer_file(text: bytes, path: Path) -> dict[str, Any]:
    """Returns the keys of the text of a file; its suffix says in which language it is.

    Raises InvalidInput as `read_trainer_file` does.
    """
    source = str(path)
    content: Any
    match path.suffix.lower():
        case ".toml":
            content = parse_toml(text, source=source)
        case ".json":
            content = parse_json(text, source=source)
            _check_pairs(text, source=source)
        case ".yaml" | ".yml":
            content = _parse_yaml(text, source=source)
        case suffix:
            raise InvalidInput(
                f"{source} ends in {suffix!r}" if suffix else f"{source} has no ending",
                hint="name a .yaml, .toml or .json file of a trainer",
            )
    if not isinstance(content, dict) or not content:
        raise InvalidInput(
            f"{source} has no keys", hint="name the file that configures the training"
        )
    for key, value in _texts(content):
        if _FILLED_IN.search(value):
            raise InvalidInput(
                f"{source} has {key}: {value!r:.60}, which something else fills in",
                hint="save a copy with the value itself",
            )
    return content


def _texts(content: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield (key, text) of all text values but the templates of chats and prompts.

    Those of chats are Jinja, and in those of prompts two braces stand for one.
    """
    if isinstance(content, str):
        if "chat_template" not in key and not key.endswith(_PROMPT_KEYS):
            yield key, content
    elif isinstance(content, Mapping):
        for name, value in content.items():
            yield from _texts(value, f"{key}.{name}" if key else str(name))
    elif isinstance(content, list):
        for value in content:
            yield from _texts(value, key)


def _check_pairs(text: bytes, *, source: str) -> None:
    """Raise InvalidInput for an object of JSON that has a key twice."""

    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        named = dict(found)
        if len(named) < len(found):
            seen: set[str] = set()
            for name, _ in found:
                if name in seen:
                    raise _twice(source, name, "")
                seen.add(name)
        return named

    json.loads(text.decode("utf-8-sig"), object_pairs_hook=pairs)


def _twice(source: str, key: str, where: str) -> InvalidInput:
    return InvalidInput(
        f"{source} has {key!r:.60} twice{where}",
        hint="remove one of them: a trainer takes the last one without a word",
    )


# -- YAML ------------------------------------------------------------------------------------------


def _parse_yaml(text: bytes, *, source: str) -> Any:
    loader_class = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        decoded = text.decode("utf-8-sig")
        _check_levels(yaml.parse(decoded, Loader=loader_class), source=source)
        loader = loader_class(decoded)
        root = loader.get_single_node()
        if root is None:
            return None
        _Tree(source).check(root)
        return loader.construct_document(root)
    except yaml.YAMLError as error:
        raise InvalidInput(
            f"{source} is not valid YAML: {_reason(error)}",
            hint="correct the file at this position",
        ) from None
    except UnicodeDecodeError as error:
        raise InvalidInput(
            f"{source} is not valid YAML: it is not UTF-8 text ({error.reason})",
            hint="save it as UTF-8",
        ) from None
    except (RecursionError, ValueError, OverflowError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InvalidInput(
            f"{source} is not valid YAML: {reason:.120}", hint="correct the file"
        ) from None


def _check_levels(events: Iterator[yaml.Event], *, source: str) -> None:
    """Raise InvalidInput for levels in whose recursion the library would end the process."""
    level = 0
    for event in events:
        if isinstance(event, yaml.CollectionStartEvent):
            level += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            level -= 1
        if level > MOST_LEVELS:
            raise InvalidInput(
                f"{source} has more than {MOST_LEVELS} levels "
                f"(at line {event.start_mark.line + 1})",
                hint="name a trainer's file",
            )


def _reason(error: yaml.YAMLError) -> str:
    """Returns what is wrong, in one line, and where."""
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    mark = getattr(error, "problem_mark", None)
    where = "" if mark is None else f" (at line {mark.line + 1}, column {mark.column + 1})"
    return f"{problem}{where}"


class _Tree:
    """Looks at the nodes of a YAML file before anything is made of them."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._sizes: dict[int, int] = {}

    def check(self, node: yaml.Node) -> int:
        """Returns the number of values below a node, with what anchors repeat.

        Raises InvalidInput.
        """
        if id(node) in self._sizes:
            return self._sizes[id(node)]
        if node.tag not in _OWN_TAGS:
            tag = node.tag.replace(_CORE_TAG, "!!")
            raise self._error(
                f"has the tag {tag!r:.60}, and nothing in a file is run",
                node,
                hint="replace it by a plain value",
            )
        self._sizes[id(node)] = MOST_VALUES + 1  # until it is known: an anchor within itself
        size = 1
        if isinstance(node, yaml.MappingNode):
            self._check_keys(node)
            for key, value in node.value:
                size += self.check(key) + self.check(value)
        elif isinstance(node, yaml.SequenceNode):
            size += sum(self.check(value) for value in node.value)
        if size > MOST_VALUES:
            raise self._error(
                f"has more than {MOST_VALUES:,} values, with those that its anchors repeat",
                node,
                hint="write what is needed without anchors",
            )
        self._sizes[id(node)] = size
        return size

    def _check_keys(self, node: yaml.MappingNode) -> None:
        seen: set[Hashable] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise self._error("has a key that is no text", key, hint="quote what has braces")
            if key.tag.endswith(":merge"):
                continue
            if key.value in seen:
                raise _twice(self._source, key.value, self._where(key))
            seen.add(key.value)

    def _error(self, what: str, node: yaml.Node, *, hint: str) -> InvalidInput:
        return InvalidInput(f"{self._source} {what}{self._where(node)}", hint=hint)

    def _where(self, node: yaml.Node) -> str:
        return f" (at line {node.start_mark.line + 1})"
