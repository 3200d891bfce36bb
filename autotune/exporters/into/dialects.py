"""How the files that people have say what an exporter writes.

An exporter writes each setting by one key. The files of the same trainer may have another: one of
an earlier version, a flag in place of a name, or a key that only has a meaning beside others. A
`Dialect` turns the exporter's keys into those of the file at hand, and adds what the importer reads
and the exporter does not write.
"""

import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from autotune.exporters import TARGETS
from autotune.exporters.bundle import BLOCKS, CALLBACK, OPTIMIZER_FILES
from autotune.exporters.export import Export
from autotune.exporters.into.edited import KeyPath
from autotune.exporters.reasons import Reason, Table, reasons_in
from autotune.exporters.recipe import Recipe
from autotune.exporters.torchtitan.files import ATTENTION_MODULE
from autotune.exporters.transformers import ARGUMENTS_FILE, arguments_export
from autotune.importers.axolotl import ATTENTION_FLAGS
from autotune.importers.lightning import BATCHES
from autotune.spec.config import TrainingConfig

AS_BEFORE = "start it as before, with {file} in place of {source}"

Content = Mapping[str, Any]
"""The keys of the file at hand."""


@dataclass(frozen=True, kw_only=True)
class Own:
    """What a file says by keys that the exporter does not write."""

    keys: Mapping[KeyPath, Any] = field(default_factory=dict)
    """The keys with their values, by which the file then has the wanted techniques."""
    said: Mapping[str, Any] = field(default_factory=dict)
    """{technique that the file says by itself: the value that the exporter is given instead}."""
    lacking: Mapping[str, Reason] = field(default_factory=dict)
    """{technique that the file says only nearly: what it does instead, and why}."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """A trainer whose files are written into."""

    target: str
    """The exporter to name for new files, in TARGETS."""
    file: str
    """Of the exporter's files, the one with the trainer's keys."""
    write: Callable[[Recipe], Export]
    respelled: Callable[[dict[str, Any], Content, Recipe], dict[str, Any]] = lambda keys, *_: keys
    """(the exporter's keys, the file, the recipe) -> the keys as this file says them."""
    own: Callable[[TrainingConfig, TrainingConfig, Content], Own] = lambda *_: Own()
    """(wanted, what the file describes, the file) -> what the exporter leaves out."""
    same: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """{key: others that mean the same, each of which is changed where the file has it}."""
    batch: tuple[KeyPath, ...] = ()
    """Keys that say the sequences of a step, which follow from the micro batch without them."""
    leaves_out: tuple[str, ...] = ()
    """Files of the exporter that the trainer's own file does not need."""
    command: str
    """The command line that uses `{file}` on one device, or AS_BEFORE for a script of the user."""
    otherwise: str = ""
    """What to do for what the file cannot say, after the reason."""
    off: Mapping[str, tuple[KeyPath, ...]] = field(default_factory=dict)
    """{technique: keys that also ask for one of its values, and are taken out with a change}."""

    def keys(self, export: Export, content: Content, recipe: Recipe) -> dict[KeyPath, Any]:
        """Returns {path: value} of the keys with which this file would have the configuration."""
        keys = _PARSERS[self.file.rpartition(".")[2]](export.files[self.file])
        return flat(self.respelled(keys, content, recipe))


def _yaml(text: str) -> dict[str, Any]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    keys: dict[str, Any] = yaml.load(text, Loader=loader)
    return keys


_PARSERS: Mapping[str, Callable[[str], dict[str, Any]]] = {
    "yaml": _yaml,
    "toml": tomllib.loads,
    "json": json.loads,
}


def flat(keys: Mapping[str, Any], before: KeyPath = ()) -> dict[KeyPath, Any]:
    """Returns {path: value} of everything in a table that is no table itself."""
    found: dict[KeyPath, Any] = {}
    for name, value in keys.items():
        if isinstance(value, Mapping):
            found |= flat(value, (*before, name))
        else:
            found[*before, name] = value
    return found


def _exporter(target: str, version: str) -> Callable[[Recipe], Export]:
    return lambda recipe: TARGETS[target].write(recipe, version)


def _table(content: Content, key: str) -> Mapping[str, Any]:
    value = content.get(key)
    return value if isinstance(value, Mapping) else {}


# -- kernels of the attention, which transformers has by name --------------------------------------

_IMPLEMENTATIONS = {"auto": "sdpa", "math": "eager", "flash": "flash_attention_2"}
"""{kernel of a trial: transformers' implementation that keeps the same tensors}. The others are
chosen in the process, by the exporter's launcher, among those of sdpa."""
_NEEDS_FLASH = (
    "flash_attention_2 needs the package flash-attn; trials had torch's kernel of that algorithm"
)


def _implementation(wanted: TrainingConfig) -> tuple[str, dict[str, Any], tuple[str, ...]]:
    """Returns the implementation to write, what an exporter is then given, and notes."""
    name = _IMPLEMENTATIONS.get(wanted.attention)
    if name is None:
        return "sdpa", {}, ()
    return name, {"attention": "auto"}, (_NEEDS_FLASH,) if wanted.attention == "flash" else ()


# -- axolotl ---------------------------------------------------------------------------------------

_CHUNKED = {"liger": "liger_fused_linear_cross_entropy", "cut_cross_entropy": "cut_cross_entropy"}
"""{part of the name of a plugin: the key by which its loss makes the logits in chunks}."""


def _axolotl_keys(keys: dict[str, Any], content: Content, recipe: Recipe) -> dict[str, Any]:
    del keys["attn_implementation"]
    if plugins := content.get("plugins"):
        own = plugins if isinstance(plugins, list) else [plugins]
        added = [name for name in keys.get("plugins", ()) if name not in own]
        keys["plugins"] = [*own, *added] if added else plugins
    if recipe.config.loss == "full":  # that of the file is a key of its own
        keys.pop("liger_fused_linear_cross_entropy", None)
    if "batch_size" in content and "gradient_accumulation_steps" not in content:
        del keys["gradient_accumulation_steps"]  # it follows from the sequences of a step
    return keys


def _axolotl_own(wanted: TrainingConfig, has: TrainingConfig, content: Content) -> Own:
    keys: dict[KeyPath, Any] = {}
    said: dict[str, Any] = {"attention": "auto", "loss": "full", "activation_offload": "none"}
    notes: tuple[str, ...] = ()
    if wanted.attention != has.attention:
        name, instead, notes = _implementation(wanted)
        keys |= _axolotl_attention(name, content)
        if not instead:
            del said["attention"]
    if wanted.loss != has.loss:
        if wanted.loss == "full":
            plugins = _plugins(content)
            keys |= {
                (key,): False
                for part, key in _CHUNKED.items()
                if content.get(key) or (key == part and part in plugins and key not in content)
            }
        elif key := _chunked_by_plugin(content):
            keys[key,] = True
        else:
            del said["loss"]
    if wanted.activation_offload != has.activation_offload:
        if wanted.activation_offload == "none":
            keys["activation_offloading",] = False
        else:
            del said["activation_offload"]
    return Own(keys=keys, said=said, notes=notes)


def _axolotl_attention(name: str, content: Content) -> dict[KeyPath, Any]:
    flags = [flag for flag in ATTENTION_FLAGS if flag in content]
    if not flags:
        return {("attn_implementation",): name}
    keys: dict[KeyPath, Any] = {
        (flag,): False for flag in flags if content[flag] and ATTENTION_FLAGS[flag] != name
    }
    if "attn_implementation" in content:
        return {**keys, ("attn_implementation",): name}
    return {
        **keys,
        **{(flag,): True for flag, stands_for in ATTENTION_FLAGS.items() if stands_for == name},
    }


def _chunked_by_plugin(content: Content) -> str | None:
    plugins = _plugins(content)
    return next((key for part, key in _CHUNKED.items() if part in plugins), None)


def _plugins(content: Content) -> str:
    """Returns the names of plugins; that of cut cross entropy makes the loss unless it is off."""
    return str(content.get("plugins") or "").lower()


# -- TRL -------------------------------------------------------------------------------------------


def _trl_keys(keys: dict[str, Any], content: Content, recipe: Recipe) -> dict[str, Any]:
    of_model = keys.pop("model_init_kwargs")
    in_table = _table(content, "model_init_kwargs")
    dtype_name = next((name for name in ("dtype", "torch_dtype") if name in in_table), None)
    if dtype_name is None:
        keys["dtype"] = of_model["dtype"]
    else:
        keys["model_init_kwargs"] = {dtype_name: of_model["dtype"]}
    method = of_model.get("quantization_config", {})
    keys["load_in_4bit"] = bool(method.get("load_in_4bit"))
    if keys["load_in_4bit"]:
        keys["use_bnb_nested_quant"] = True
    keys["load_in_8bit"] = "Int8" in str(method)
    return _with_new_name(keys, content)


def _with_new_name(keys: dict[str, Any], content: Content) -> dict[str, Any]:
    """Returns the keys with that for checkpointing as the file has it, and with its arguments."""
    if content.get("activation_checkpointing") is None:
        return keys
    return {
        key.replace("gradient_checkpointing", "activation_checkpointing"): value
        for key, value in keys.items()
    }


_TRL_LACKING: Table = {
    "base_weights": {
        "int8": (
            "int8 by bitsandbytes",
            "load_in_8bit is LLM.int8() of bitsandbytes, which treats outliers apart; trials have "
            "torchao's",
        ),
        "fp8": ("bf16", "TRL's own keys have 4 and 8 bits of bitsandbytes alone"),
    }
}


def _trl_own(wanted: TrainingConfig, has: TrainingConfig, content: Content) -> Own:
    lacking = {} if wanted.base_weights == has.base_weights else reasons_in(_TRL_LACKING, wanted)
    if wanted.attention == has.attention:
        return Own(said={"attention": "auto"}, lacking=lacking)
    name, said, notes = _implementation(wanted)
    path: KeyPath = ("attn_implementation",)
    if "attn_implementation" in _table(content, "model_init_kwargs"):
        path = ("model_init_kwargs", "attn_implementation")
    return Own(keys={path: name}, said=said, lacking=lacking, notes=notes)


# -- transformers' TrainingArguments ---------------------------------------------------------------


def _arguments_keys(keys: dict[str, Any], content: Content, recipe: Recipe) -> dict[str, Any]:
    if not {"dtype", "torch_dtype", "model_name_or_path"} & content.keys():
        del keys["dtype"]  # the script makes the model
    return _with_new_name(keys, content)


# -- LLaMA-Factory ---------------------------------------------------------------------------------

_FLASH_ATTN = {"sdpa": "sdpa", "eager": "disabled", "flash_attention_2": "fa2"}


def _llamafactory_keys(keys: dict[str, Any], content: Content, recipe: Recipe) -> dict[str, Any]:
    del keys["flash_attn"]
    return keys


def _llamafactory_own(wanted: TrainingConfig, has: TrainingConfig, content: Content) -> Own:
    if wanted.attention == has.attention:
        return Own(said={"attention": "auto"})
    name, said, notes = _implementation(wanted)
    return Own(keys={("flash_attn",): _FLASH_ATTN[name]}, said=said, notes=notes)


# -- torchtitan ------------------------------------------------------------------------------------


def _torchtitan_own(wanted: TrainingConfig, has: TrainingConfig, content: Content) -> Own:
    if wanted.attention == has.attention:
        return Own()
    module = ATTENTION_MODULE.removesuffix(".py")
    return Own(keys={("experimental", "custom_import"): module})


# -- Lightning -------------------------------------------------------------------------------------


def _lightning_keys(keys: dict[str, Any], content: Content, recipe: Recipe) -> dict[str, Any]:
    trainer, config = keys["trainer"], recipe.config
    del trainer["callbacks"]  # autotune's own, which needs its modules
    data = _table(content, "data")
    arguments = _table(data, "init_args") or data
    batch = {name: config.micro_batch_size for name in BATCHES if name in arguments}
    first = dict(list(batch.items())[:1])
    keys["data"] = {"init_args": first} if arguments is not data else first
    if "optimizer" not in content:
        del keys["optimizer"]  # the user's module makes it, with its own rate
    if recipe.workload.gradient_clipping is not None and trainer["gradient_clip_val"] is None:
        # Lightning clips no gradients of a fused optimizer in mixed precision.
        trainer["gradient_clip_val"] = recipe.workload.gradient_clipping
        keys.get("optimizer", {}).get("init_args", {}).update(fused=False, foreach=True)
    return keys


_BY_FSDP = ("fsdp_config", "activation_checkpointing")

DIALECTS: Mapping[str, Dialect] = {
    "axolotl": Dialect(
        target="axolotl",
        command="axolotl train {file}",
        write=_exporter("axolotl", "0.19"),
        file="axolotl.yaml",
        respelled=_axolotl_keys,
        own=_axolotl_own,
        same={
            "bf16": ("bfloat16",),
            "fp16": ("float16",),
            "liger_glu_activation": ("liger_swiglu",),
        },
        off={"checkpointing": (_BY_FSDP,)},
    ),
    "trl": Dialect(
        target="trl",
        command="trl sft --config {file}",
        write=_exporter("trl", "1.16"),
        file="sft.yaml",
        respelled=_trl_keys,
        own=_trl_own,
        off={
            "checkpointing": (
                _BY_FSDP,
                ("gradient_checkpointing_kwargs", "selective"),
                ("activation_checkpointing_kwargs", "selective"),
            )
        },
    ),
    "llamafactory": Dialect(
        target="llamafactory",
        command="llamafactory-cli train {file}",
        write=_exporter("llamafactory", "0.9"),
        file="llamafactory.yaml",
        respelled=_llamafactory_keys,
        own=_llamafactory_own,
        same={"enable_liger_kernel": ("use_liger_kernel",)},
        leaves_out=("dataset_info.json",),
        off={"precision": (("fp8",),)},
    ),
    "transformers": Dialect(
        target="transformers",
        write=lambda recipe: arguments_export(recipe, "5"),
        file=ARGUMENTS_FILE,
        respelled=_arguments_keys,
        command=AS_BEFORE,
    ),
    "torchtitan": Dialect(
        target="torchtitan",
        command="torchrun --nproc_per_node=1 -m torchtitan.train --job.config_file {file}",
        write=_exporter("torchtitan", "0.2"),
        file="autotune.toml",
        own=_torchtitan_own,
        batch=(("training", "global_batch_size"),),
    ),
    "lightning": Dialect(
        target="lightning",
        write=_exporter("lightning", "2"),
        file="lightning.yaml",
        respelled=_lightning_keys,
        leaves_out=(CALLBACK, BLOCKS, *OPTIMIZER_FILES),
        otherwise=": --to lightning writes a callback for it",
        command=AS_BEFORE,
    ),
}
"""{name of the trainer among the importers: how its files are written into}."""
