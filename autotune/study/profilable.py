"""Which trials can be profiled: those of a training of autotune's own that had a steady step."""

from autotune.errors import InvalidInput
from autotune.reporting.outcomes import OUTCOME_LABELS
from autotune.spec.result import TrialRecord
from autotune.spec.workload import Workload


def check_can_be_profiled(record: TrialRecord, *, study: str, workload: Workload) -> None:
    """Raise InvalidInput for a trial of a script, of DeepSpeed, or on several nodes.

    Also for one that was never trained.
    """
    if workload.script is not None:
        raise InvalidInput(
            f"study {study!r} trains the script {workload.script}, whose steps cannot be profiled "
            "from outside",
            hint="use torch.profiler in the script, with the settings of autotune show",
        )
    if workload.nodes_per_trial > 1:
        devices = workload.devices_per_trial // workload.nodes_per_trial
        raise InvalidInput(
            f"trials of study {study!r} ran on {workload.nodes_per_trial} nodes together, and a "
            "profile runs on this machine alone",
            hint=f"search with the same settings on one node, --devices-per-trial {devices} "
            f"--nodes-per-trial 1 --name {study[:80]}-one-node, and profile a trial of that",
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
