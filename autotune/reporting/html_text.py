"""Text from outside in HTML: no markup, and no character that reorders or hides text.

Escaping for HTML leaves the characters for the direction of text as they are: they would also
reorder what stands around a name.
"""

from html import escape
from typing import Any

from autotune.printable import printable


def html_text(text: str, *, quote: bool = True) -> str:
    """Returns `text` escaped for HTML, with visible escapes for control characters.

    Without `quote`, quotes stay as they are: such a text must not stand in an attribute.
    """
    return escape(printable(text, keep_lines=True), quote=quote)


def printable_value(value: Any) -> Any:
    """Returns a value of a template with its control characters shown, for jinja's `finalize`."""
    is_markup = hasattr(value, "__html__")
    return printable(value, keep_lines=True) if isinstance(value, str) and not is_markup else value
