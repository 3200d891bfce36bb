"""Which trials can be profiled: those of a training of autotune's own that had a steady step."""

from autotune.errors import InvalidInput
from autotune.reporting.outcomes import OUTCOME_LABELS
from autotune.spec.result import TrialRecord
from autotune.spec.workload import Workload


def check_can_be_profiled(record: TrialRecord, *, study: str, workload: Workload) -> None:
    """Raise InvalidInput for a trial of a script or of DeepSpeed, or one that was never trained."""
    if workload.script is not None:
        raise InvalidInput(
            f"study {study!r} trains the script {workload.script}, whose steps cannot be profiled "
            "from outside",
            hint="use torch.profiler in the script, with the settings of autotune show",
        )
    if record.config.engine == "deepspeed":
        raise InvalidInput(
            f"trial {record.number} is trained by DeepSpeed, which has a profiler of its own",
            hint="see flops_profiler in DeepSpeed's documentation",
        )
    if record.peak_memory_bytes is None:
        label = OUTCOME_LABELS[record.outcome] if record.is_finished else "it has not ended yet"
        raise InvalidInput(
            f"trial {record.number} of study {study!r} cannot be profiled, because it never came "
            f"to a steady step: {label}",
            hint=f"choose one with a measured peak, see autotune show {study}",
        )
