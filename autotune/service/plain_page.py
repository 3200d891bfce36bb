"""A small page of its own: a sentence, or the form that asks for the token."""

from typing import TYPE_CHECKING

from autotune.service.pages.contexts import sentence as as_sentence
from autotune.service.pages.rendering import page_text

if TYPE_CHECKING:
    from autotune.service.state import Caller


def plain_page(
    *,
    title: str,
    sentence: str,
    hint: str = "",
    root: str = "",
    caller: "Caller | None" = None,
    goes_on_to: str = "",
) -> str:
    """Returns a page with a sentence on what is wrong and a link home, to the path `root`.

    It leads to the path `goes_on_to` by itself, if that is not empty.
    """
    return page_text(
        "plain.html",
        root=root,
        caller=caller,
        here="",
        title=title,
        sentence=as_sentence(sentence),
        hint=as_sentence(hint),
        asks_for_token=False,
        refresh=f"0;url={root}{goes_on_to}" if goes_on_to else "",
    )


def sign_in_page(*, sentence: str, next_path: str, goes_on: bool = False, root: str = "") -> str:
    """Returns the page that asks for the token.

    With `goes_on` it loads again by itself: a browser that follows a link of another site leaves
    the cookie out (SameSite=Strict), and sends it when this page repeats the request.
    """
    return page_text(
        "plain.html",
        root=root,
        caller=None,
        here="",
        title="Sign in",
        sentence=as_sentence(sentence),
        hint="It is in the URL that autotune serve has printed, or in AUTOTUNE_TOKEN.",
        asks_for_token=True,
        next_path=next_path,
        refresh="0" if goes_on else "",
    )
