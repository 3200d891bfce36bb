"""The exported script: settings found by running its functions, not by reading its text."""

import math
import shlex
import sys
import tempfile
import types
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore

from autotune.exporters import launch
from tests.exporters.readers.adapters import adapter_settings, offload_of, trained_dtype
from tests.exporters.readers.devices import ONE_DEVICE, REDUCED_IN, by_fsdp2
from tests.exporters.readers.launcher import settings_of_this_process, settings_undone
from tests.exporters.readers.optimizers import BY_CLASS


@contextmanager
def loaded(export, *, name="train.py"):
    """The script as a module; what it sets of this process is undone afterwards."""
    with settings_undone(), tempfile.TemporaryDirectory() as folder:
        for file, text in export.files.items():
            (Path(folder) / file).write_text(text)
        module = types.ModuleType("exported")
        module.__file__ = str(Path(folder) / name)
        sys.modules["exported"] = module
        try:
            exec(compile(export.files[name], module.__file__, "exec"), module.__dict__)
            yield module
        finally:
            del sys.modules["exported"]


class ObjectiveEncoder(nn.Module):
    """In the place of a model: sees what a forward pass runs in."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, tokens, labels):
        device = tokens.device.type
        self.autocast = (
            torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        )
        self.is_offloaded = torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
        return self.weight.sum()


def read(export, version):
    words = shlex.split(export.command)
    devices = int(words[3]) if words[0] == "torchrun" else 1
    assert words[-1] == "train.py"
    with loaded(export) as script, fake_ranks(devices) as ranks:
        has_kernels = hasattr(script, "use_liger")
        script.use_liger = lambda model: None  # it needs a GPU
        training = script.Training(*(script.Rank(index=0, size=devices) for _ in ranks))
        observer = ObjectiveEncoder()
        script.forward(observer, torch.zeros(1, 2), torch.zeros(1, 2))
        updater = training.updater
        optimizer = getattr(updater.optimizer, "_single", updater.optimizer)
        optimizer = getattr(optimizer, "optim", optimizer)
        inner = getattr(optimizer, "_inner", optimizer)
        of_process = settings_of_this_process()
        return {
            **{name: of_process[name] for name in launch.PROCESS_SETTINGS},
            "precision": _precision(training, observer, optimizer),
            **with_experts(
                adapter_settings(training.model, training.model.blocks, "attention"),
                export.files["train.py"],
            ),
            "checkpointing": "none"
            if hasattr(script, "KEPT")
            else _checkpointing(script, training.model),
            "compile": _compiled(training.model),
            "optimizer": BY_CLASS[type(inner).__name__],
            "optimizer_fusion": _fusion(updater, inner),
            "micro_batch_size": script.MICRO_BATCH,
            "loss": "chunked" if "chunked" in training.model.token_loss.__name__ else "full",
            "feed_forward": feed_forward_of(training.model.blocks, script),
            "gradient_accumulation_dtype": accumulation_dtype_of(training.model),
            "activation_budget": activation_budget_of(training.model.blocks, script),
            "kernels": "liger" if has_kernels else "none",
            "activation_offload": "cpu" if observer.is_offloaded else "none",
            "learning_rate": script.learning_rate(
                script.LEARNING_RATE_WARMUP_STEPS, steps=script.STEPS
            ),
            "weight_decay": inner.defaults.get(
                "weight_decay", getattr(script, "WEIGHT_DECAY", None)
            ),
            "schedule": _schedule(script),
            "learning_rate_warmup_steps": _warmup(script),
            "steps": script.STEPS,
            "global_batch": script.GLOBAL_BATCH,
            "sequence_length": script.SEQUENCE_LENGTH,
            "gradient_clipping": _clipping(script),
            "seed": script.SEED,
            **_devices(training, devices, script.SEQUENCE_LENGTH),
            **offload_of(training.model.blocks),
        }


def accumulation_dtype_of(model):
    """Returns the format in which autograd adds up gradients, of a model with an optimizer."""
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    if all(weight.grad_dtype == weight.dtype for weight in trained):
        return "weights"
    assert {weight.grad_dtype for weight in trained} == {torch.float32}
    return "fp32"


def with_experts(settings, text):
    """The settings with what a script does to experts, of which the model of recipes has none."""
    settings = dict(settings)
    if "experts=experts" in text:
        settings["adapter_targets"] = "experts"
    if "def quantize_experts" in text:
        settings["base_weights"] += "-experts"
    return settings


@contextmanager
def fake_ranks(devices):
    """Yield the ranks to train as: none for one device. The others of a fake group do not exist."""
    if devices == 1:
        yield []
        return
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=devices)
    try:
        yield [0]
    finally:
        torch.distributed.destroy_process_group()


def _devices(training, devices, length):
    if devices == 1:
        return ONE_DEVICE
    if isinstance(training.module, FSDPModule):
        [parameter, *_] = training.parameters.values()
        parameters = training.model._get_fsdp_state()._fsdp_param_group
        policy = parameters.mp_policy
        assert not policy.cast_forward_inputs
        *groups, group_size = parameter.device_mesh.shape
        return by_fsdp2(
            reshards=parameters._reshard_after_forward,
            groups=math.prod(groups),
            group_size=group_size,
            reduced_in=policy.reduce_dtype,
            on_host=False,
            devices=devices,
        )
    divides = type(training.updater.optimizer).__name__ == "ZeroRedundancyOptimizer"
    return {
        **ONE_DEVICE,
        "devices_per_trial": devices,
        "sharding": "zero1" if divides else "ddp",
        "gradient_reduction": _reduced_in(training, length),
    }


def _reduced_in(training, length):
    """Returns the format in which gradients are added up in a backward pass."""
    seen = set()

    def spy(tensor, *args, **options):  # the work of a fake group has no result
        seen.add(tensor.dtype)
        future = torch.futures.Future()
        future.set_result([tensor])
        return SimpleNamespace(get_future=lambda: future)

    tokens = torch.zeros(1, length, dtype=torch.int64)
    with mock.patch("torch.distributed.all_reduce", spy):
        training.module(tokens, tokens).backward()
    [dtype] = seen
    return REDUCED_IN[dtype]


def _precision(training, observer, optimizer):
    if any(type(module).__name__ == "Float8Linear" for module in training.model.modules()):
        return "fp8"
    if any(type(module).__name__ == "Int8Linear" for module in training.model.modules()):
        return "int8-mixed"
    if trained_dtype(training.model) == torch.bfloat16:
        return (
            "bf16-stochastic"
            if type(optimizer).__name__ == "StochasticallyRounded"
            else "bf16-true"
        )
    if observer.autocast is not None:
        return {torch.bfloat16: "bf16-mixed", torch.float16: "fp16-mixed"}[observer.autocast]
    return "tf32" if torch.get_float32_matmul_precision() == "high" else "fp32"


def _checkpointing(script, model):
    blocks = list(model.blocks)
    changes = [_change_of(block) for block in blocks]
    if all(changes):
        if changes[0] is getattr(script, "_in_segments", None):
            return "sqrt"
        if changes[0] is script._recomputing(None):
            return "block"
        kept = {"selective-2": "alternating_contexts", "save-attention": "attention_contexts"}
        for name, contexts in kept.items():
            if changes[0] is script._recomputing(getattr(script, contexts)):
                return name
        return "selective"
    if any(changes):
        recomputed = [change is not None for change in changes]
        every = recomputed.index(True, 1)
        assert [index % every == 0 for index in range(len(blocks))] == recomputed
        return f"every-{every}"
    return "none" if _change_of(blocks[0].attention) is None else "attention"


def feed_forward_of(blocks, module):
    """Returns the choice that a script has made of the feed-forward part of every block."""
    tiled = getattr(module, "_in_tiles", None)
    names = {name for name, _ in blocks[0].named_children()} & {"feed_forward", "mlp"}
    changes = {_change_of(getattr(block, name)) for block in blocks for name in names}
    [is_tiled] = {tiled is not None and change is tiled for change in changes}
    return "tiled" if is_tiled else "whole"


def activation_budget_of(blocks, module):
    """Returns the budget of the plan `KEPT` of the recipes, if every block does as it says."""
    if not hasattr(module, "KEPT"):
        return "none"
    some = module.contexts_keeping(frozenset({("aten.mm", 0)}))
    recomputing = [module._recomputing(None), module._recomputing(some)]
    assert [_change_of(block) for block in blocks] == [*recomputing, recomputing[1], None]
    return "1GiB"


def _change_of(module):
    """Returns the last change of a method, but for that which brings weights from the host."""
    # FSDP2 makes a class of its own, on top of the changed one.
    before = getattr(type(module), "_before", None)
    if before is not None and getattr(before.change, "__name__", "") == "_with_its_weights":
        before = getattr(before.kind, "_before", None)
    return getattr(before, "change", None)


def _compiled(model):
    if model._compiled_call_impl is not None:
        return "model"
    compiled = [block._compiled_call_impl is not None for block in model.blocks]
    assert len(set(compiled)) == 1
    return "block" if compiled[0] else "none"


def _fusion(updater, optimizer):
    if type(updater.optimizer).__name__ == "SteppedInBackward":
        return "backward"
    if optimizer.defaults.get("fused"):
        return "kernel"
    return "foreach" if optimizer.defaults.get("foreach") else "none"


def _schedule(script):
    rates = [script.learning_rate(step, steps=script.STEPS) for step in range(script.STEPS)]
    return "constant" if rates[-1] == max(rates) else "cosine"


def _warmup(script):
    """Count the first steps whose rate is below the next one: all but the last of the warm-up."""
    rates = [script.learning_rate(step, steps=script.STEPS) for step in range(script.STEPS)]
    return next(step for step in range(len(rates)) if rates[step] == max(rates)) + 1


def _clipping(script):
    """The norm that a gradient of norm 1,000 is scaled down to."""
    parameter = nn.Parameter(torch.zeros(4))
    updater = script.Updater([parameter], nn.ParameterList([parameter]))
    parameter.grad = torch.full((4,), 500.0)
    if hasattr(updater, "scaler"):
        parameter.grad *= updater.scale(torch.ones(())).item()
    optimizer = updater.optimizer
    if type(optimizer).__name__ != "AdamW":
        return None
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(parameter.grad.norm().item()))
    updater.step()
    return None if seen[0] > 999 else round(seen[0], 3)
