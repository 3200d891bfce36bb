"""Build the model of a workload, behind the protocol of `parts.py`.

Imported only in the process of a trial, because it imports torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn

from autotune.models import deep_one, gpt, hugging_face, user_model
from autotune.models.parts import ModelParts
from autotune.shipped.deep_one import initialize as initialize_deep_one
from autotune.shipped.gpt import initialize as initialize_gpt
from autotune.spec.user_code import is_function_reference
from autotune.spec.workload import Workload


@dataclass(frozen=True, kw_only=True)
class ModelFamily:
    """The functions that build a model, find its parts and initialize its weights."""

    build: Callable[[Workload], nn.Module]
    find_parts: Callable[[nn.Module], ModelParts]
    initialize: Callable[[nn.Module], None]


MODELS: Mapping[str, ModelFamily] = {
    "gpt": ModelFamily(build=gpt.build, find_parts=gpt.find_parts, initialize=initialize_gpt),
    "deep-one": ModelFamily(
        build=deep_one.build, find_parts=deep_one.find_parts, initialize=initialize_deep_one
    ),
}

HUGGING_FACE = ModelFamily(
    build=hugging_face.build, find_parts=hugging_face.find_parts, initialize=hugging_face.initialize
)

USER_MODEL = ModelFamily(
    build=user_model.build, find_parts=user_model.find_parts, initialize=user_model.initialize
)


def family_of(workload: Workload) -> ModelFamily:
    """Returns the family of the workload's model."""
    if workload.model_config is not None:
        return HUGGING_FACE
    if is_function_reference(workload.model):
        return USER_MODEL
    return MODELS[workload.model]


def build_model(workload: Workload) -> ModelParts:
    """Returns the workload's model, untrained, on torch's current default device."""
    family = family_of(workload)
    return family.find_parts(family.build(workload))
