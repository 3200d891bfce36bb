"""The request that hands a search to a server."""

from dataclasses import dataclass
from typing import Annotated, Any

from autotune.errors import InvalidInput
from autotune.spec.queued_search import MOST_PRIORITY
from autotune.spec.setting import EVERYDAY, THE_SEARCH, Format, setting, whole_number
from autotune.spec.study import DEFAULT_STORAGE
from autotune.study.request import SearchRequest

_LONGEST_KIND = 100


def _read_kind(given: Any) -> Any:
    if not isinstance(given, str):
        return given
    is_named = any(map(str.isalnum, given))
    if not is_named or not given.isprintable() or len(given) > _LONGEST_KIND:
        raise InvalidInput(
            f"{given!r:.120}", hint="give cpu, cuda, or words of a card's name, such as H100"
        )
    return given.strip()


_KIND = Format(wanted="a kind of device", read=_read_kind)


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
    kind: Annotated[str, _KIND] | None = setting(
        None,
        "Kind of device to run on: cpu, cuda, or words of a card's name, such as H100. A study "
        "that has begun goes on where its devices are. [default: any]",
        group=EVERYDAY,
        metavar="KIND",
        over_http=True,
    )
