"""The option `--server`, and the client of the server that it names."""

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from autotune.client.address import SERVER_VARIABLE, server_address
from autotune.errors import InvalidInput, UnknownStudy
from autotune.spec.study import DEFAULT_STORAGE

if TYPE_CHECKING:
    from autotune.client.client import Client


def check_one_place(server: str | None, storage: str) -> None:
    """Raise InvalidInput where both a server and a database are named."""
    if server is not None and storage != DEFAULT_STORAGE:
        raise InvalidInput(
            f"--server {server_address(server).url} and --storage both say where the study is",
            hint="leave one of them out",
        )


@contextmanager
def open_client(server: str | None) -> Iterator["Client"]:
    """Yield the client of a server; without one, of that of the environment.

    Raises InvalidInput where there is none.
    """
    # httpx takes 0.2 s to import, which the help of a command does without.
    from autotune.client.client import Client  # noqa: PLC0415

    with Client(server or server_of_environment()) as client:
        yield client


def server_of_environment() -> str:
    """Returns the URL of AUTOTUNE_SERVER. Raises InvalidInput where it is not set."""
    server = os.environ.get(SERVER_VARIABLE)
    if not server:
        raise InvalidInput(
            "there is no server",
            hint=f"give --server URL, or set {SERVER_VARIABLE}; autotune serve starts one and "
            "prints its URL",
        )
    return server


@contextmanager
def looked_for_here(storage: str) -> Iterator[None]:
    """Lets the error for a study that is not in a database say how to ask a server for it."""
    server = os.environ.get(SERVER_VARIABLE)
    try:
        yield
    except UnknownStudy as error:
        if not server and storage != DEFAULT_STORAGE:
            raise
        url = server_address(server).url if server else "URL"
        raise UnknownStudy(
            error.message, hint=f"{error.hint}; for a study of a server: --server {url}"
        ) from None


@contextmanager
def looked_for_on(server: str) -> Iterator[None]:
    """Lets the error for a study that a server lacks say how to read one of this folder.

    It says so of the server of the environment, which the command line does not name.
    """
    try:
        yield
    except UnknownStudy as error:
        if server != os.environ.get(SERVER_VARIABLE):
            raise
        raise UnknownStudy(
            error.message,
            hint=f"{error.hint}; for a study of this folder: --storage {DEFAULT_STORAGE}",
        ) from None


def command_on_server(words: list[str], client: "Client") -> str:
    """Returns a command to copy, with the server that it asks."""
    return shlex.join(["autotune", *words, "--server", client.url])
