"""Trainings as users write them, small enough to run: what is predicted of them, and what is true.

Each form builds a model, a batch, an optimizer and a step anew.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


@dataclass
class Form:
    model: Any
    batch: Any
    optimizer: Any
    step: Callable[..., Any] | None = None
    besides: Any = ()
    """What the step names itself and changes: nothing of it may be changed by a prediction."""


class DoubleConvolution(nn.Sequential):
    def __init__(self, before: int, after: int) -> None:
        super().__init__(
            nn.Conv2d(before, after, 3, padding=1),
            nn.BatchNorm2d(after),
            nn.ReLU(inplace=True),
            nn.Conv2d(after, after, 3, padding=1),
            nn.BatchNorm2d(after),
            nn.ReLU(inplace=True),
        )


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = DoubleConvolution(3, 16)
        self.middle = DoubleConvolution(16, 32)
        self.up = nn.ConvTranspose2d(32, 16, 2, stride=2)
        self.after = DoubleConvolution(32, 16)
        self.head = nn.Conv2d(16, 2, 1)

    def forward(self, images):
        wide = self.down(images)
        deep = self.middle(F.max_pool2d(wide, 2))
        return self.head(self.after(torch.cat([wide, self.up(deep)], dim=1)))


class VisionTransformer(nn.Module):
    def __init__(self, *, layers: int = 2, width: int = 64) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, stride=8)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, 17, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, pixels, labels=None):
        hidden = self.patches(pixels).flatten(2).transpose(1, 2)
        hidden = torch.cat([self.class_token.expand(len(hidden), -1, -1), hidden], dim=1)
        hidden = hidden + self.positions
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(hidden[:, 0])
        return {"logits": logits, "loss": F.cross_entropy(logits, labels)}


class LanguageModel(nn.Module):
    """Returns logits and loss, as nanoGPT does; head and embedding are one weight."""

    def __init__(self, *, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, width)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, 4 * width),
                nn.GELU(),
                nn.Linear(4 * width, width),
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 128, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.tril(torch.ones(32, 32)))

    def forward(self, tokens, targets=None):
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        logits = self.head(hidden)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def images(rows: int = 8) -> torch.Tensor:
    return torch.randn(rows, 3, 32, 32)


def tokens(rows: int = 8, length: int = 32) -> torch.Tensor:
    return torch.randint(0, 128, (rows, length))


def u_net() -> Form:
    def step(model, batch, optimizer):
        optimizer.zero_grad()
        prediction = model(batch["image"])
        F.cross_entropy(prediction, batch["mask"]).backward()
        optimizer.step()

    model = UNet()
    batch = {"image": images(), "mask": torch.randint(0, 2, (8, 32, 32))}
    return Form(model, batch, torch.optim.AdamW(model.parameters()), step)


def vision_transformer() -> Form:
    model = VisionTransformer()
    batch = {"pixels": images(), "labels": torch.randint(0, 10, (8,))}
    return Form(model, batch, torch.optim.AdamW(model.parameters()))


def adversarial() -> Form:
    generator = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 784), nn.Tanh())
    critic = nn.Sequential(nn.Linear(784, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1))
    real = torch.ones(16, 1)

    def step(models, batch, optimizers):
        made = models["generator"](torch.randn(len(batch), 16))
        optimizers["critic"].zero_grad()
        loss = F.binary_cross_entropy_with_logits(models["critic"](batch), real)
        loss = loss + F.binary_cross_entropy_with_logits(
            models["critic"](made.detach()), torch.zeros_like(real)
        )
        loss.backward()
        optimizers["critic"].step()
        optimizers["generator"].zero_grad()
        F.binary_cross_entropy_with_logits(models["critic"](made), real).backward()
        optimizers["generator"].step()

    optimizers = {
        "generator": torch.optim.Adam(generator.parameters(), betas=(0.5, 0.999)),
        "critic": torch.optim.Adam(critic.parameters(), betas=(0.5, 0.999)),
    }
    return Form({"generator": generator, "critic": critic}, torch.randn(16, 784), optimizers, step)


def preferences() -> Form:
    """DPO with a frozen reference model that the step names itself."""
    policy, reference = LanguageModel(), LanguageModel()
    reference.requires_grad_(False).eval()

    def log_probability(model, rows):
        logits, _ = model(rows[:, :-1], rows[:, 1:])
        return -F.cross_entropy(logits.transpose(1, 2), rows[:, 1:], reduction="none").sum(1)

    def step(model, batch, optimizer):
        chosen = log_probability(model, batch["chosen"])
        rejected = log_probability(model, batch["rejected"])
        with torch.no_grad():
            margin = log_probability(reference, batch["chosen"])
            margin -= log_probability(reference, batch["rejected"])
        loss = -F.logsigmoid(0.1 * (chosen - rejected - margin)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    batch = {"chosen": tokens(4), "rejected": tokens(4)}
    optimizer = torch.optim.AdamW(policy.parameters())
    return Form(policy, batch, optimizer, step, besides=[reference])


def llama() -> Form:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config)
    rows = tokens(4, 64)
    batch = {"input_ids": rows, "attention_mask": torch.ones_like(rows), "labels": rows}
    return Form(model.train(), batch, torch.optim.AdamW(model.parameters()))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, 32)
        self.recurrent = nn.LSTM(32, 64, num_layers=2, batch_first=True)
        self.head = nn.Linear(64, 128)

    def forward(self, rows):
        return self.head(self.recurrent(self.embedding(rows))[0])


def recurrent() -> Form:
    def step(model, batch, optimizer):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    model = Recurrent()
    return Form(model, tokens(), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), step)


def logging_step() -> Form:
    """Prints, logs, counts and keeps what it has seen."""
    model = LanguageModel()
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    losses: list[float] = []
    best = {"loss": 1e9}

    def step(model, batch, optimizer):
        logits, loss = model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
        if losses[-1] < best["loss"]:
            best["loss"] = losses[-1]
        accuracy = (logits.argmax(-1) == batch[:, 1:]).float().mean().item()
        print(f"loss {loss.item():.3f} {losses[-1]:.3f} accuracy {accuracy:.1%}")
        logging.getLogger(__name__).warning("rate %s, %s", scheduler.get_last_lr(), loss)

    return Form(model, tokens(), optimizer, step, besides=[losses, best, scheduler])


def tied_weights() -> Form:
    model = LanguageModel()
    rows = tokens()
    return Form(model, (rows, rows), torch.optim.AdamW(model.parameters(), amsgrad=True))


def batch_norm() -> Form:
    """A step of no parameter, by the names of its surroundings, as in a notebook."""
    model = nn.Sequential(
        DoubleConvolution(3, 16),
        nn.MaxPool2d(2),
        DoubleConvolution(16, 32),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(32 * 256, 10),
    )
    batch = (images(), torch.randint(0, 10, (8,)))
    optimizer = torch.optim.Adam(model.parameters())
    criterion = nn.CrossEntropyLoss()

    def step():
        optimizer.zero_grad()
        pixels, labels = batch
        criterion(model(pixels), labels).backward()
        optimizer.step()

    return Form(model, batch, optimizer, step)


def accumulation() -> Form:
    """Micro batches under autocast with a GradScaler, clipped, and checkpointed by hand."""
    model = LanguageModel()
    scaler = torch.amp.GradScaler("cpu")
    forward = model.layers[0].forward
    model.layers[0].forward = lambda hidden: checkpoint(forward, hidden, use_reentrant=False)

    def step(model, batch, optimizer):
        optimizer.zero_grad()
        for part in batch.chunk(4):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                _, loss = model(part[:, :-1], part[:, 1:])
            scaler.scale(loss / 4).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    return Form(model, tokens(), torch.optim.AdamW(model.parameters()), step)


def across_calls() -> Form:
    """The optimizer steps in every third call."""
    model = LanguageModel()
    calls = {"number": 0}

    def step(model, batch, optimizer):
        _, loss = model(batch, batch)
        (loss / 3).backward()
        calls["number"] += 1
        if calls["number"] % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()

    optimizer = torch.optim.AdamW(model.parameters())
    return Form(model, tokens(), optimizer, step, besides=[calls])


def early_return() -> Form:
    """Reads its loss in an `if`, which changes nothing that is allocated."""
    model = VisionTransformer()

    def step(model, batch, optimizer):
        loss = model(**batch)["loss"]
        if loss.item() > 100:
            raise SystemExit("diverged")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    batch = {"pixels": images(), "labels": torch.randint(0, 10, (8,))}
    return Form(model, batch, torch.optim.AdamW(model.parameters()), step)


def only_loss() -> Form:
    """A function that returns the loss, as Lightning's `training_step`."""
    model = UNet()

    def loss(model, batch):
        return F.mse_loss(model(batch)[:, :2], batch[:, :2])

    return Form(model, images(), torch.optim.RMSprop(model.parameters()), loss)


def moving_average() -> Form:
    """Keeps a moving average of the weights, and the loss before."""
    model = VisionTransformer()
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99)
    )
    kept: dict[str, Any] = {}

    def step(model, batch, optimizer):
        optimizer.zero_grad()
        kept["output"] = model(**batch)
        kept["output"]["loss"].backward()
        optimizer.step()
        average.update_parameters(model)

    batch = {"pixels": images(), "labels": torch.randint(0, 10, (8,))}
    optimizer = torch.optim.AdamW(model.parameters())
    return Form(model, batch, optimizer, step, besides=[average, kept])


FORMS: Mapping[str, Callable[[], Form]] = {
    "a U-Net": u_net,
    "a ViT": vision_transformer,
    "a GAN": adversarial,
    "DPO": preferences,
    "a Llama of transformers": llama,
    "an LSTM": recurrent,
    "a step that prints and logs": logging_step,
    "tied weights": tied_weights,
    "a convnet with BatchNorm": batch_norm,
    "accumulation with autocast, a scaler and checkpoints": accumulation,
    "an optimizer that steps every third call": across_calls,
    "a loss that is read in an if": early_return,
    "a function that returns the loss": only_loss,
    "a moving average of the weights": moving_average,
}
