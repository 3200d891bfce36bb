"""The result that Python gets of a study: its records, and what commands do with them as methods.

A `Result` is the `StudyResult` of `spec`, so programs read the same fields. It also knows where the
study is stored and by which preferences its pick was chosen, and each method uses both.
"""

# ruff: noqa: PLC0415
# `import autotune` loads this module, and training scripts do that: the methods import the
# database, plotly and pandas when they are called.

import dataclasses
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from autotune.analysis.pick import DEFAULT_PREFERENCES, Preferences, chosen_trial
from autotune.errors import InvalidInput
from autotune.printable import printable
from autotune.spec.prediction import Prediction
from autotune.spec.result import StudyResult
from autotune.spec.study import DEFAULT_STORAGE, RESULTS_FOLDER
from autotune.study.notebook import status_line

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects as go

    from autotune.analysis.explanation import Explanation
    from autotune.exporters.into.written import WrittenInto
    from autotune.exporters.written import WrittenExport
    from autotune.reporting.figures import FigureOptions
    from autotune.reporting.study_view import StudyView


@dataclass(frozen=True, kw_only=True, repr=False)
class Result(StudyResult):
    """A study's settings, records, Pareto front and pick; in a notebook it shows them."""

    preferences: Preferences = DEFAULT_PREFERENCES
    """What the front and the pick were chosen by."""
    _url: str = field(default=DEFAULT_STORAGE, repr=False, compare=False)
    """`storage` with the password, which `storage` leaves out."""

    @classmethod
    def of(cls, result: StudyResult, *, url: str, preferences: Preferences) -> "Result":
        """Returns the result with the URL of its database and the preferences of its pick."""
        fields = {each.name: getattr(result, each.name) for each in dataclasses.fields(StudyResult)}
        return cls(**fields, preferences=preferences, _url=url)

    def __repr__(self) -> str:
        from autotune.reporting.outcomes import outcome_counts
        from autotune.reporting.trial_text import answer_of

        return printable(f"<study {self.study}, {outcome_counts(self.trials)}. {answer_of(self)}>")

    def _repr_html_(self) -> str:
        """Returns what a notebook shows: the pick with its reason, the front and the trials."""
        from autotune.reporting.result_html import result_html

        return result_html(self)

    def view(self) -> "StudyView":
        """Returns this result with the study's definition and predictions. Raises UnknownStudy."""
        from autotune.storage.store import StudyStore
        from autotune.study.records import view_of

        with closing(StudyStore(self._url)) as store:
            return dataclasses.replace(view_of(store, self.study, self.preferences), result=self)

    def plot(
        self,
        kind: str = "pareto",
        *,
        x: str | None = None,
        y: str | None = None,
        three_d: bool = False,
        feasible: bool = False,
        trials: Sequence[int] | None = None,
        trial: int | None = None,
    ) -> "go.Figure":
        """Returns a figure of the study, as a plotly figure, which a notebook shows.

        The kinds are those of `autotune plot`: pareto, parallel, importance, ladder, memory,
        timeline, roofline, history and predicted. `x`, `y` and `three_d` are for pareto, `feasible`
        for parallel, `trials` for memory and `trial` for timeline. Raises InvalidInput.
        """
        from autotune.reporting.figures import FigureOptions, check_options, figure_kind
        from autotune.reporting.image import DEFAULT_HEIGHT, DEFAULT_WIDTH
        from autotune.reporting.style import with_heading

        if isinstance(trials, int):
            raise InvalidInput(
                f"trials = {trials} is no list of trial numbers", hint=f"write trials=[{trials}]"
            )
        options = FigureOptions(
            x=x,  # type: ignore[arg-type]  # FigureOptions rejects unknown names
            y=y,  # type: ignore[arg-type]
            three_d=three_d,
            feasible=feasible,
            trials=None if trials is None else tuple(trials),
            trial=trial,
        )
        check_options(kind, options)
        drawing = self.figure(kind, options)
        title = f"{self.study}: {figure_kind(kind).title}"
        height = drawing.layout.height or DEFAULT_HEIGHT
        return with_heading(drawing, title, width=DEFAULT_WIDTH, height=height)

    def figure(self, kind: str, options: "FigureOptions") -> "go.Figure":
        """Returns a figure of the study without a heading. Raises InvalidInput."""
        return draw(self.view(), kind, options)

    def report(self) -> str | bytes:
        """Returns the study as one HTML page that opens offline."""
        from autotune import __version__
        from autotune.reporting.report import contents
        from autotune.reporting.report.page import page

        return page(
            contents.compute(self.view(), version=__version__, preferences=self.preferences)
        )

    def write_report(self, path: str | Path | None = None) -> Path:
        """Write the study as one HTML page that opens offline, and return its file.

        By default that is `studies/STUDY-report.html`. Raises InvalidInput for another suffix than
        .html, and StorageUnavailable for a file that cannot be written.
        """
        from autotune.reporting.output_file import write_file

        file = report_file(self.study, path)
        write_file(file, self.report())
        return file

    def export(
        self,
        to: str,
        *,
        trial: int | None = None,
        out: str | Path | None = None,
        target_version: str | None = None,
        strict: bool = False,
        overwrite: bool = False,
    ) -> "WrittenExport":
        """Write a trial's configuration, by default the pick's, for another trainer.

        `to` is a target of `autotune export`, such as "pytorch" or "transformers". Returns the
        files, the command to use them, and what the trainer cannot express; with `strict` that is
        an error. With `overwrite`, other files in the folder `out` are replaced. Raises
        InvalidInput, IllegalConfiguration and StorageUnavailable.
        """
        from autotune.exporters.written import version_of, write_export

        version_of(to, target_version)
        return write_export(
            self,
            chosen_trial(self, trial),
            to,
            folder=None if out is None else Path(out),
            target_version=target_version,
            strict=strict,
            overwrite=overwrite,
        )

    def export_into(
        self,
        file: str | Path,
        *,
        trial: int | None = None,
        out: str | Path | None = None,
        in_place: bool = False,
        strict: bool = False,
        overwrite: bool = False,
    ) -> "WrittenInto":
        """Write a trial's configuration, by default the pick's, into a trainer's own file.

        `file` is a file that `--from` takes, such as axolotl's YAML. The keys that the trial
        changes are changed in a copy, `sft.autotune.yaml` beside `sft.yaml` or `out`, and all else
        stays as it is. With `in_place` the file itself is changed, and a copy of the original kept.
        With `overwrite`, another file of the copy's name is replaced; with `strict`, what the file
        cannot express is an error. Returns the difference and what each change brings. Raises
        InvalidInput, IllegalConfiguration and StorageUnavailable.
        """
        from autotune.exporters.into.written import write_into

        return write_into(
            self,
            chosen_trial(self, trial),
            file,
            out=out,
            in_place=in_place,
            strict=strict,
            overwrite=overwrite,
        )

    def explain(
        self, trial: int | None = None, *, torch_version: str | None = None
    ) -> "Explanation":
        """Explain the memory peak of a trial, by default of the pick: why, and what would save.

        Takes a minute of predictions on fake tensors. Raises InvalidInput for an unknown trial, and
        PredictionImpossible.
        """
        from autotune.execution.local import LocalExecutor
        from autotune.study.explain.question import question_of_trial

        number = chosen_trial(self, trial).number
        with (
            status_line("predicting") as say,
            TemporaryDirectory() as folder,
            LocalExecutor(Path(folder)) as executor,
        ):
            question = question_of_trial(
                executor, self.study, number, storage=self._url, torch_version=torch_version
            )
            return question.explain(
                progress=lambda made, wanted: say(f"{made} of {wanted} predictions")
            )

    def to_pandas(self) -> "pandas.DataFrame":
        """Returns one row per trial, indexed by its number, with the columns of `show --csv`.

        What was not measured is missing (NaN or None).
        """
        import pandas

        from autotune.reporting.plain_tables import CSV_COLUMNS, trial_rows

        frame = pandas.DataFrame(trial_rows(self), columns=list(CSV_COLUMNS))
        return frame.set_index("number")


def report_file(study: str, path: str | Path | None) -> Path:
    """Returns the file of a report. Raises InvalidInput and StorageUnavailable."""
    from autotune.reporting.output_file import check_writable

    file = RESULTS_FOLDER / f"{study}-report.html" if path is None else Path(path)
    if file.suffix.lower() not in (".html", ".htm"):
        raise InvalidInput(
            f"a report is an HTML page, and cannot be written as {str(file)!r}",
            hint="end the file's name in .html",
        )
    check_writable(file)
    return file


def draw(view: "StudyView", kind: str, options: "FigureOptions") -> "go.Figure":
    """Draw a figure of a study; what a timeline or roofline lacks is predicted, in seconds."""
    from autotune.reporting.figures import figure_kind

    figure = figure_kind(kind)
    if "predictions" in figure.takes:
        options = dataclasses.replace(options, predictions=_predictions_of_roofline(view))
    if "prediction" in figure.takes:
        options = dataclasses.replace(options, prediction=_timeline_of(view, options.trial))
    return figure.draw(view, options)


def _predictions_of_roofline(view: "StudyView") -> dict[str, Prediction]:
    """Predict those of the trials that matter which the search needed no prediction of."""
    from autotune.execution.local import LocalExecutor
    from autotune.reporting.figures.roofline import trials_shown
    from autotune.study.opening.trusted_code import check_trusted
    from autotune.study.prediction.predictions import Forecaster

    result = view.result
    unpredicted = [
        record.config
        for record in trials_shown(view)
        if record.model_flops_utilization is not None and not view.prediction_of(record.config)
    ]
    if not unpredicted:
        return {}
    workload = view.definition.workload
    check_trusted(workload, study=result.study, storage=result.storage, folder=result.folder)
    with TemporaryDirectory() as folder, LocalExecutor(Path(folder)) as executor:
        forecaster = Forecaster.of_device(
            view.definition.device, executor=executor, workload=workload
        )
        forecasts = forecaster.forecast_all(unpredicted)
    return {
        forecast.config.fingerprint: forecast.prediction
        for forecast in forecasts
        if forecast.prediction is not None
    }


def _timeline_of(view: "StudyView", number: int | None) -> Prediction:
    """Predict one trial again: stored predictions have no timeline."""
    from autotune.execution.local import LocalExecutor
    from autotune.reporting.figures.memory_timeline import trial_shown
    from autotune.study.opening.trusted_code import check_trusted
    from autotune.study.prediction.predictions import Forecaster

    record = trial_shown(view, number)
    workload = view.definition.workload
    if workload.script is not None:
        raise InvalidInput(
            f"study {view.result.study!r} runs a script, whose steps cannot be predicted",
            hint=f"autotune plot {view.result.study} memory shows what was measured",
        )
    result = view.result
    check_trusted(workload, study=result.study, storage=result.storage, folder=result.folder)
    with TemporaryDirectory() as folder, LocalExecutor(Path(folder)) as executor:
        forecaster = Forecaster.of_device(
            view.definition.device, executor=executor, workload=workload
        )
        return forecaster.predict(record.config, with_timeline=True)
