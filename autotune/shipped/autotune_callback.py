"""A callback for Lightning's Trainer that applies what it has no key for.

    trainer:
      callbacks:
        - class_path: autotune_callback.AutotuneCallback
          init_args: {checkpointing: every-2, compile: block, learning_rate: 0.002}

Put it and `autotune_blocks.py` next to the script that starts training. It needs lightning, and no
autotune.
"""

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch._functorch.config
from autotune_blocks import change_method, prepare_blocks
from lightning.pytorch import Callback, LightningModule, Trainer


class AutotuneCallback(Callback):
    """Prepares process and model when training starts, sets the learning rate before every step."""

    def __init__(
        self,
        learning_rate: float,
        schedule: Literal["constant", "cosine"] = "constant",
        warmup_steps: int = 1,
        total_steps: int = 1,
        smallest_rate: float = 0.1,
        checkpointing: Literal[
            "none",
            "attention",
            "selective",
            "selective-2",
            "save-attention",
            "every-4",
            "every-2",
            "block",
            "sqrt",
        ] = "none",
        compile: Literal["none", "block", "model"] = "none",
        fp8: bool = False,
        int8: bool = False,
        memory_budget: float = 1.0,
        attention: Literal["auto", "flash", "efficient", "cudnn", "math"] = "auto",
        float32_matmul_precision: Literal["highest", "high"] = "highest",
        gradient_clipping: float | None = None,
        blocks: str | None = None,
    ) -> None:
        """Stores the settings. With the defaults, Lightning's behaviour does not change.

        Args:
            learning_rate: Learning rate of the optimizer after the warm-up.
            schedule: After the warm-up: constant, or a cosine down to smallest_rate at total_steps.
            warmup_steps: Steps over which the learning rate rises linearly.
            total_steps: Optimizer steps of the schedule.
            smallest_rate: Fraction of the learning rate at which a cosine ends.
            checkpointing: Parts of the blocks that are recomputed in the backward pass.
            compile: Unit of torch.compile: none, each block, or the whole training step.
            fp8: Whether the linear layers of the blocks compute in fp8. Needs torchao and
                trainer.precision bf16-mixed.
            int8: Whether they compute in int8. Needs trainer.precision bf16-mixed.
            memory_budget: torch.compile's activation memory budget.
            attention: Kernel of scaled_dot_product_attention.
            float32_matmul_precision: "high" lets matrix products of float32 use TF32.
            gradient_clipping: Largest norm of all gradients. For fused optimizers, with which
                Lightning rejects trainer.gradient_clip_val.
            blocks: Path of the list of transformer blocks, such as model.layers. By default it is
                found by the structure of the model.
        """
        super().__init__()
        self.learning_rate = learning_rate
        self.schedule = schedule
        self.warmup_steps = warmup_steps
        self.total_steps = total_steps
        self.smallest_rate = smallest_rate
        self.checkpointing = checkpointing
        self.compile = compile
        self.fp8 = fp8
        self.int8 = int8
        self.memory_budget = memory_budget
        self.attention = attention
        self.float32_matmul_precision = float32_matmul_precision
        self.gradient_clipping = gradient_clipping
        self.blocks = blocks

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self.set_process()
            self.prepare(pl_module)

    def set_process(self) -> None:
        """Makes settings that must hold before the first kernel runs and a graph is compiled."""
        torch.set_float32_matmul_precision(self.float32_matmul_precision)
        torch._functorch.config.activation_memory_budget = self.memory_budget
        torch.backends.cuda.enable_flash_sdp(self.attention in ("auto", "flash"))
        torch.backends.cuda.enable_mem_efficient_sdp(self.attention in ("auto", "efficient"))
        torch.backends.cuda.enable_cudnn_sdp(self.attention in ("auto", "cudnn"))
        torch.backends.cuda.enable_math_sdp(self.attention in ("auto", "math"))

    def prepare(self, module: LightningModule) -> None:
        """Applies checkpointing, 8-bit products and compilation to the module in place."""
        compiles_blocks = self.compile == "block"
        if self.checkpointing != "none" or compiles_blocks or self.fp8 or self.int8:
            prepare_blocks(
                module,
                checkpointing=self.checkpointing,
                compiled=compiles_blocks,
                fp8=self.fp8,
                int8=self.int8,
                path=self.blocks,
            )
        if self.compile == "model":
            # Logging cannot be traced by the compiler, so it stays outside the graph.
            change_method(module, "log", torch.compiler.disable)
            change_method(module, "log_dict", torch.compiler.disable)
            change_method(module, "training_step", _compiled)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        rate = self.rate(trainer.global_step)
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                if isinstance(group["lr"], torch.Tensor):
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Any
    ) -> None:
        if self.gradient_clipping is None:
            return
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            # A fused optimizer unscales in its step, which is too late for a norm.
            scaler.unscale_(optimizer)
        parameters = []
        for group in optimizer.param_groups:
            parameters += group["params"]
        torch.nn.utils.clip_grad_norm_(parameters, self.gradient_clipping, foreach=False)

    def rate(self, step: int) -> float:
        """Returns the learning rate of an optimizer step, counted from 0."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return self.learning_rate
        progress = (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps)
        amplitude = (1 - self.smallest_rate) / 2
        factor = self.smallest_rate + amplitude * (1 + math.cos(math.pi * progress))
        return self.learning_rate * factor


def _compiled(method: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(method, dynamic=False)
