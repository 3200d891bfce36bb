"""Writes YAML in which names are readable, and characters that nobody can see are escapes."""

from collections.abc import Mapping
from typing import Any

import yaml

from autotune.printable import printable


def yaml_text(values: Mapping[str, Any], *, width: int = 80) -> str:
    """Returns `values` as YAML, with the very texts that they hold.

    PyYAML escapes control characters, but takes those for the direction of text for letters.
    """
    settings = {"sort_keys": False, "default_flow_style": False, "width": width}
    text: str = yaml.safe_dump(dict(values), allow_unicode=True, **settings)
    if printable(text, keep_lines=True) == text:
        return text
    return str(yaml.safe_dump(dict(values), allow_unicode=False, **settings))
