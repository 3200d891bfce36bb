"""Runs a user's training script in turn with other trainings: it waits in `autotune.report`.

The script builds and warms up, then each report that ends a turn waits for the next one. Memory is
not measured: others are on the device.
"""

import torch

from autotune.memory.device_meter import make_meter
from autotune.spec.result import Measurement
from autotune.spec.training_request import ReportsStage, TrainingRequest, unwatched
from autotune.training.script.interface import begin
from autotune.training.script.run import prepare_process, run_script
from autotune.training.script.timed_run import Step, TimedRun
from autotune.training.turns import Turns


def train_script_in_turn(
    request: TrainingRequest, *, turns: Turns, progress: ReportsStage = unwatched
) -> Measurement:
    """Runs the script while `turns` lets it, which gets the time of its steps.

    Returns only the outcome. Raises Diverged and whatever the script raises.
    """
    device = prepare_process(request)
    run = _ScriptInTurn(request, device, turns=turns, progress=progress)
    begin(run)
    was_ended = run_script(request.workload, expected_sha256=request.workload.model_sha256)
    if not was_ended and not run.has_timed:
        return run.measurement_of_early_end()
    return Measurement(outcome="ok")


class _ScriptInTurn(TimedRun):
    """Times the steps of the script in turns, without those in which it has evaluated."""

    def __init__(
        self,
        request: TrainingRequest,
        device: torch.device,
        *,
        turns: Turns,
        progress: ReportsStage,
    ) -> None:
        self._meter = make_meter(  # limits the allocator; before anything touches the device
            device,
            uuid=request.device_uuid,
            cap_bytes=request.cap_bytes if request.enforce_cap else None,
            new_context_bytes=request.new_context_bytes,
            shares_device=request.shares_device,
        )
        super().__init__(request, progress=progress)
        self._turns = turns
        self._warmup: list[Step] = []
        self._turn: list[Step] = []
        """Steps of this turn that the device has finished."""
        self._steps_of_turn = 0
        """How many steps the turn has; 0 during the warm-up."""
        self.has_timed = False
        """Whether a turn has ended."""

    def _step_ended(self) -> None:
        if self._steps_of_turn == 0:
            self._warm_up()
            return
        is_last = self._reports == self.workload.steps
        missing = self._steps_of_turn - len(self._turn) - len(self._unfinished)
        for step in self._finished_steps(may_run_ahead=missing > 0 and not is_last):
            if self._counts(step):
                self._turn.append(step)
        if len(self._turn) == self._steps_of_turn:
            self.has_timed = True
            self._steps_of_turn = self._turns.next(
                seconds=sum(step.seconds for step in self._turn),
                tokens=sum(step.tokens for step in self._turn),
            )
            self._turn.clear()
        if is_last or self._steps_of_turn == 0:
            self._end()

    def _warm_up(self) -> None:
        self._warmup += self._finished_steps(may_run_ahead=False)
        if self._reports == 1:
            self._meter.kernels_have_run()
        if self._reports == self.workload.warmup_steps:
            self._steps_of_turn = self._turns.begin(step_seconds=self._warmup[-1].seconds)
            if self._steps_of_turn == 0:
                self._end()

    def _counts(self, step: Step) -> bool:
        """Returns whether a step is timed: one with an evaluation only if every step has one."""
        always_evaluates = all(step.evaluation_loss is not None for step in self._warmup)
        return step.evaluation_loss is None or always_evaluates
