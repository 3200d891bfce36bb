"""Rows put into prompts for a trainer that cannot do it: a script that writes a file of them.

What it writes has a form that every trainer reads: prompt and completion, or messages.
"""

import dataclasses
from dataclasses import dataclass, field

from autotune.exporters.bundle import code, joined, shipped
from autotune.exporters.recipe import Recipe, in_docstring
from autotune.exporters.transformers.training_script import loading
from autotune.spec.prompt_format import named

FILE = "fill_prompts.py"
ROWS = "filled_rows.jsonl"


@dataclass(frozen=True, kw_only=True)
class FilledRows:
    """What an export of such rows has in addition."""

    recipe: Recipe
    """With the file of rows as its dataset, if rows have to be written."""
    files: dict[str, str] = field(default_factory=dict)
    before_use: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def fill_rows(recipe: Recipe, title: str, *, is_expressed: bool) -> FilledRows:
    """Returns the recipe as it is, or where rows have to be written first, that of their file.

    `is_expressed`: the trainer called `title` puts rows into the workload's prompts itself.
    """
    workload, format = recipe.workload, recipe.workload.prompts
    if format is None or is_expressed:
        return FilledRows(recipe=recipe)
    rows = dataclasses.replace(
        workload,
        dataset=ROWS,
        dataset_config=None,
        dataset_split="train",
        held_out_split=None,
        chat_column="messages" if format.makes_messages else None,
        prompt_format=None
        if format.makes_messages
        else {**named("prompt-completion").to_dict(), "learned": format.learned},
    )
    notes = []
    if format.makes_messages and format.learned != "answers":
        learned = (
            "the last answer alone" if format.learned == "last" else "all of each conversation"
        )
        notes.append(f"the trial learned {learned}, and these files learn every answer")
    return FilledRows(
        recipe=dataclasses.replace(recipe, workload=rows),
        files={FILE: _script(recipe)},
        before_use=(
            f"run python {FILE} once: it writes {ROWS}, the rows put into the trial's prompts, "
            f"which {title} cannot do by its keys",
        ),
        notes=tuple(notes),
    )


def _script(recipe: Recipe) -> str:
    workload = recipe.workload
    text = joined(
        [
            code(
                "from datasets import load_dataset\nfrom typing import Any\n\n"
                f"PROMPT_FORMAT: dict[str, Any] = {workload.prompt_format!r}"
            ),
            shipped("script.filled_rows"),
            code(f'if __name__ == "__main__":\n    write_rows({loading(workload)}, "{ROWS}")'),
        ]
    )
    return f'"""Puts rows into prompts as {in_docstring(recipe.origin)} did."""\n\n{text}'
