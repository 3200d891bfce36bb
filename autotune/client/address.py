"""The address of a server, and where its token comes from.

A URL may be the one that `autotune serve` prints, with `?token=`. The token is then taken out of
it, so that no message shows it. Otherwise a token is that of `AUTOTUNE_TOKEN` or, for the same
server, of the URL in `AUTOTUNE_SERVER` or of a file that only its owner can read,
`~/.config/autotune/tokens.toml`, with lines such as

    "https://tuning.example.org" = "the token"
"""

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from autotune.errors import InvalidInput
from autotune.spec.user_files import LARGEST_TEXT_BYTES, parse_toml

TOKEN_VARIABLE = "AUTOTUNE_TOKEN"
SERVER_VARIABLE = "AUTOTUNE_SERVER"
"""The server of the commands that need one, and of those that read a study."""
_DEFAULT_PORTS = {"http": 80, "https": 443}
_EXAMPLE = "http://127.0.0.1:8321"
_HOW_TO_NAME = f"write the URL that autotune serve prints, for example {_EXAMPLE}"
_OTHERS_MAY_READ = stat.S_IRWXG | stat.S_IRWXO


@dataclass(frozen=True, kw_only=True)
class ServerAddress:
    """Where a server is, and the token that its URL had."""

    url: str
    """Scheme, host and port, with the path that a proxy may serve it under; no slash at its end."""
    token: str | None = field(default=None, repr=False)


def server_address(given: str) -> ServerAddress:
    """Returns the address in a URL, as it is printed or as it is typed. Raises InvalidInput."""
    problem = InvalidInput(
        f"{_without_secrets(given)!r} is not the URL of a server", hint=_HOW_TO_NAME
    )
    if not given.isprintable() or given != given.strip():
        raise problem
    try:
        parts = urlsplit(given)
        port = parts.port
    except ValueError:
        raise problem from None
    if parts.scheme not in _DEFAULT_PORTS or not parts.hostname:
        raise problem
    if parts.username is not None or parts.password is not None:
        raise InvalidInput(
            f"the URL of the server at {parts.hostname} has a user's name in it",
            hint=f"a server asks for a token: set {TOKEN_VARIABLE}, and leave the name out",
        )
    query = parse_qs(parts.query, keep_blank_values=True)
    if parts.fragment or set(query) - {"token"}:
        raise problem
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    if port is not None and port != _DEFAULT_PORTS[parts.scheme]:
        host = f"{host}:{port}"
    token = None
    if "token" in query:
        token = checked_token(query["token"][-1], source="the URL of the server")
    return ServerAddress(url=f"{parts.scheme}://{host}{parts.path.rstrip('/')}", token=token)


def _without_secrets(given: str) -> str:
    """Returns a URL as an error may show it: without its query, and without a user's name."""
    before_query = given.partition("?")[0].partition("#")[0]
    scheme, separator, rest = before_query.rpartition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"


def checked_token(token: str, *, source: str) -> str:
    """Returns a token that a header can carry. Raises InvalidInput, without showing the token."""
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise InvalidInput(
            f"the token of {source} cannot be one",
            hint="a token has letters, digits, '-' and '_'; autotune serve prints one, and "
            "autotune serve tokens add makes one",
        )
    return token


def token_for(url: str) -> str | None:
    """Returns the token for the server at `url`; None if there is none. Raises InvalidInput."""
    if from_environment := os.environ.get(TOKEN_VARIABLE):
        return checked_token(from_environment, source=f"the variable {TOKEN_VARIABLE}")
    if server := os.environ.get(SERVER_VARIABLE):
        named = server_address(server)
        if named.url == url and named.token is not None:
            return named.token
    file = tokens_file()
    if not file.exists():
        return None
    return _token_in(file, url)


def tokens_file() -> Path:
    """Returns the file of a user's tokens, which need not exist."""
    folder = os.environ.get("XDG_CONFIG_HOME") or ""
    base = Path(folder) if os.path.isabs(folder) else Path(os.path.expanduser("~/.config"))
    return base / "autotune" / "tokens.toml"


def _token_in(file: Path, url: str) -> str | None:
    try:
        with file.open("rb") as opened:
            # Of the opened file, not of its name: another one may have taken its place.
            mode = os.fstat(opened.fileno()).st_mode
            if os.name == "posix" and mode & _OTHERS_MAY_READ:
                raise InvalidInput(
                    f"{file} has tokens, and others than its owner may use it",
                    hint=f"chmod 600 {file}",
                )
            text = opened.read(LARGEST_TEXT_BYTES)
    except OSError as error:
        raise InvalidInput(
            f"{file} cannot be read: {error.strerror or error}",
            hint=f"correct that, or set {TOKEN_VARIABLE}",
        ) from None
    try:
        content = parse_toml(text, source=str(file))
    except InvalidInput:  # its message could show a part of the file
        raise InvalidInput(
            f"{file} is not valid TOML", hint=f'write lines such as "{_EXAMPLE}" = "the token"'
        ) from None
    for server, token in content.items():
        if not isinstance(token, str):
            raise InvalidInput(
                f"{file}: {server} has no token", hint=f'write "{_EXAMPLE}" = "the token"'
            )
        if server_address(server).url == url:
            return checked_token(token, source=str(file))
    return None
