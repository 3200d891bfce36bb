"""What the numbers of a training are called: tokens and perplexity, or rows and loss.

A script whose model has no tokens, such as one of images or of tables, reports rows and its loss.
It is stored in the same fields: `tokens_per_second` counts rows then, and `perplexity` is
exp(loss).
"""

import math
from dataclasses import dataclass
from typing import Literal

from autotune.units import format_decimal

Counted = Literal["tokens", "rows"]


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The words for speed and quality, and the form of the latter."""

    counted: Counted
    quality: Literal["perplexity", "loss"]
    short_quality: str

    @property
    def speed(self) -> str:
        return f"{self.counted}/s"

    @property
    def speed_in_words(self) -> str:
        return f"{self.counted} per second"

    def worded(self, text: str) -> str:
        """Returns a text about tokens and perplexity, of ours, in these words."""
        if self.counted == "rows":
            for word, instead in _WORDS_OF_ROWS:
                text = text.replace(word, instead)
        return text

    def value(self, perplexity: float) -> float:
        """Returns the perplexity, or the loss that it is the exponential of."""
        return perplexity if self.quality == "perplexity" else math.log(perplexity)

    def spread(self, spread: float | None, *, at: float) -> float | None:
        """Returns the spread of the value, given that of the perplexity `at`."""
        # d ln(x) = dx / x
        return spread if spread is None or self.quality == "perplexity" else spread / at

    def text(self, perplexity: float, *, digits: int = 2) -> str:
        """Returns the value as text; a loss has two digits more, as it differs less."""
        return self._form(self.value(perplexity), digits=digits)

    def with_spread(self, perplexity: float, spread: float | None, *, digits: int = 2) -> str:
        """Returns `23.91 ±0.05`, or without a spread the value alone."""
        text = self.text(perplexity, digits=digits)
        known = self.spread(spread, at=perplexity)
        return text if known is None else f"{text} ±{self._form(known, digits=digits)}"

    def change(self, ratio: float) -> str:
        """Returns `perplexity +1.20 %` for 1.012, or `loss +0.0119`; empty for no difference."""
        if self.quality == "perplexity":
            percent = round(100 * (ratio - 1), 2)
            return f"perplexity {percent:+.2f} %" if percent else ""
        difference = round(math.log(ratio), 4)
        return f"loss {difference:+.4f}" if difference else ""

    def share(self, share: float) -> str:
        """Returns how far a value may be above another: `1 %` for 0.01, or `0.01` for a loss."""
        if self.quality == "perplexity":
            return f"{100 * share:.2g} %"
        return f"{math.log1p(share):.2g}"

    def _form(self, value: float, *, digits: int) -> str:
        if self.quality == "perplexity":
            return format_decimal(value, digits=digits)
        return format_decimal(value, digits=max(digits, 4))


_WORDS_OF_ROWS = (
    ("perplexities", "losses"),
    ("perplexity", "loss"),
    ("Perplexity", "Loss"),
    ("tokens per second", "rows per second"),
    ("tokens/s", "rows/s"),
)

TOKENS = Terms(counted="tokens", quality="perplexity", short_quality="perpl.")
ROWS = Terms(counted="rows", quality="loss", short_quality="loss")
