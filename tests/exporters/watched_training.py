"""Trains with the exported file in the current folder and says what the trainer really did.

    python watched_training.py llamafactory REPORT.json
    python watched_training.py ms-swift REPORT.json

Runs where the trainer is installed (autotune need not be). The trainer gets a callback, and torch's
checkpoint and the forward pass of a layer are watched; nothing else of it is changed.
"""

import contextlib
import functools
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.utils.checkpoint
import yaml

IGNORED = -100
CHECKPOINTS = []
_checkpoint = torch.utils.checkpoint.checkpoint


@functools.wraps(_checkpoint)
def counted(function, *args, **options):
    CHECKPOINTS.append(options.get("use_reentrant"))
    return _checkpoint(function, *args, **options)


torch.utils.checkpoint.checkpoint = counted  # before the trainer and transformers import it

import transformers  # noqa: E402


class Watch(transformers.TrainerCallback):
    """Notes what the trainer has before the first step, and the rate of every step."""

    def __init__(self):
        self.report: dict[str, Any] = {"rates": []}
        self.report |= {"answers": set(), "products": set(), "logits": set()}

    def on_train_begin(self, args, state, control, *, model, optimizer, **others):
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        trained = [one for one in model.parameters() if one.requires_grad]
        frozen = [one for one in model.parameters() if not one.requires_grad]
        layers = base.model.layers
        adapted = {
            name.split(".")[1] for name, part in layers.named_modules() if hasattr(part, "lora_A")
        }
        model.register_forward_pre_hook(self._batch, with_kwargs=True)
        base.lm_head.register_forward_hook(self._head)
        layers[0].mlp.up_proj.register_forward_hook(self._product)
        optimizer = getattr(optimizer, "optimizer", optimizer)
        self.report |= {
            "trained": sum(one.numel() for one in trained),
            "trained_dtypes": sorted({str(one.dtype) for one in trained}),
            "frozen_dtypes": sorted({str(one.dtype) for one in frozen}),
            "adapted": sorted(adapted),
            "optimizer": f"{type(optimizer).__module__}.{type(optimizer).__name__}",
            "fused": bool(optimizer.defaults.get("fused")),
            "momentum": optimizer.defaults.get("momentum"),
            "weight_decay": max(group["weight_decay"] for group in optimizer.param_groups),
            "betas": optimizer.defaults.get("betas"),
            "attention": base.config._attn_implementation,
            "steps": state.max_steps,
            "accumulation": args.gradient_accumulation_steps,
            "max_grad_norm": args.max_grad_norm,
            "seed": args.seed,
        }
        CHECKPOINTS.clear()

    def _batch(self, _module, _args, inputs):
        for row in inputs["labels"].tolist():
            self.report["answers"].add(tuple(label for label in row if label != IGNORED))

    def _head(self, _module, _inputs, output):
        self.report["logits"].add(tuple(output.shape))

    def _product(self, _module, _inputs, output):
        self.report["products"].add(str(output.dtype))

    def on_step_begin(self, args, state, control, *, optimizer, **others):
        self.report["rates"].append(float(optimizer.param_groups[0]["lr"]))


def train_by_llamafactory():
    from llamafactory.train.tuner import run_exp

    run_exp(yaml.safe_load(Path("llamafactory.yaml").read_text()))


def train_by_ms_swift():
    from swift.cli.main import parse_yaml_args
    from swift.pipelines import pretrain_main

    arguments = ["ms_swift.yaml"]
    parse_yaml_args(arguments)  # as `swift pt` does
    pretrain_main(arguments)


def main(trainer, report):
    watch = Watch()
    train = transformers.Trainer.train

    def watched(trainer, *args, **options):
        trainer.add_callback(watch)
        return train(trainer, *args, **options)

    transformers.Trainer.train = watched
    with contextlib.redirect_stdout(sys.stderr):
        {"llamafactory": train_by_llamafactory, "ms-swift": train_by_ms_swift}[trainer]()
    found: dict[str, Any] = {
        name: sorted(value) if isinstance(value, set) else value
        for name, value in watch.report.items()
    }
    found |= {"checkpoints": len(CHECKPOINTS), "reentrant": any(CHECKPOINTS)}
    Path(report).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
