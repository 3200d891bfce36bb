"""What a trainer's own package says of its keys (`tests/exporters/keys/`): types, values and defaults."""

import json
from pathlib import Path

KEYS = Path(__file__).parent.parent / "keys"


def load(name):
    return json.loads((KEYS / f"{name}.json").read_text())


def check(key, value, known):
    """Fails for a key that the trainer does not have, and for a value that it would not take, or silently drop."""
    assert key in known, f"there is no key {key}"
    types = known[key]["types"]
    assert "Any" in types or type(value).__name__ in types, f"{key} = {value!r} is none of {types}"
    for one in value if isinstance(value, list) and "values" in known[key] else [value]:
        assert one in known[key].get("values", [one]), (
            f"{key} = {one!r} is none of {known[key]['values']}"
        )


def defaults(known):
    return {key: said["default"] for key, said in known.items()}
