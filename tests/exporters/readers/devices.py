"""What devices share out among them, as settings of autotune."""

import torch

ONE_DEVICE = {
    "devices_per_trial": 1,
    "sharding": "none",
    "sharding_group": 1,
    "tensor_parallel": 1,
    "offload": "none",
    "gradient_reduction": "fp32",
    "engine": "torch",
}
REDUCED_IN = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", None: "fp32"}


def by_deepspeed(config, *, devices):
    """Returns what a configuration that DeepSpeed has parsed does on so many devices."""
    zero = config.zero_config
    offload = "none" if zero.offload_optimizer is None else "optimizer"
    for moved in (zero.offload_optimizer, zero.offload_param):
        assert moved is None or moved.device == "cpu"
    if zero.offload_param is not None:
        assert offload == "optimizer"
        offload = "all"
    sharding = {0: "ddp", 1: "zero1", 2: "zero2", 3: "zero3"}[zero.stage]
    shares = devices > 1 or offload != "none"
    return {
        **ONE_DEVICE,
        "devices_per_trial": devices,
        "sharding": sharding if devices > 1 else "none",
        "offload": offload,
        "gradient_reduction": REDUCED_IN[config.communication_data_type],
        "engine": "deepspeed" if shares else "torch",
    }


def by_fsdp2(*, reshards, groups, group_size, reduced_in, on_host, devices):
    """Returns the settings of FSDP2 in `groups` of so many devices each."""
    sharding = "zero3" if reshards else "zero2"
    if groups > 1:
        assert reshards
        assert groups * group_size == devices
        sharding = "hsdp"
    return {
        **ONE_DEVICE,
        "devices_per_trial": devices,
        "sharding": sharding,
        "sharding_group": group_size if groups > 1 else 1,
        "offload": "all" if on_host else "none",
        "gradient_reduction": REDUCED_IN[reduced_in],
    }


def precision_by_deepspeed(settings):
    """Returns the precision by the file's autocast over float32 weights."""
    autocast = settings.get("torch_autocast", {"enabled": True, "dtype": "float32"})
    assert autocast["enabled"]
    return {"float32": "fp32", "bfloat16": "bf16-mixed", "float16": "fp16-mixed"}[autocast["dtype"]]
