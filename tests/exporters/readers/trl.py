"""The numbers of `sft.yaml` as `trl sft --config` parses it; techniques as the importer reads it.

trl makes the loss in chunks whatever the file says: `test_trl_export.py` sees it do so.
"""

import contextlib
import functools
import shlex
import tempfile
from pathlib import Path

import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.quantizers.auto import AutoQuantizationConfig
from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, SFTConfig, TrlParser
from trl.cli.accelerate_config import resolve_accelerate_config_argument

from autotune.exporters import accelerate_config
from tests.exporters.readers import imported
from tests.exporters.readers.hugging_face import (
    FOLDER,
    optimizer_by_arguments,
    workload_settings,
)


def tokenizer():
    words = {word: index for index, word in enumerate(["<end>", "<unknown>", *"abcdefgh"])}
    made = Tokenizer(models.WordLevel(words, unk_token="<unknown>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<end>", pad_token="<end>", unk_token="<unknown>"
    )


def parse(text, **changes):
    """Returns (script arguments, SFTConfig, ModelConfig, datasets); fails on unknown keys.

    Runs on a CPU, which rejects tf32.
    """
    content = {
        **yaml.safe_load(text),
        "use_cpu": True,
        "report_to": "none",
        "output_dir": FOLDER,
        **changes,
    }
    content["tf32"] = False
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "sft.yaml"
        file.write_text(yaml.safe_dump(content))
        parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig, DatasetMixtureConfig))
        return parser.parse_args_and_config(args=["--config", str(file)])


def read(export, version):
    _, args, _, _ = _parsed(export.files["sft.yaml"])
    assert "tf32" in yaml.safe_load(export.files["sft.yaml"]), "it is on unless it is turned off"
    assert args.packing is False or args.packing_strategy == "wrapped"
    options = args.model_init_kwargs
    assert options["attn_implementation"] == "sdpa"
    assert options["dtype"] in ("float32", "bfloat16", "float16")
    if quantization := options.get("quantization_config"):
        made = AutoQuantizationConfig.from_dict(quantization)
        if quantization["quant_method"] == "bitsandbytes":
            assert (made.bnb_4bit_quant_type, made.bnb_4bit_use_double_quant) == ("nf4", True)
    if export.command.startswith("trl ") and accelerate_config.FILE in export.files:
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            Path(accelerate_config.FILE).touch()
            resolve_accelerate_config_argument(shlex.split(export.command)[4:])
    done = imported.read("trl", export)
    return imported.merged(
        workload_settings(args, devices=done["devices_per_trial"]),
        optimizer_by_arguments(args),
        done,
    )


@functools.cache
def _parsed(text):
    return parse(text)
