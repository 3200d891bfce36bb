"""`autotune cancel`: end searches of a server."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from autotune.cli.lines import print_line
from autotune.cli.options import OnServer
from autotune.cli.server import open_client
from autotune.errors import InvalidInput
from autotune.spec.setting import Texts, setting

if TYPE_CHECKING:
    from autotune.client.client import Client


@dataclass(frozen=True, kw_only=True)
class CancelCommand(OnServer):
    """Searches to end."""

    searches: Texts = setting(
        help="Numbers of searches, or the names of their studies; see autotune queue.",
        metavar="SEARCH",
        is_argument=True,
    )


def cancel(request: CancelCommand) -> None:
    """Cancel searches of a server; their finished trials are kept.

    One in the queue ends at once, one that runs within seconds, once its trial was ended.
    """
    with open_client(request.server) as client:
        numbers = [number for text in request.searches for number in _numbers(text, client)]
        for number in dict.fromkeys(numbers):
            search = client.cancel(number)
            if search.has_ended:
                print_line(f"Search {number} is {search.state}.")
            else:
                print_line(f"Search {number} is being cancelled.")


def _numbers(text: str, client: "Client") -> list[int]:
    """Returns the number that was given, or those of a study's searches that have not ended."""
    if text.isdecimal():
        return [int(text)]
    active = [search.id for search in client.searches(study=text) if not search.has_ended]
    if not active:
        raise InvalidInput(
            f"no search of a study {text!r} waits or runs", hint="see autotune queue"
        )
    return active
