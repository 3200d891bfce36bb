"""`autotune cancel`: end searches of a server."""

from typing import Annotated

import typer

from autotune.cli.lines import print_line
from autotune.cli.server import NeededServerOption, open_client


def cancel(
    searches: Annotated[
        list[int],
        typer.Argument(metavar="SEARCH", help="Numbers of searches; see autotune queue."),
    ],
    server: NeededServerOption = None,
) -> None:
    """Cancel searches of a server; their finished trials are kept.

    One in the queue ends at once, one that runs within seconds, once its trial was ended.
    """
    with open_client(server) as client:
        for number in dict.fromkeys(searches):
            search = client.cancel(number)
            if search.has_ended:
                print_line(f"Search {number} is {search.state}.")
            else:
                print_line(f"Search {number} is being cancelled.")
