"""The model in an exported script: one of autotune, of Hugging Face, or of the user's function."""

from autotune.exporters.bundle import Part, code, shipped
from autotune.exporters.recipe import Recipe
from autotune.spec.user_code import is_function_reference, read_reference
from autotune.spec.workload import Workload

MODEL_CONFIG_FILE = "model_config.json"


def model_parts(recipe: Recipe) -> list[Part]:
    """Return the definition of `make_model()`, which draws the initial weights.

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


# -- Hugging Face ----------------------------------------------------------------------------------


def _hugging_face(workload: Workload) -> list[Part]:
    if workload.pretrained:
        load = f"from_pretrained({workload.model_source!r}, config=config, **options)"
    else:
        load = "from_config(config, **options)"
    text = f'''
import json
from pathlib import Path
from typing import Any
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.masking_utils import AttentionMaskInterface
from autotune.shipped.hugging_face import HuggingFaceModel
from autotune.shipped.hugging_face_mask import causal_mask

def make_model() -> nn.Module:
    """Makes the model that {MODEL_CONFIG_FILE}, next to this file, describes."""
    AttentionMaskInterface.register("sdpa", causal_mask)
    try:
        return HuggingFaceModel(_network("sdpa"))
    except ValueError as error:  # the attention of this model has no kernel
        if "scaled_dot_product_attention" not in str(error):
            raise
        return HuggingFaceModel(_network("eager"))


def _network(attention: str) -> Any:
    file = Path(__file__).with_name("{MODEL_CONFIG_FILE}")
    settings = json.loads(file.read_text(encoding="utf-8"))
    config = CONFIG_MAPPING[settings.pop("model_type")].from_dict(settings)
    options: Any = {{"dtype": torch.float32, "attn_implementation": attention}}
    return AutoModelForCausalLM.{load}
'''
    return [code(text)]


# -- the user's function ---------------------------------------------------------------------------

_SIZES = ("layers", "width", "heads", "feed_forward_width", "vocab_size", "sequence_length")


def _user_function(workload: Workload) -> list[Part]:
    reference = read_reference(workload.model)
    sizes = {name: size for name in _SIZES if (size := getattr(workload, name)) is not None}
    text = f'''
import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from autotune.shipped.signature import Expectation
from autotune.shipped.user_model import user_model

MODEL = {reference.place!r}
"""Module or file of the model's function; a path is relative to the current folder."""
SIZES = {sizes!r}
"""The function is called with those of them that it takes."""
EXPECTED = Expectation(
    name=MODEL, vocab_size={workload.vocab_size}, sequence_length=SEQUENCE_LENGTH
)


@torch.no_grad()
def make_model() -> nn.Module:
    function = getattr(_module(), {reference.function!r})
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    names = {{parameter.name for parameter in parameters}}
    sizes = {{name: size for name, size in SIZES.items() if takes_all or name in names}}
    with torch.enable_grad():
        network = function(**sizes)
    # The attention kernels of a CPU, because the configuration may have turned them off.
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        return user_model(network, EXPECTED)


def _module() -> ModuleType:
    file = Path(MODEL).expanduser().absolute()
    if not MODEL.endswith(".py"):
        sys.path.insert(0, str(Path.cwd()))
        return importlib.import_module(MODEL)
    sys.path.insert(0, str(file.parent))
    spec = importlib.util.spec_from_file_location(f"autotune_own_{{file.stem}}", file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
'''
    return [code(text)]
