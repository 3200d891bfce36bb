"""The figures on the page of a study: what each is called and what to look for.

Importing this is cheap: plotly is imported by `figures.py`, which draws them.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class FigureCard:
    """A figure of the page and the texts around it."""

    id: str
    """The kind of the figure."""
    title: str
    short_title: str
    """Title in the list of sections."""
    lead: str = ""
    """What to look for in the figure."""
    alternative: str = ""
    """Description for readers who cannot see the figure, where it is not drawn yet."""
    height: int = 540
    """Pixels that are kept free for it."""
    has_table: bool = True


CARDS = (
    FigureCard(
        id="pareto",
        title="The front",
        short_title="Front",
        alternative="Memory against speed of all trials, with the cap. The table below has the "
        "numbers of the front.",
        has_table=False,
    ),
    FigureCard(
        id="ladder",
        title="What each technique gains",
        short_title="Techniques",
        lead="Bars to the right of zero are better: less memory, higher speed, lower perplexity.",
        alternative="Bars for each value of a technique: how it changes memory, speed and "
        "perplexity. “The same as a table” below it has the numbers.",
        height=560,
    ),
    FigureCard(
        id="memory",
        title="What holds the memory at the peak",
        short_title="Memory",
        lead="The baseline, the pick and the front. To save more memory, reduce the longest "
        "segments of the pick.",
        alternative="Stacked bars of the memory at the peak of the baseline, the pick and the "
        "front, by category. “The same as a table” below it has the numbers.",
        height=520,
    ),
    FigureCard(
        id="history",
        title="How the search went",
        short_title="History",
        lead="The best values so far, and the hypervolume: the share of a box up to the cap that "
        "the front dominates. Where it no longer grows, more trials would help little.",
        alternative="Lines of the best memory, speed and perplexity so far, and of the "
        "hypervolume, over the trials and over time.",
        height=620,
        has_table=False,
    ),
    FigureCard(
        id="roofline",
        title="How far from what the device can do",
        short_title="Roofline",
        lead="Up is better. Near the slanted line a trial needs fewer bytes, by fusion or fewer "
        "bits; near a level line, fewer FLOPs or another number format.",
    ),
    FigureCard(
        id="predicted-speed",
        title="Predicted and measured speed",
        short_title="Predicted speed",
        lead="Above the line a trial is faster than its FLOPs, bytes and operators take at the "
        "rates that were probed; below it something else takes time.",
    ),
)

CARDS_ON_SERVER = tuple(card for card in CARDS if card.alternative)
"""Those of a server's page, which does not know what it will draw, and has no words for others."""


def sections(cards: Sequence[FigureCard]) -> list[tuple[str, str]]:
    """Returns (id, title) of the sections of the page, in order."""
    figures = [(card.id, card.short_title) for card in cards if card.id != "pareto"]
    return [
        ("answer", "Answer"),
        ("front", "Front"),
        *figures,
        ("trials", "All trials"),
        ("left-out", "Excluded"),
        ("study", "Study"),
        ("repeat", "Repeat"),
    ]
