"""The script as a whole: settings, model, techniques, data, and a training loop that is the trials' own.

torch, numpy and what reads the text are all it needs. The loop is that of
`autotune/training/step.py` and `autotune/training/trainer.py` without their measuring, with the
branches that the configuration does not take left out.
"""

import textwrap

from autotune.exporters import launch
from autotune.exporters.pytorch.data import data_pieces
from autotune.exporters.pytorch.models import loss_piece, model_pieces
from autotune.exporters.pytorch.pieces import Piece, banner, piece, together
from autotune.exporters.pytorch.techniques import autocast_dtype, technique_pieces, weights_dtype
from autotune.exporters.recipe import SMALLEST_RATE, Recipe, in_docstring
from autotune.units import format_size

FILE = "train.py"


def script(recipe: Recipe) -> str:
    """The text of the file."""
    pieces = [
        _settings(recipe),
        banner("techniques"),
        *technique_pieces(recipe),
        banner("training"),
        _training(recipe),
        _learning_rate(recipe),
        banner("model"),
        *model_pieces(recipe),
        loss_piece(),
        banner("text"),
        *data_pieces(recipe.workload),
        banner("program"),
        piece(_MAIN, "import argparse", "import math", "import time", "import torch"),
    ]
    return _header(recipe) + together(pieces)


def _header(recipe: Recipe) -> str:
    config, workload = recipe.config, recipe.workload
    early = launch.before_torch(config)
    measured = ""
    if recipe.peak_memory_bytes is not None:
        speed = (
            ""
            if recipe.tokens_per_second is None
            else f", {recipe.tokens_per_second:,.0f} tokens/s"
        )
        perplexity = "" if recipe.perplexity is None else f", perplexity {recipe.perplexity:.4g}"
        measured = f"\nMeasured there: peak memory {format_size(recipe.peak_memory_bytes)}{speed}{perplexity}.\n"
    environment = "\n".join(["import os", "", *early, "", ""]) if early else ""
    about = f"{workload.describe()}, trained as in {recipe.origin}: {config.describe()}."
    return f'''"""{textwrap.fill(in_docstring(about), width=115, break_long_words=False)}
{measured}
    python {FILE}                         # on the workload's own text
    python {FILE} --text my.txt           # on a text, jsonl, csv or parquet file, a folder, or a name on the hub
    python {FILE} --steps 2000 --save model.pt

Written by autotune, which it does not need. What makes up the configuration is in `apply_techniques`, `Updater`,
`train_step` and the settings below.
"""

from __future__ import annotations

{environment}'''


def _settings(recipe: Recipe) -> Piece:
    config, workload = recipe.config, recipe.workload
    made = launch.with_torch(config)
    imports = [
        "import torch",
        *(["import torch._functorch.config"] if config.memory_budget != 1.0 else []),
    ]
    numbers = f"""
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TEXT = {workload.dataset!r}
SEQUENCE_LENGTH = {workload.sequence_length}
GLOBAL_BATCH = {workload.global_batch}
\"\"\"Sequences of one optimizer step.\"\"\"
MICRO_BATCH = {config.micro_batch_size}
\"\"\"Sequences of one forward pass.\"\"\"
STEPS = {workload.steps}
EVALUATION_SEQUENCES = {workload.evaluation_sequences}
LEARNING_RATE = {workload.learning_rate_of(config.optimizer)}
LEARNING_RATE_WARMUP_STEPS = {workload.learning_rate_warmup_steps}
SEED = {workload.seed}
WEIGHTS_DTYPE = {weights_dtype(config)}
"""
    return piece("\n".join([*made, numbers.strip("\n")]), *imports)


def _learning_rate(recipe: Recipe) -> Piece:
    if recipe.workload.schedule == "constant":
        after, about = "    return LEARNING_RATE", "Linear rise, then constant."
        imports = []
    else:
        rest = 1 - SMALLEST_RATE
        after = (
            "    done = (step - LEARNING_RATE_WARMUP_STEPS) / max(1, steps - LEARNING_RATE_WARMUP_STEPS)\n"
            f"    return LEARNING_RATE * ({SMALLEST_RATE} + {rest / 2} * (1 + math.cos(math.pi * done)))"
        )
        about, imports = "Linear rise, then a cosine down to a tenth.", ["import math"]
    return piece(
        f'''
def learning_rate(step: int, *, steps: int) -> float:
    """{about}"""
    if step < LEARNING_RATE_WARMUP_STEPS:
        return LEARNING_RATE * (step + 1) / LEARNING_RATE_WARMUP_STEPS
{after}


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):  # compiled code must not see a new number every step
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
''',
        "import torch",
        *imports,
    )


def _training(recipe: Recipe) -> Piece:
    config, imports = (
        recipe.config,
        ["import torch", "from torch import Tensor, nn", "from typing import Any"],
    )
    contexts = []
    if (dtype := autocast_dtype(config)) is not None:
        contexts.append(f"torch.autocast(DEVICE, dtype={dtype})")
    if config.activation_offload == "cpu":
        contexts.append('offloaded("cpu", model=model)')
    call = "loss: Tensor = model(tokens, labels)"
    forward = f"    with {', '.join(contexts)}:\n        {call}" if contexts else f"    {call}"
    warm = ""
    if config.compile != "none":
        warm = "    summed_loss(model, held_out, 0)  # compiles the graph without gradients\n"
    return piece(
        _TRAINING.replace("FORWARD", forward).replace("WARM", warm), *imports, "import numpy"
    )


_TRAINING = '''
class Training:
    """The model with its techniques, and what updates it."""

    def __init__(self) -> None:
        torch.manual_seed(SEED)
        self.model: Any = make_model()
        self.model.train()
        torch.manual_seed(SEED)  # dropout begins as it does with weights from a file
        move_to_device(self.model)
        self.parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        """By the names they have before techniques wrap the model's parts."""
        apply_techniques(self.model)
        self.updater = Updater(list(self.parameters.values()))


@torch.no_grad()
def move_to_device(model: nn.Module) -> None:
    """Parameters are cast on the host, one by one; buffers keep their dtype."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(WEIGHTS_DTYPE).to(DEVICE)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(DEVICE)


def forward(model: Any, tokens: Tensor, labels: Tensor) -> Tensor:
    """Summed token loss of a micro batch."""
FORWARD
    return loss


def train_step(training: Training, batch: tuple[Tensor, Tensor], *, rate: float) -> float:
    """One optimizer step over the global batch; returns the mean token loss before it.

    Losses are divided by the labels of the global batch, so that gradients add up to its own whatever the micro batch.
    """
    training.updater.set_learning_rate(rate)
    valid_labels = max(1, int((batch[1] != IGNORED_LABEL).sum()))
    total = torch.zeros((), device=DEVICE)
    micro_batches = (part.to(DEVICE).split(MICRO_BATCH) for part in batch)
    for tokens, labels in zip(*micro_batches, strict=True):
        loss = forward(training.model, tokens.contiguous(), labels.contiguous()) / valid_labels
        training.updater.scale(loss).backward()
        total += loss.detach()
    training.updater.step()
    return total.item()


@torch.no_grad()
def evaluate(model: Any, held_out: Sequences) -> float:
    """Mean token loss on the held-out sequences, in the micro batches of the training."""
    model.eval()
WARM    parts = [summed_loss(model, held_out, start) for start in range(0, EVALUATION_SEQUENCES, MICRO_BATCH)]
    model.train()
    return sum(loss for loss, _ in parts) / max(1, sum(count for _, count in parts))


def summed_loss(model: Any, held_out: Sequences, start: int) -> tuple[float, int]:
    """Of a whole micro batch; rows beyond the held-out sequences are there for the shape only, without labels."""
    indices = numpy.arange(start, start + MICRO_BATCH)
    beyond = indices >= EVALUATION_SEQUENCES
    tokens, labels = held_out.batch(numpy.where(beyond, 0, indices))
    labels = labels.masked_fill(torch.from_numpy(beyond)[:, None], IGNORED_LABEL)
    loss = forward(model, tokens.contiguous().to(DEVICE), labels.contiguous().to(DEVICE))
    return loss.item(), int((labels != IGNORED_LABEL).sum())
'''

_MAIN = """
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", default=TEXT)
    parser.add_argument("--tokens", metavar="FOLDER", help="train.npy and held_out.npy of a study, in place of a text")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--save", metavar="FILE", help="where the trained weights go")
    asked = parser.parse_args()
    train, held_out = read_text(asked.tokens, asked.text)
    for part, sequences, needed in (("training", train, GLOBAL_BATCH), ("held-out", held_out, EVALUATION_SEQUENCES)):
        if len(sequences) < needed:
            raise SystemExit(f"the {part} text has {len(sequences)} sequences and {needed} are needed: use more text")
    training = Training()
    batches = training_order(sequences=len(train), global_batch=GLOBAL_BATCH, seed=SEED)
    started, timed_from = time.perf_counter(), min(5, asked.steps - 1)
    for step in range(asked.steps):
        if step == timed_from:
            started = time.perf_counter()
        loss = train_step(training, train.batch(next(batches)), rate=learning_rate(step, steps=asked.steps))
        if step % 10 == 9 or step == asked.steps - 1:
            print(f"step {step + 1}: loss {loss:.4f}", flush=True)
    seconds = (time.perf_counter() - started) / max(1, asked.steps - timed_from)
    print(f"{GLOBAL_BATCH * SEQUENCE_LENGTH / seconds:,.0f} tokens/s after the first {timed_from} steps")
    print(f"perplexity {math.exp(evaluate(training.model, held_out)):.4f}")
    if DEVICE == "cuda":
        print(f"peak memory {torch.cuda.max_memory_allocated() / 2**20:,.2f} MiB")
    if asked.save:
        torch.save({name: parameter.detach().cpu() for name, parameter in training.parameters.items()}, asked.save)


if __name__ == "__main__":
    main()
"""
