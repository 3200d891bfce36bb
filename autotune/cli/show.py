"""`autotune show`: everything known of one study."""

import json

from autotune.cli import options


def show(
    study: options.StudyArgument,
    tolerance: options.ToleranceOption = None,
    prefer: options.PreferOption = options.PREFER,
    max_perplexity_increase: options.PerplexityOption = options.PERPLEXITY_INCREASE,
    storage: options.StorageOption = options.STORAGE,
    as_json: options.JsonOption = False,
) -> None:
    """Print every trial of a study, its front and the pick."""
    import autotune
    from autotune.cli.tables import make_console, outcome_counts, print_pick, trials_table

    preferences = options.preferences_of(tolerance, prefer, max_perplexity_increase)
    result = autotune.show(study, storage=storage, preferences=preferences)
    if as_json:
        print(json.dumps(result.to_dict(), indent=2, allow_nan=False))
        return
    console = make_console()
    title = f"Study {study}: {outcome_counts(result.trials)}"
    console.print(trials_table(result, result.trials, title=title, with_predictions=True))
    console.print()
    print_pick(result, console)
