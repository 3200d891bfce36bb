"""What comes before the import of Ray: whether it is there, and the environment that it reads.

A cluster asks for a token if it was started where there is one, and one without authentication does
not mind it. Source: Ray's documentation, "Token authentication".
"""

import os
from importlib.util import find_spec
from pathlib import Path

from autotune.errors import InvalidInput

_MODE = "RAY_AUTH_MODE"


def check_ray_is_installed(address: str) -> None:
    """Raises InvalidInput where the extra is missing that `--ray` needs."""
    if find_spec("ray") is None:
        raise InvalidInput(
            f"--ray {address} needs Ray, which is not installed", hint="install autotune[ray]"
        )


def prepare_environment() -> None:
    """Has Ray use its token where there is one, unless the user says otherwise."""
    if _MODE not in os.environ and _has_token():
        os.environ[_MODE] = "token"


def _has_token() -> bool:
    if os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH"):
        return True
    try:
        return (Path.home() / ".ray" / "auth_token").exists()
    except (OSError, RuntimeError):  # no home, or one that may not be read
        return False
