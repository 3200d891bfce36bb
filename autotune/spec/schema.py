"""What pydantic has to know of the dataclasses that are stored, sent or answered.

Such a dataclass inherits from `Schema`, or from `Built`, and is the one description of its JSON.
`spec/reading.py` reads it. pydantic is not imported here, as that takes a twentieth of a second.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from autotune.spec.limits import FINITE, WHOLE
from autotune.system.syntax_trees import ONE_THREAD_AT_A_TIME


class Schema:
    """Base of dataclasses whose fields are checked while they are read.

    A value must have the type of its field (`True` is no number, and `"3"` neither) and be in its
    range (`spec/limits.py`). Dataclasses within it are read from objects and tuples from lists. A
    field that is missing or not known is an error.
    """

    __pydantic_config__: ClassVar[Mapping[str, Any]] = {
        "strict": True,
        "extra": "forbid",
        "revalidate_instances": "always",
        "use_attribute_docstrings": True,  # as descriptions in the document of the interface
    }

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """Returns pydantic's schema of the dataclass, adapted to JSON."""
        with ONE_THREAD_AT_A_TIME:  # descriptions are read from the class' syntax tree
            schema = handler(source)
        _adapt_to_json(schema)
        return schema


class Built:
    """Base of dataclasses that check their values when they are built, with hints for users."""

    @classmethod
    def made_of(cls, values: Mapping[str, Any]) -> Any:
        """Returns the instance of the arguments of the class by their names."""
        return cls(**values)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """Returns the schema of an instance, or of an object with the arguments of the class."""

        def built(value: Any) -> Any:
            if isinstance(value, cls):
                return value
            if not isinstance(value, Mapping):
                raise ValueError(f"{type(value).__name__} is given for a {cls.__name__}")
            return cls.made_of(value)

        return {"type": "function-plain", "function": {"type": "no-info", "function": built}}


def _adapt_to_json(schema: Any) -> None:
    """Lets lists be tuples, objects dataclasses and texts paths, and gives every number a range."""
    if isinstance(schema, list | tuple):
        for part in schema:
            _adapt_to_json(part)
    elif isinstance(schema, dict):
        kind = schema.get("type")
        if kind in ("tuple", "dataclass", "lax-or-strict"):  # the last of a path
            schema["strict"] = False
        elif kind == "int" and "le" not in schema:
            schema.update(ge=WHOLE.least, le=WHOLE.most)
        elif kind == "float" and "le" not in schema:
            schema.update(ge=FINITE.least, le=FINITE.most)
        for part in schema.values():
            _adapt_to_json(part)
