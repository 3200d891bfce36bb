"""What a check of a studies database returns."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One fault or remark, where it is, and what to do about it."""

    where: str
    """`the database`, `study 'x'`, `study 'x', trial 3`."""
    what: str
    to_do: str
    is_fault: bool = True
    """False for a remark: no result is wrong or in danger."""


@dataclass(frozen=True, kw_only=True)
class RunningTrial:
    """An attempt that has not ended, as of the database."""

    study: str
    number: int
    worker: str
    is_expired: bool
    """Whether its lease is over, by the database's clock."""


@dataclass(frozen=True, kw_only=True)
class Checked:
    """The result of a check: what was read, and what was found."""

    studies: tuple[str, ...]
    trials: int
    """The number of trials of all `studies`."""
    findings: tuple[Finding, ...]
    running: tuple[RunningTrial, ...]

    @property
    def faults(self) -> int:
        """The number of findings that are faults."""
        return sum(finding.is_fault for finding in self.findings)
