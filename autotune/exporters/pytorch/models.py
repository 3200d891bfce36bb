"""The model in an exported script: one of autotune, of Hugging Face, or of the user's function."""

from autotune.exporters.bundle import Part, code, shipped
from autotune.exporters.recipe import Recipe
from autotune.spec.user_code import is_function_reference, read_reference
from autotune.spec.workload import Workload

MODEL_CONFIG_FILE = "model_config.json"


def model_parts(recipe: Recipe) -> list[Part]:
    """Returns the definition of `make_model()`, which draws the initial weights.

    For a model that is not built in, also that of `find_blocks(model)`.
    """
    workload = recipe.workload
    if workload.model_config is not None:
        return [*_hugging_face(workload), shipped("blocks")]
    if is_function_reference(workload.model):
        return [*_user_function(workload), shipped("blocks")]
    if recipe.config.adapter != "none":
        return [*_built_in(workload), shipped("blocks")]
    return _built_in(workload)


# -- built in --------------------------------------------------------------------------------------


def _built_in(workload: Workload) -> list[Part]:
    arguments = {
        name: getattr(workload, name) for name in ("layers", "width", "heads", "vocab_size")
    }
    arguments["inner"] = (
        workload.feed_forward_width or f"default_feed_forward_width({workload.width})"
    )
    model, module = "DeepOne", "deep_one"
    if workload.model == "gpt":
        model, module = "GPT", "gpt"
        arguments["sequence_length"] = "SEQUENCE_LENGTH"
    lines = "".join(f"        {name}={value},\n" for name, value in arguments.items())
    text = f"""
from torch import nn
from autotune.shipped.{module} import {model}, initialize

def make_model() -> nn.Module:
    model = {model}(
{lines}    )
    initialize(model)
    return model
"""
    return [code(text)]


# -- Hugging Face and the user's function ----------------------------------------------------------


def _hugging_face(workload: Workload) -> list[Part]:
    pretrained = workload.model_source if workload.pretrained else None
    settings = f"MODEL_CONFIG_FILE = {MODEL_CONFIG_FILE!r}\nPRETRAINED: str | None = {pretrained!r}"
    return [code(settings), shipped("script.hugging_face_model")]


_SIZES = ("layers", "width", "heads", "feed_forward_width", "vocab_size", "sequence_length")


def _user_function(workload: Workload) -> list[Part]:
    reference = read_reference(workload.model)
    sizes = {name: size for name in _SIZES if (size := getattr(workload, name)) is not None}
    settings = f'''
MODEL = {reference.place!r}
"""Module or file of the model's function; a path is relative to the current folder."""
FUNCTION = {reference.function!r}
SIZES = {sizes!r}
"""The function is called with those of them that it takes."""
'''
    return [code(settings), shipped("script.model_of_function")]
