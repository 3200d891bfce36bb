"""A study's result as HTML for the output of a notebook's cell: the pick, the front, the trials."""

from collections.abc import Sequence

from autotune.reporting.columns import StudyOfTrials, front_records, front_title, trial_table
from autotune.reporting.outcomes import outcome_counts
from autotune.reporting.rendering import templates
from autotune.reporting.trial_text import about, answer_of, perplexity_notes
from autotune.spec.result import StudyResult, TrialRecord
from autotune.units import format_size

MOST_ROWS = 200
"""A table of more trials makes a notebook slow; `show` and `to_pandas` have all of them."""


def result_html(result: StudyResult) -> str:
    """Returns the pick with its reason, the front and all trials."""
    front, trials = front_records(result), result.trials[:MOST_ROWS]
    title = "All trials"
    if len(trials) < len(result.trials):
        title = f"The first {len(trials)} of {len(result.trials):,} trials"
    has_others = any(record not in front for record in result.trials)
    return (
        templates()
        .get_template("result.html")
        .render(
            result=result,
            about=about(result),
            cap=format_size(result.cap_bytes),
            outcomes=outcome_counts(result.trials),
            answer=answer_of(result),
            front_title=front_title(result),
            front=trial_table(result, front, with_before_training=True),
            title=title,
            others=trial_table(result, trials, with_before_training=True) if has_others else None,
            notes=perplexity_notes(result.trials),
        )
    )


def trials_html(study: StudyOfTrials, records: Sequence[TrialRecord]) -> str:
    """Returns the table of some trials."""
    piece = templates().from_string('{% from "trials.html" import alone %}{{ alone(shown) }}')
    return piece.render(shown=trial_table(study, records))
