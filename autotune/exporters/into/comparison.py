"""Compares the file with the study: whether its numbers hold for what the file trains."""

import dataclasses
from collections.abc import Iterator
from pathlib import PurePath

from autotune.errors import InvalidInput
from autotune.exporters.into.changes import TrainerFile
from autotune.spec.config import FIELD_ORDER, TrainingConfig
from autotune.spec.model_choice import with_model_config
from autotune.spec.model_file import known_sizes, source_of
from autotune.spec.setting import option_of
from autotune.spec.workload import BESIDE_ADAPTERS, Workload


def check_file(study: str, workload: Workload, config: TrainingConfig, file: TrainerFile) -> None:
    """Raise InvalidInput if the numbers of a trial say nothing about the training of the file."""
    of_file = file.training.workload
    search = f"run autotune search --from {file.path}"
    if _is_same_model(workload, file) is False:
        raise InvalidInput(
            f"study {study!r} trained {workload.describe_model()}, and {file.path} trains "
            f"{of_file['model']}: its numbers do not hold there",
            hint=search,
        )
    length = of_file.get("sequence_length")
    if workload.script is None and length is not None and length > workload.sequence_length:
        raise InvalidInput(
            f"study {study!r} has measured sequences of {workload.sequence_length} tokens, and "
            f"those of {file.path} have {length}, which need more memory",
            hint=search,
        )
    adapters = (file.config.adapter, config.adapter)
    is_other = "none" in adapters and adapters != ("none", "none")
    if is_other and workload.own_config is None and workload.script is None:
        trains = {True: "all weights", False: "an adapter"}
        raise InvalidInput(
            f"the trial trains {trains[config.adapter == 'none']}, and {file.path} "
            f"{trains[file.config.adapter == 'none']}",
            hint=search,
        )


def remarks(workload: Workload, config: TrainingConfig, file: TrainerFile) -> Iterator[str]:
    """Yield a sentence for each thing in which the file is not what the study has measured."""
    of_file = file.training.workload
    name = file.path.name
    if workload.script is not None:
        if all(PurePath(argument).name != name for argument in workload.script_arguments):
            yield f"the study ran {workload.script}: it does not know what {name} trains"
        return
    if _is_same_model(workload, file) is None:
        yield f"whether {name} trains the study's model could not be found out"
    length = of_file.get("sequence_length")
    if length is not None and length < workload.sequence_length:
        yield (
            f"{name} has sequences of {length} tokens, the study those of "
            f"{workload.sequence_length}: memory will be less than it says"
        )
    packing = of_file.get("packing", workload.packing)
    if packing != workload.packing:
        yield f"rows of {name} are {packing}, those of the study {workload.packing}"
    if config.adapter != "none" and file.config.adapter != "none":
        beside = {one: of_file.get(one, value) for one, value in BESIDE_ADAPTERS.items()}
        of_its_own = dataclasses.replace(workload, **beside)
        for setting in BESIDE_ADAPTERS:
            values = [getattr(one, setting) for one in (of_its_own, workload)]
            if values[0] != values[1]:
                has, had = map(option_of(Workload, setting).format.write, values)
                yield (
                    f"{name} has {setting.replace('_', ' ')} {has or 'none'}, the study "
                    f"{had or 'none'}: trainings will differ, and the file keeps its own"
                )
    if workload.devices_per_trial == 1 and of_file["global_batch"] != workload.global_batch:
        yield (
            f"a step of {name} has {of_file['global_batch']} sequences on a device, that of the "
            f"study {workload.global_batch}: the file keeps its own number"
        )
    if workload.own_config is not None and file.config != config:
        own = TrainingConfig(**workload.own_config)
        changed = [
            f"{field} {getattr(file.config, field)} (then {getattr(own, field)})"
            for field in FIELD_ORDER
            if getattr(file.config, field) != getattr(own, field)
        ]
        if changed:
            yield (
                f"{name} is not as it was when the study began: {', '.join(changed)}; the changes "
                "are made to the file as it is now"
            )


def _is_same_model(workload: Workload, file: TrainerFile) -> bool | None:
    """Returns whether the file trains the model of the study; None: not known."""
    name = file.training.workload.get("model")
    if name is None or workload.script is not None:
        return None
    if source_of(name) == workload.model_source:
        return True
    if workload.model_config is None:
        return False
    try:
        config = with_model_config({"model": name}).get("model_config")
    except InvalidInput:  # it is neither here nor known
        return None
    if config is None:
        return False
    kinds = {workload.model_config.get("model_type"), config.get("model_type")}
    return len(kinds) == 1 and known_sizes(config) == known_sizes(workload.model_config)
