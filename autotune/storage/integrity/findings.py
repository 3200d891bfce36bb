"""What a look at a studies database has found."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing, where it is, and what to do about it."""

    where: str
    """`the database`, `study 'x'`, `study 'x', trial 3`."""
    what: str
    to_do: str
    is_fault: bool = True
    """False: good to know, and no result is wrong or in danger."""


@dataclass(frozen=True, kw_only=True)
class RunningTrial:
    """An attempt that nobody has ended."""

    study: str
    number: int
    worker: str
    is_expired: bool
    """By the database's clock."""


@dataclass(frozen=True, kw_only=True)
class Checked:
    studies: tuple[str, ...]
    trials: int
    findings: tuple[Finding, ...]
    running: tuple[RunningTrial, ...]

    @property
    def faults(self) -> int:
        return sum(finding.is_fault for finding in self.findings)
