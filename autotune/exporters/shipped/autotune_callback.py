"""What a configuration of autotune asks for and Lightning has no key for, as a callback of its Trainer.

    trainer:
      callbacks:
        - class_path: autotune_callback.AutotuneCallback
          init_args: {checkpointing: every-2, compile: block, learning_rate: 0.002, warmup_steps: 10}

Keep it and `autotune_blocks.py` beside the script that starts training. Needs lightning and nothing
of autotune.
"""

import math
from typing import Any, Literal

import torch
import torch._functorch.config
from autotune_blocks import prepare_blocks
from lightning.pytorch import Callback, LightningModule, Trainer


class AutotuneCallback(Callback):
    """Sets up process and model when training starts, and the learning rate before every step."""

    def __init__(
        self,
        learning_rate: float,
        schedule: Literal["constant", "cosine"] = "constant",
        warmup_steps: int = 1,
        total_steps: int = 1,
        smallest_rate: float = 0.1,
        checkpointing: Literal[
            "none", "attention", "selective", "every-4", "every-2", "block", "sqrt"
        ] = "none",
        compile: Literal["none", "block", "model"] = "none",
        fp8: bool = False,
        memory_budget: float = 1.0,
        attention: Literal["auto", "flash", "efficient", "cudnn", "math"] = "auto",
        float32_matmul_precision: Literal["highest", "high"] = "highest",
        gradient_clipping: float | None = None,
        blocks: str | None = None,
    ) -> None:
        """What is not said is as Lightning does it by itself.

        Args:
            learning_rate: That of the optimizer once it has risen.
            schedule: After the rise: constant, or a cosine down to smallest_rate at total_steps.
            warmup_steps: Steps over which the learning rate rises linearly.
            total_steps: Optimizer steps of the schedule.
            smallest_rate: Share of the learning rate that a cosine ends at.
            checkpointing: Which parts of the blocks are recomputed in backward.
            compile: What torch.compile sees at once: nothing, each block, or the whole training step.
            fp8: Whether the products of the blocks are in fp8; needs torchao and trainer.precision bf16-mixed.
            memory_budget: torch.compile's activation memory budget.
            attention: Kernel behind scaled_dot_product_attention.
            float32_matmul_precision: "high" lets products of float32 use TF32.
            gradient_clipping: Largest norm of all gradients, where trainer.gradient_clip_val refuses a fused optimizer.
            blocks: Path of the list of transformer blocks, such as model.layers; found by structure if not said.
        """
        super().__init__()
        self.learning_rate, self.schedule, self.smallest_rate = (
            learning_rate,
            schedule,
            smallest_rate,
        )
        self.warmup_steps, self.total_steps = warmup_steps, total_steps
        self.checkpointing, self.compile, self.fp8, self.blocks = (
            checkpointing,
            compile,
            fp8,
            blocks,
        )
        self.memory_budget, self.attention = memory_budget, attention
        self.float32_matmul_precision = float32_matmul_precision
        self.gradient_clipping = gradient_clipping

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self.set_process()
            self.prepare(pl_module)

    def set_process(self) -> None:
        """Settings that must hold before the first kernel runs and the first graph is compiled."""
        torch.set_float32_matmul_precision(self.float32_matmul_precision)
        torch._functorch.config.activation_memory_budget = self.memory_budget
        torch.backends.cuda.enable_flash_sdp(self.attention in ("auto", "flash"))
        torch.backends.cuda.enable_mem_efficient_sdp(self.attention in ("auto", "efficient"))
        torch.backends.cuda.enable_cudnn_sdp(self.attention in ("auto", "cudnn"))
        torch.backends.cuda.enable_math_sdp(self.attention in ("auto", "math"))

    def prepare(self, module: LightningModule) -> None:
        by_block = self.compile == "block"
        if self.checkpointing != "none" or by_block or self.fp8:
            prepare_blocks(
                module,
                checkpointing=self.checkpointing,
                compiled=by_block,
                fp8=self.fp8,
                path=self.blocks,
            )
        if self.compile == "model":
            # What a module logs is no part of a graph: traced, it fails.
            module.__dict__["log"] = torch.compiler.disable(module.log)
            module.__dict__["log_dict"] = torch.compiler.disable(module.log_dict)
            module.__dict__["training_step"] = torch.compile(module.training_step, dynamic=False)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        rate = self.rate(trainer.global_step)
        for group in (
            group for optimizer in trainer.optimizers for group in optimizer.param_groups
        ):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Any
    ) -> None:
        if self.gradient_clipping is None:
            return
        if (scaler := getattr(trainer.precision_plugin, "scaler", None)) is not None:
            scaler.unscale_(
                optimizer
            )  # a fused optimizer does it in its step, which is too late for a norm
        parameters = [
            parameter for group in optimizer.param_groups for parameter in group["params"]
        ]
        torch.nn.utils.clip_grad_norm_(parameters, self.gradient_clipping, foreach=False)

    def rate(self, step: int) -> float:
        """Of an optimizer step, counted from 0."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return self.learning_rate
        done = (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps)
        amplitude = (1 - self.smallest_rate) / 2
        return self.learning_rate * (
            self.smallest_rate + amplitude * (1 + math.cos(math.pi * done))
        )
