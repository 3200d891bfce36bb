"""The request that hands a search to a server."""

from dataclasses import dataclass
from typing import Annotated

from autotune.spec.queued_search import MOST_PRIORITY
from autotune.spec.setting import EVERYDAY, THE_SEARCH, setting, whole_number
from autotune.spec.study import DEFAULT_STORAGE
from autotune.study.request import SearchRequest


@dataclass(frozen=True, kw_only=True)
class Submission(SearchRequest):
    """A search for the queue of a server, which decides some of its settings itself."""

    storage: str = setting(
        DEFAULT_STORAGE,
        "URL of the studies database.",
        is_typed=False,
        over_http="the server has its own database",
    )
    space_content: str | None = setting(
        None,
        "A search space of your own, as TOML, instead of a named one; `space` is then its name.",
        group=THE_SEARCH,
        is_typed=False,
        over_http=True,
    )
    priority: Annotated[int, whole_number(-MOST_PRIORITY, MOST_PRIORITY)] = setting(
        0,
        f"From -{MOST_PRIORITY} to {MOST_PRIORITY}. The search with the highest begins first.",
        group=EVERYDAY,
        metavar="N",
        over_http=True,
    )
    group: str | None = setting(
        None,
        "Group of devices of the server to run on. [default: the one that is free first]",
        group=EVERYDAY,
        metavar="NAME",
        over_http=True,
    )
