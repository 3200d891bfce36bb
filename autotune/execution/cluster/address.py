"""The address of a Ray cluster, as `--ray` takes it; read without Ray, which is an extra."""

from urllib.parse import urlsplit

from autotune.errors import InvalidInput

AUTO = "auto"
LOCAL = "local"
_HINT = "use auto, local, or an address such as ray://host:10001"


def check_address(address: str) -> None:
    """Raises InvalidInput for a text that is not the address of a Ray cluster."""
    if address not in (AUTO, LOCAL):
        host_and_port(address)


def host_and_port(address: str) -> tuple[str, int]:
    """Returns the parts of `ray://host:port` or `host:port`. Raises InvalidInput."""
    invalid = InvalidInput(f"{address!r} is not the address of a Ray cluster", hint=_HINT)
    try:
        parts = urlsplit(address if "://" in address else f"//{address}")
        host, port = parts.hostname, parts.port
    except ValueError:
        raise invalid from None
    has_more = parts.path or parts.query or parts.fragment or parts.username
    if parts.scheme not in ("", "ray") or not host or not port or has_more:
        raise invalid
    return host, port
