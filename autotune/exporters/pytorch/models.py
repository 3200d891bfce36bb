"""The model in an exported script: one of autotune, of Hugging Face, or of the user's function."""

from autotune.exporters.pytorch.pieces import Piece, piece, quoted_source
from autotune.exporters.recipe import Recipe
from autotune.spec.user_code import is_function_reference, read_reference
from autotune.spec.workload import Workload

MODEL_CONFIG_FILE = "model_config.json"

_TORCH = ("import torch", "from torch import Tensor, nn")
_ANY = "from typing import Any"


def loss_piece() -> Piece:
    """Return the definitions by which every model computes its loss from logits."""
    return quoted_source(
        "models.parts",
        "IGNORED_LABEL",
        "TokenLoss",
        "next_token_loss",
        "full_token_loss",
        imports=(
            *_TORCH,
            "import torch.nn.functional as F",
            "from collections.abc import Callable",
        ),
    )


def model_pieces(recipe: Recipe) -> list[Piece]:
    """Return the definition of `make_model()`, which draws the initial weights.

    For a model that is not built in, also that of `find_blocks(model)`.
    """
    workload = recipe.workload
    if workload.model_config is not None:
        return [*_hugging_face(workload), *_found_blocks()]
    if is_function_reference(workload.model):
        return [*_user_function(workload), *_found_blocks()]
    if recipe.config.adapter != "none":
        return [*_built_in(workload), *_found_blocks()]
    return _built_in(workload)


# -- built in --------------------------------------------------------------------------------------


def _built_in(workload: Workload) -> list[Piece]:
    arguments = {
        name: getattr(workload, name) for name in ("layers", "width", "heads", "vocab_size")
    }
    arguments["inner"] = (
        workload.feed_forward_width or f"default_feed_forward_width({workload.width})"
    )
    if workload.model == "gpt":
        names = ["ROTARY_BASE", "INITIAL_DEVIATION", "rotary_table", "rotate"]
        model, file = "GPT", "models.gpt"
        arguments["sequence_length"] = "SEQUENCE_LENGTH"
    else:
        names = [
            "RESIDUAL_FACTOR",
            "INITIAL_GAIN",
            "PADDING_TOKEN",
            "initial_slopes",
            "relative_positions",
        ]
        model, file = "DeepOne", "models.deep_one"
    parts = ("default_feed_forward_width", "Attention", "FeedForward", "Block", model, "initialize")
    lines = "".join(f"        {name}={value},\n" for name, value in arguments.items())
    text = f"""
def make_model() -> nn.Module:
    model = {model}(
{lines}    )
    initialize(model)
    return model
"""
    return [
        piece(text, *_TORCH),
        quoted_source(file, *names, *parts, imports=(*_TORCH, "import torch.nn.functional as F")),
    ]


# -- blocks of a model that is not built in --------------------------------------------------------


def _found_blocks() -> list[Piece]:
    structure = quoted_source(
        "models.structure",
        "BlockList",
        "find_blocks",
        "_block_lists",
        "_are_alike",
        "_is_of_torch",
        "_is_of_blocks",
        imports=(
            "from collections.abc import Iterator",
            "from dataclasses import dataclass",
            *_TORCH,
        ),
    )
    return [quoted_source("models.parts", "Blocks"), structure]


# -- Hugging Face ----------------------------------------------------------------------------------


def _hugging_face(workload: Workload) -> list[Piece]:
    if workload.pretrained:
        load = f"from_pretrained({workload.model_source!r}, config=config, **options)"
    else:
        load = "from_config(config, **options)"
    text = f'''
def make_model() -> nn.Module:
    """Makes the model that {MODEL_CONFIG_FILE}, next to this file, describes."""
    AttentionMaskInterface.register("sdpa", _causal_mask)
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
    return [
        quoted_source("models.hugging_face", "HuggingFaceModel", imports=(*_TORCH, _ANY)),
        quoted_source("models.transformers_network", "_causal_mask"),
        piece(
            text,
            _ANY,
            "import json",
            "from pathlib import Path",
            "from transformers import CONFIG_MAPPING, AutoModelForCausalLM",
            "from transformers.masking_utils import AttentionMaskInterface, sdpa_mask",
        ),
    ]


# -- the user's function ---------------------------------------------------------------------------

_SIZES = ("layers", "width", "heads", "feed_forward_width", "vocab_size", "sequence_length")
_OBSERVATION = (
    "_BATCH",
    "_LABEL_NAMES",
    "Usage",
    "entry_of",
    "probe_signature",
    "_not_callable",
    "_ways_to_call",
    "_observe",
    "_entries",
    "_named_first",
    "_Call",
    "_CrossEntropy",
    "_Witness",
    "_is_all_of",
    "_CrossEntropies",
)
"""Definitions by which trials find out how to call a module and which of its outputs has the
logits."""


def _user_function(workload: Workload) -> list[Piece]:
    reference = read_reference(workload.model)
    sizes = {name: size for name in _SIZES if (size := getattr(workload, name)) is not None}
    text = f'''
MODEL = {reference.place!r}
"""Module or file of the model's function; a path is relative to the current folder."""
SIZES = {sizes!r}
"""The function is called with those of them that it takes."""


class Workload(SimpleNamespace):
    model: str
    vocab_size: int
    sequence_length: int


class InvalidInput(Exception):
    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(f"{{message}}: {{hint}}")


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
        return _user_model(network, Workload(model=MODEL, **SIZES))


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
    standard = ("importlib", "importlib.util", "inspect", "itertools", "sys")
    return [
        piece(
            text,
            *(f"import {name}" for name in standard),
            "from collections.abc import Iterator, Mapping",
            "from contextlib import ExitStack, contextmanager",
            "from dataclasses import dataclass, field, replace",
            "from pathlib import Path",
            "from torch.nn.attention import SDPBackend, sdpa_kernel",
            "from torch.overrides import TorchFunctionMode",
            "from types import ModuleType, SimpleNamespace",
            "import torch.nn.functional as F",
            _ANY,
            *_TORCH,
        ),
        quoted_source("models.signature", *_OBSERVATION),
        quoted_source("models.user_model", "UserModel", "PassableLinear", "_user_model"),
    ]
