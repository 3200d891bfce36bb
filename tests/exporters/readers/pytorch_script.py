"""The exported script: settings found by running its functions, not by reading its text."""

import sys
import tempfile
import types
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from tests.exporters.readers.adapters import adapter_settings, trained_dtype
from tests.exporters.readers.launcher import settings_of_this_process, settings_undone


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
    with loaded(export) as script:
        training, observer = script.Training(), ObjectiveEncoder()
        script.forward(observer, torch.zeros(1, 2), torch.zeros(1, 2))
        updater = training.updater
        optimizer = getattr(updater.optimizer, "_single", updater.optimizer)
        inner = getattr(optimizer, "_inner", optimizer)
        of_process = settings_of_this_process()
        return {
            **{name: of_process[name] for name in ("memory_budget", "attention", "allocator")},
            "precision": _precision(training, observer, optimizer),
            **adapter_settings(training.model, training.model.blocks, "attention"),
            "checkpointing": _checkpointing(script, training.model),
            "compile": _compiled(training.model),
            "optimizer": _OPTIMIZERS[type(inner).__name__],
            "optimizer_fusion": _fusion(updater, inner),
            "micro_batch_size": script.MICRO_BATCH,
            "loss": "chunked" if "chunked" in training.model.token_loss.__name__ else "full",
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
        }


_OPTIMIZERS = {
    "AdamW": "adamw",
    "AdamW8bit": "adamw-8bit",
    "Adafactor": "adafactor",
    "SGD": "sgd",
    "AdafactorFixedRate": "adafactor-fixed-rate",
    "PagedAdamW": "paged-adamw",
    "PagedAdamW8bit": "paged-adamw-8bit",
}


def _precision(training, observer, optimizer):
    if any(type(module).__name__ == "Float8Linear" for module in training.model.modules()):
        return "fp8"
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
    wrapped = [type(block).__name__ == "Checkpointed" for block in blocks]
    if all(wrapped):
        if type(blocks[0].module).__name__ == "Segment":
            return "sqrt"
        return "selective" if blocks[0]._options else "block"
    if any(wrapped):
        every = wrapped.index(True, 1)
        assert [index % every == 0 for index in range(len(blocks))] == wrapped
        return f"every-{every}"
    return "attention" if type(blocks[0].attention).__name__ == "Checkpointed" else "none"


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
    parameter.grad = torch.full((4,), 500.0)
    updater = script.Updater([parameter])
    if hasattr(updater, "scaler"):
        parameter.grad *= updater.scale(torch.ones(())).item()
    optimizer = updater.optimizer
    if type(optimizer).__name__ != "AdamW":
        return None
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(parameter.grad.norm().item()))
    updater.step()
    return None if seen[0] > 999 else round(seen[0], 3)
