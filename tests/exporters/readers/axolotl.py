"""The numbers of axolotl's YAML file, by a table of its keys: it drops unknown ones itself.

The techniques are those that the importer reads.
"""

import yaml

from tests.exporters.readers import imported
from tests.exporters.readers.key_table import check, defaults, load
from tests.exporters.readers.named_rates import schedule_named

MATRIX_PRODUCTS = {
    *("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"),
    *("aten::_grouped_mm", "aten::_scaled_mm"),
}
LORA_KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel")
QUANTIZATION = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}


def read(export, version):
    assert version == "0.19"
    table = load("axolotl")
    written = yaml.safe_load(export.files["axolotl.yaml"])
    _check(written, table)
    values = {**defaults(table["keys"]), **written}
    if "adamw" in values["optimizer"]:
        names = ("adam_beta1", "adam_beta2", "adam_epsilon")
        assert [values[name] for name in names] == [0.9, 0.999, 1e-8]
    if values["gradient_checkpointing"]:
        assert values["gradient_checkpointing_kwargs"]["use_reentrant"] is False
    if selective := values["selective_checkpointing"]:
        assert set(selective["save"]) in ({"attention"}, {"attention", *MATRIX_PRODUCTS})
        assert selective["save_sliding_window"]
    if values["fsdp_config"] is not None:
        assert values["fsdp_version"] == 2
    if values["adapter"] is not None:
        assert bool(values["lora_target_linear"]) != bool(values["lora_target_modules"])
        assert written["lora_r"] > 0
        assert len({written[name] for name in LORA_KERNELS}) == 1, "they are on unless turned off"
        assert written["lora_embedding_kernel"] is False
        assert (values["adapter"] == "qlora") == values["load_in_4bit"]
        assert not values["load_in_4bit"] or values["bnb_config_kwargs"] == QUANTIZATION
        assert not values["fp16"] or values["peft_autocast_adapter_dtype"], "gradients are scaled"
    if values["fp8"]:
        assert (values["fp8_config"], values["bf16"]) == ({"recipe": "tensorwise"}, False)
    done = imported.read("axolotl", export)
    if values["dp_shard_size"] is not None:
        assert values["dp_shard_size"] * values["dp_replicate_size"] == done["devices_per_trial"]
    numbers = {
        "weight_decay": values["weight_decay"],
        "steps": values["max_steps"],
        **schedule_named(
            values["lr_scheduler"],
            warmup=2 if values["warmup_steps"] == 1 else values["warmup_steps"],  # axolotl does so
            steps=values["max_steps"],
            keywords=values["lr_scheduler_kwargs"],
        ),
    }
    return imported.merged(numbers, done)


def _check(written, table):
    for key, value in written.items():
        check(key, value, table["keys"])
        for one in value if isinstance(value, list) else [value]:
            for name, inner in one.items() if key in table["inner"] else ():
                check(name, inner, table["inner"][key])
    assert written["attn_implementation"] == "sdpa"
    for key in ("bf16", "fp16", "tf32", "gradient_checkpointing", "torch_compile", "max_grad_norm"):
        assert key in written, f"axolotl's default of {key} follows the device, or is another's"
