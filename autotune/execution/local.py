"""Runs trials on a device of this machine, one at a time, each in its own process."""

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from autotune.errors import PreparationFailed
from autotune.execution.in_turn import TimedInTurn, TrainingInTurn, time_in_turn
from autotune.execution.server.client import SERVER_COMMAND, Doing, Reply
from autotune.execution.server.limits import time_limits
from autotune.execution.server_tasks import ServerTasks, prepared_folder, warn
from autotune.execution.trial_options import TrialOptions
from autotune.spec.attempt import FinishedTrial
from autotune.spec.config import TrainingConfig
from autotune.spec.early_stopping import PruningBound
from autotune.spec.parity import NoTrace, ParityTrace
from autotune.spec.prediction import Extrapolation
from autotune.spec.profile import Profile
from autotune.spec.reading import parse
from autotune.spec.result import Measurement
from autotune.spec.study import StudyDefinition
from autotune.spec.workload import Workload

_NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
"""Environment of a prediction, which needs no GPU: a context there would disturb a trial."""
_PREDICTION_SECONDS = 1800.0
"""Time limit of a prediction: building a model may hang, too."""


class LocalExecutor(ServerTasks):
    """Runs a study's trials through a trial server.

    Logs, prepared files and the compilers' cache are in `folder`. One that `only_predicts` has its
    server import the libraries of models and adapters, once for all predictions.
    """

    def __init__(
        self,
        folder: Path,
        *,
        should_stop: Callable[[], bool] = lambda: False,
        server_command: Sequence[str] = SERVER_COMMAND,
        note: Callable[[str], None] = warn,
        only_predicts: bool = False,
    ) -> None:
        super().__init__(folder, should_stop=should_stop, server_command=server_command, note=note)
        self._only_predicts = only_predicts
        self._replies: dict[Future[FinishedTrial], Future[Reply]] = {}

    @property
    def predictions_at_once(self) -> int:
        """How many predictions run at a time where many are wanted."""
        return os.cpu_count() or 1

    def submit_prediction(
        self,
        workload: Workload,
        config: TrainingConfig,
        *,
        device_type: str,
        compute_capability: str | None = None,
        torch_version: str | None = None,
        with_timeline: bool = False,
        extrapolates: Extrapolation = "nothing",
    ) -> Future[Reply]:
        """Predicts peak memory on fake tensors, without the device.

        The future's result is a Prediction as JSON, and its error PredictionImpossible.
        `compute_capability` is that of the GPU to predict for, such as 9.0; the process itself sees
        no GPU. `extrapolates` says which deep models may be predicted at shallower depths.
        """
        payload = {
            "workload": workload.to_dict(),
            "config": config.to_dict(),
            "device": device_type,
            "compute_capability": compute_capability,
            "torch_version": torch_version,
            "with_timeline": with_timeline,
            "extrapolates": extrapolates,
        }
        folder = self._folder / "predictions"
        log_file = folder / f"{config.fingerprint}.log"
        environment = {**self._caches.environment(folder), **_NO_GPU}
        return self._server.submit(
            "predict",
            payload,
            log_file=log_file,
            limits=time_limits(_PREDICTION_SECONDS),
            environment=environment,
            slots=self._held,
            cpus=self.cpus,
            modules=_libraries_of(workload, config) if self._only_predicts else (),
        )

    def submit(
        self,
        definition: StudyDefinition,
        config: TrainingConfig,
        *,
        study_folder: Path,
        log_name: str,
        enforce_cap: bool,
        trial_options: TrialOptions,
        workload: Workload | None = None,
        reference: ParityTrace | None = None,
        shares_perplexity: bool = False,
        evaluates_only: bool = False,
        pruning_bounds: Sequence[PruningBound] = (),
    ) -> Future[FinishedTrial]:
        """Trains `config` on the study's workload, or on `workload` where that is given.

        The training must begin as `reference` does. With `shares_perplexity`, only memory and speed
        are measured; with `evaluates_only`, only the perplexity before any step. The trial ends
        with the outcome `dominated` as soon as one of `pruning_bounds` is known to be better in
        both. The future's error is TrialLost where the machine ended the trial, which says nothing
        about its configuration.
        """
        snapshot_file = None
        if trial_options.memory_snapshot:
            snapshot_file = str((study_folder / "snapshots" / f"{log_name}.pickle").absolute())
        payload = {
            **self._training(
                definition,
                config,
                workload or definition.workload,
                study_folder,
                enforce_cap=enforce_cap,
            ),
            "is_baseline": config == definition.baseline_config() and not shares_perplexity,
            "reference": None if reference is None else reference.to_dict(),
            "shares_perplexity": shares_perplexity,
            "evaluates_only": evaluates_only,
            "pruning_bounds": [asdict(bound) for bound in pruning_bounds],
            "snapshot_file": snapshot_file,
        }
        reply = self._submit_training(
            "train",
            payload,
            definition,
            study_folder,
            log_name=log_name,
            trial_options=trial_options,
        )
        finished: Future[FinishedTrial] = Future()
        self._replies[finished] = reply
        devices = (workload or definition.workload).devices_per_trial
        reply.add_done_callback(lambda done: self._finish(done, finished, devices=devices))
        return finished

    def trace(
        self,
        definition: StudyDefinition,
        config: TrainingConfig,
        *,
        study_folder: Path,
        dropout: bool,
        dequantized: bool = False,
        trial_options: TrialOptions,
        workload: Workload | None = None,
    ) -> ParityTrace | NoTrace:
        """Returns the first steps of `config`, run without the cap, or why there are none.

        They are of the study's workload, or of `workload` where that is given. With `dequantized`
        its quantized base weights are what they stand for, in plain layers.
        Raises TrialLost, and Stopped where the search is stopped while waiting.
        """
        payload = {
            **self._training(
                definition,
                config,
                workload or definition.workload,
                study_folder,
                enforce_cap=False,
            ),
            "dropout": dropout,
            "dequantized": dequantized,
        }
        reply = self._submit_training(
            "trace",
            payload,
            definition,
            study_folder,
            log_name=f"trace-{config.fingerprint}",
            trial_options=trial_options,
        )
        result = self.wait_for(reply).result
        if result.get("trace") is None:
            return NoTrace(outcome=result["outcome"], message=result["failure"])
        return parse(ParityTrace, result["trace"])

    def profile(
        self,
        definition: StudyDefinition,
        config: TrainingConfig,
        *,
        study_folder: Path,
        folder: Path,
        steps: int,
        enforce_cap: bool,
        trial_options: TrialOptions,
    ) -> Profile:
        """Returns a profile of `steps` steps of a configuration; its files are in `folder`.

        This search must have a slot on the device. Raises PreparationFailed where the training
        fails, TrialLost, StorageUnavailable, and Stopped where the search is stopped meanwhile.
        """
        payload = {
            **self._training(
                definition,
                config,
                definition.workload,
                study_folder,
                enforce_cap=enforce_cap,
            ),
            "steps": steps,
            "profile_folder": str(folder.absolute()),
        }
        reply = self._submit_training(
            "profile",
            payload,
            definition,
            study_folder,
            log_name=f"profile-{config.fingerprint}",
            trial_options=trial_options,
        )
        result = self.wait_for(reply).result
        if result.get("profile") is None:
            raise PreparationFailed(
                f"the training that was to be profiled has failed: {result.get('failure')}",
                hint=f"see the log in {study_folder / 'logs'}",
            )
        return parse(Profile, result["profile"])

    def time_in_turn(
        self,
        definition: StudyDefinition,
        trainings: Sequence[TrainingInTurn],
        *,
        study_folder: Path,
        log_name: str,
        trial_options: TrialOptions,
        rounds: int,
        seed: int,
        on_progress: Callable[[int, int], None] = lambda done, wanted: None,
    ) -> TimedInTurn:
        """Times trainings in turn, as `execution/in_turn.py` says; the first is the partner.

        A model goes on with its text for as many rounds; a script has the steps that it has. This
        search must have a slot on the device. Raises TrialLost, Stopped, and StudyMismatch.
        """
        workload = definition.workload
        if workload.script is None:
            steps = max(workload.steps, workload.warmup_steps + rounds)
            workload = replace(workload, steps=steps)

        def start(number: int, address: str) -> Future[Reply]:
            training = trainings[number]
            payload = {
                **self._training(
                    definition,
                    training.config,
                    workload,
                    study_folder,
                    enforce_cap=training.enforce_cap,
                ),
                "turns": {"address": address},
            }
            return self._submit_training(
                "train_in_turn",
                payload,
                definition,
                study_folder,
                log_name=f"{log_name}-{number}",
                trial_options=trial_options,
            )

        count = definition.workload.devices_per_trial - 1
        others = self.other_devices[:count] or (definition.device,) * count
        return time_in_turn(
            trainings,
            workload=workload,
            devices=(definition.device, *others),
            rounds=rounds,
            seed=seed,
            trial_seconds=trial_options.trial_time_limit_seconds,
            start=start,
            cancel=self._server.cancel,
            should_stop=self._should_stop,
            on_progress=on_progress,
        )

    def _training(
        self,
        definition: StudyDefinition,
        config: TrainingConfig,
        workload: Workload,
        study_folder: Path,
        *,
        enforce_cap: bool,
    ) -> dict[str, Any]:
        return {
            "workload": workload.to_dict(),
            "config": config.to_dict(),
            "folder": str(
                (study_folder / prepared_folder(definition.workload, workload)).absolute()
            ),
            "device": definition.device.device,
            "device_uuid": definition.device.uuid if definition.device.is_known_to_nvml else None,
            "new_context_bytes": definition.device.context_bytes,
            "shares_device": self._shares_device,
            "cap_bytes": definition.cap_bytes,
            "enforce_cap": enforce_cap,
            "requested_at": time.monotonic(),
            "other_devices": [
                {
                    "device": other.device,
                    "device_uuid": other.uuid if other.is_known_to_nvml else None,
                }
                for other in self.other_devices[: workload.devices_per_trial - 1]
            ],
        }

    def _submit_training(
        self,
        task: str,
        payload: dict[str, Any],
        definition: StudyDefinition,
        study_folder: Path,
        *,
        log_name: str,
        trial_options: TrialOptions,
    ) -> Future[Reply]:
        return self._server.submit(
            task,
            payload,
            log_file=study_folder / "logs" / f"{log_name}.log",
            limits=trial_options.time_limits(),
            environment=self._caches.environment(study_folder),
            limit_host_memory=definition.device.type == "cpu",
            slots=self._held,
            cpus=self.cpus,
        )

    def wait_for_trial(self, future: Future[FinishedTrial]) -> FinishedTrial:
        """Waits for a trial and returns its result.

        Raises TrialLost, and Stopped where the search is stopped, which also ends the trial.
        """
        reply = self._replies.get(future)
        if reply is not None:
            self.wait_for(reply)
        return future.result()

    def doing(self, future: Future[FinishedTrial]) -> Doing:
        """Returns what the trial does: start, step, compile, parity or evaluation.

        Its phase is empty where it is not known, as before its process has reported anything.
        """
        reply = self._replies.get(future)
        return Doing() if reply is None else self._server.doing(reply)

    def cancel(self, future: Future[FinishedTrial]) -> None:
        """Ends the trial; within seconds its future has the outcome `interrupted`."""
        reply = self._replies.get(future)
        if reply:
            self._server.cancel(reply)

    def _finish(
        self, reply: Future[Reply], finished: Future[FinishedTrial], *, devices: int
    ) -> None:
        self._replies.pop(finished, None)
        try:
            result = reply.result()
            measured = dict(result.result)
            script_files = measured.pop("script_files", {})
            trial = FinishedTrial(
                measurement=replace(parse(Measurement, measured), devices=devices),
                seconds=result.seconds,
                script_files=script_files,
            )
        except Exception as error:  # whatever it is, the search waits for this future
            finished.set_exception(error)
        else:
            finished.set_result(trial)


def _libraries_of(workload: Workload, config: TrainingConfig) -> list[str]:
    """Returns the modules of other packages that building this model takes seconds to import.

    A name that does not exist does no harm: the process that builds the model finds what it needs.
    """
    modules = []
    if workload.model_config is not None:
        kind = workload.model_config.get("model_type")
        modules += [
            "autotune.models.transformers_network",
            "transformers.modeling_utils",
            f"transformers.models.{kind}.modeling_{kind}",
        ]
    if config.adapter != "none":
        modules.append("peft")
    return modules
