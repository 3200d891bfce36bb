"""The model in an exported script: autotune's own models as they are, Hugging Face's by its config, or a function."""

import json

from autotune.exporters.pytorch.pieces import Piece, own_source, piece
from autotune.exporters.recipe import Recipe
from autotune.user_code import is_function_reference, read_reference
from autotune.workload import Workload

MODEL_CONFIG_FILE = "model_config.json"

_TORCH = ("import torch", "from torch import Tensor, nn")
_ANY = "from typing import Any"


def loss_piece() -> Piece:
    """How every model makes its loss of logits."""
    return own_source(
        "models.parts",
        "IGNORED_LABEL",
        "TokenLoss",
        "next_token_loss",
        "full_token_loss",
        imports=(*_TORCH, "import torch.nn.functional as F", "from collections.abc import Callable"),
    )


def model_pieces(recipe: Recipe) -> list[Piece]:
    """`make_model()`, which draws the initial weights; where the model is not ours, also `find_blocks(model)`."""
    workload = recipe.workload
    if workload.model_config is not None:
        return [*_hugging_face(workload), *_found_blocks()]
    if is_function_reference(workload.model):
        return [*_own(workload), *_found_blocks()]
    return _built_in(workload)


# -- built in ----------------------------------------------------------------------------------------------------


def _built_in(workload: Workload) -> list[Piece]:
    said = {name: getattr(workload, name) for name in ("layers", "width", "heads", "vocab_size")}
    said["inner"] = workload.feed_forward_width or f"default_feed_forward_width({workload.width})"
    if workload.model == "gpt":
        names = ["ROTARY_BASE", "INITIAL_DEVIATION", "rotary_table", "rotate"]
        model, file = "GPT", "models.gpt"
        said["sequence_length"] = "SEQUENCE_LENGTH"
    else:
        names = ["RESIDUAL_FACTOR", "INITIAL_GAIN", "PADDING_TOKEN", "initial_slopes", "relative_positions"]
        model, file = "DeepOne", "models.deep_one"
    parts = ("default_feed_forward_width", "Attention", "FeedForward", "Block", model, "initialize")
    arguments = "".join(f"        {name}={value},\n" for name, value in said.items())
    made = f"""
def make_model() -> nn.Module:
    model = {model}(
{arguments}    )
    initialize(model)
    return model
"""
    return [
        piece(made, *_TORCH),
        own_source(file, *names, *parts, imports=(*_TORCH, "import torch.nn.functional as F")),
    ]


# -- by structure ------------------------------------------------------------------------------------------------


def _found_blocks() -> list[Piece]:
    structure = own_source(
        "models.structure",
        "BlockList",
        "find_blocks",
        "_block_lists",
        "_is_of_blocks",
        imports=("from collections.abc import Iterator", "from dataclasses import dataclass", *_TORCH),
    )
    return [own_source("models.parts", "Blocks"), structure]


# -- Hugging Face ------------------------------------------------------------------------------------------------


def _hugging_face(workload: Workload) -> list[Piece]:
    if workload.pretrained:
        load = f"from_pretrained({json.dumps(workload.model_source)}, config=config, **options)"
    else:
        load = "from_config(config, **options)"
    made = f'''
def make_model() -> nn.Module:
    """As {MODEL_CONFIG_FILE}, beside this file, says."""
    AttentionMaskInterface.register("sdpa", _causal_mask)
    try:
        return HuggingFaceModel(_network("sdpa"))
    except ValueError as error:  # a family whose attention no kernel computes
        if "scaled_dot_product_attention" not in str(error):
            raise
        return HuggingFaceModel(_network("eager"))


def _network(attention: str) -> Any:
    settings = json.loads(Path(__file__).with_name("{MODEL_CONFIG_FILE}").read_text(encoding="utf-8"))
    config = CONFIG_MAPPING[settings.pop("model_type")].from_dict(settings)
    options: Any = {{"dtype": torch.float32, "attn_implementation": attention}}
    return AutoModelForCausalLM.{load}
'''
    model = own_source("models.hugging_face", "HuggingFaceModel", "_causal_mask", imports=(*_TORCH, _ANY))
    return [
        Piece(model.text.replace("    from transformers.masking_utils import sdpa_mask\n\n", ""), model.imports),
        piece(
            made,
            _ANY,
            "import json",
            "from pathlib import Path",
            "from transformers import CONFIG_MAPPING, AutoModelForCausalLM",
            "from transformers.masking_utils import AttentionMaskInterface, sdpa_mask",
        ),
    ]


# -- somebody's function -----------------------------------------------------------------------------------------

_SIZES = ("layers", "width", "heads", "feed_forward_width", "vocab_size", "sequence_length")


def _own(workload: Workload) -> list[Piece]:
    reference = read_reference(workload.model)
    sizes = {name: size for name in _SIZES if (size := getattr(workload, name)) is not None}
    text = f'''
MODEL = {json.dumps(reference.place)}
"""Where the model's function is; a path is looked for from the folder this is started in."""
SIZES = {json.dumps(sizes)}
"""The function is called with those of them that it takes."""


def make_model() -> nn.Module:
    file = Path(MODEL).expanduser()
    sys.path.insert(0, str(file.absolute().parent if MODEL.endswith(".py") else Path.cwd()))
    module = importlib.import_module(file.stem if MODEL.endswith(".py") else MODEL)
    function = module.{reference.function}
    taken = inspect.signature(function).parameters.values()
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken)
    names = {{parameter.name for parameter in taken}}
    return OwnModel(function(**{{name: size for name, size in SIZES.items() if takes_all or name in names}}))


class OwnModel(nn.Module):
    """forward(tokens [batch, sequence], labels [batch, sequence]) -> sum of token losses, float32 scalar.

    The network's forward(tokens) gives logits, or its forward(tokens, labels) the mean loss; either alone or within
    a tuple, a mapping or an object.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        wanted = [
            parameter
            for parameter in inspect.signature(network.forward).parameters.values()
            if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        ]
        self.takes_labels = len(wanted) > 1

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        if not self.takes_labels:
            return next_token_loss(_tensor_in(self.network(tokens), dimensions=3), labels)
        valid_labels = (labels != IGNORED_LABEL).sum()
        mean = _tensor_in(self.network(tokens, labels), dimensions=0).float()
        return torch.where(valid_labels > 0, mean * valid_labels, 0.0)  # a mean of nothing is no number


def _tensor_in(output: Any, *, dimensions: int) -> Tensor:
    if isinstance(output, Mapping):
        output = list(output.values())
    elif hasattr(output, "__dict__") and not isinstance(output, Tensor):
        output = list(vars(output).values())
    entries = output if isinstance(output, tuple | list) else [output]
    return next(entry for entry in entries if isinstance(entry, Tensor) and entry.dim() == dimensions)
'''
    standard = ("importlib", "inspect", "sys")
    return [
        piece(
            text,
            *(f"import {name}" for name in standard),
            "from collections.abc import Mapping",
            "from pathlib import Path",
            _ANY,
            *_TORCH,
        )
    ]
