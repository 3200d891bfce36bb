"""Types, values and defaults of keys, taken from a trainer's package (`tests/exporters/keys/`)."""

import json
from pathlib import Path

KEYS = Path(__file__).parent.parent / "keys"


def load(name):
    return json.loads((KEYS / f"{name}.json").read_text())


def check(key, value, known):
    """Fail for a key that the trainer lacks and for a value that it would reject or drop."""
    assert key in known, f"there is no key {key}"
    types = known[key]["types"]
    assert "Any" in types or type(value).__name__ in types, f"{key} = {value!r} is none of {types}"
    for one in value if isinstance(value, list) and "values" in known[key] else [value]:
        assert one in known[key].get("values", [one]), (
            f"{key} = {one!r} is none of {known[key]['values']}"
        )


def defaults(known):
    return {key: said["default"] for key, said in known.items()}
