"""`autotune plot`: a study's Pareto front as one HTML file."""

from pathlib import Path
from typing import Annotated

import typer

from autotune.cli import options
from autotune.errors import StorageUnavailable


def plot(
    study: options.StudyArgument,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="[default: studies/STUDY.html]")
    ] = None,
    tolerance: options.ToleranceOption = None,
    prefer: options.PreferOption = options.PREFER,
    max_perplexity_increase: options.PerplexityOption = options.PERPLEXITY_INCREASE,
    storage: options.StorageOption = options.STORAGE,
) -> None:
    """Draw memory against speed with the cap, the front and the pick; one file that opens offline."""
    import autotune
    from autotune.definition import RESULTS_FOLDER
    from autotune.reporting import pareto

    preferences = options.preferences_of(tolerance, prefer, max_perplexity_increase)
    result = autotune.show(study, storage=storage, preferences=preferences)
    page = pareto.page(pareto.compute(result))
    file = out or RESULTS_FOLDER / f"{study}.html"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(page, encoding="utf-8")
    except OSError as error:
        raise StorageUnavailable(
            f"{file} cannot be written: {error.strerror or error}", hint="name another file with --out"
        ) from None
    print(file)
