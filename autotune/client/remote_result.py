"""The result of a study on a server: its figures, its report and its exports come from there."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.analysis.pick import Preferences
from autotune.errors import InvalidInput
from autotune.result import Result, report_file
from autotune.spec.result import StudyResult

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from autotune.analysis.explanation import Explanation
    from autotune.client.client import Client
    from autotune.exporters.written import WrittenExport
    from autotune.reporting.study_view import StudyView


@dataclass(frozen=True, kw_only=True, repr=False)
class RemoteResult(Result):
    """A study's settings, records, Pareto front and pick, read from a server."""

    _client: Any = field(default=None, repr=False, compare=False)

    @classmethod
    def read(
        cls, result: StudyResult, *, client: "Client", preferences: Preferences
    ) -> "RemoteResult":
        """Returns the result with the client that its methods ask."""
        known = {each.name: getattr(result, each.name) for each in fields(StudyResult)}
        return cls(**known, preferences=preferences, _url=result.storage, _client=client)

    def view(self) -> "StudyView":
        """Raise InvalidInput: the definition of the study stays on the server."""
        raise InvalidInput(
            f"the database of study {self.study!r} is that of the server",
            hint="plot, write_report and export ask the server; autotune studies export, on the "
            "server, writes the whole study to a file",
        )

    def explain(
        self, trial: int | None = None, *, torch_version: str | None = None
    ) -> "Explanation":
        """Raise InvalidInput: an explanation needs the definition of the study."""
        raise InvalidInput(
            f"study {self.study!r} is explained where it is stored",
            hint=f"run autotune explain {self.study} on the server",
        )

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
        """Returns a figure of the study, which the server draws. Raises InvalidInput."""
        client: Client = self._client
        return client.figure(
            self.study,
            kind,
            x=x,
            y=y,
            three_d=three_d,
            feasible=feasible,
            trials=trials,
            trial=trial,
            preferences=self.preferences,
        )

    def write_report(self, path: str | Path | None = None) -> Path:
        """Write the page of the server's report, and return its file.

        Raises InvalidInput and StorageUnavailable.
        """
        from autotune.reporting.output_file import write_file  # noqa: PLC0415  # as in `Result`

        file = report_file(self.study, path)
        client: Client = self._client
        write_file(file, client.report(self.study, preferences=self.preferences))
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
        """Write a trial's configuration, by default the pick's, with the files of the server."""
        client: Client = self._client
        return client.export(
            self.study,
            to,
            trial=trial,
            out=out,
            target_version=target_version,
            strict=strict,
            overwrite=overwrite,
            preferences=self.preferences,
        )
