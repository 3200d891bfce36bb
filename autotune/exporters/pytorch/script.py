"""The exported script as a whole: settings, techniques, training loop, model and data.

It needs only torch, numpy and the packages that read the text. The loop is that of
`autotune/training/step.py` and `autotune/training/trainer.py`, without measurements and without the
branches that the configuration does not take.
"""

import textwrap

from autotune.exporters import launch
from autotune.exporters.adapters import base_dtype, is_quantized
from autotune.exporters.bundle import Part, banner, code, joined, shipped
from autotune.exporters.devices import divides_weights
from autotune.exporters.pytorch.data import data_parts
from autotune.exporters.pytorch.devices import device_parts, distribute_lines
from autotune.exporters.pytorch.models import model_parts
from autotune.exporters.pytorch.techniques import autocast_dtype, technique_parts
from autotune.exporters.recipe import Recipe, in_docstring
from autotune.spec.config import TrainingConfig
from autotune.units import format_size

FILE = "train.py"


def start(recipe: Recipe) -> str:
    """Return what the command line begins with, before the name of the script."""
    if recipe.devices == 1:
        return "python"
    return f"torchrun --standalone --nproc-per-node {recipe.devices}"


def script(recipe: Recipe) -> str:
    """Return the text of the script."""
    parts = [
        _settings(recipe),
        banner("techniques"),
        *technique_parts(recipe),
        *([banner("devices"), *device_parts(recipe)] if recipe.devices > 1 else []),
        banner("training"),
        _training(recipe),
        code(_LEARNING_RATE),
        banner("model"),
        *model_parts(recipe),
        shipped("token_loss"),
        banner("text"),
        *data_parts(recipe.workload),
        banner("peak memory"),
        _peak_memory(recipe),
        banner("program"),
        _main(recipe),
    ]
    return _header(recipe) + joined(parts)


def _header(recipe: Recipe) -> str:
    config, workload = recipe.config, recipe.workload
    measured = ""
    if recipe.peak_memory_bytes is not None:
        measured = f"\nMeasured: peak memory {format_size(recipe.peak_memory_bytes)}"
        if recipe.tokens_per_second is not None:
            measured += f", {recipe.tokens_per_second:,.0f} tokens/s"
        if recipe.perplexity is not None:
            measured += f", perplexity {recipe.perplexity:.4g}"
        measured += ".\n"
    environment = ""
    before_torch = launch.before_torch(config)
    if before_torch:
        environment = "\n".join(["import os", "", *before_torch, "", ""])
    about = f"{workload.describe()}, trained as in {recipe.origin}: {config.describe()}."
    return f'''"""{textwrap.fill(in_docstring(about), width=97, break_long_words=False)}
{measured}
{_usage(recipe)}

Written by autotune, which it does not need. The configuration is in `apply_techniques`, `Updater`,
`train_step` and the settings below.
"""

from __future__ import annotations

{environment}'''


def _usage(recipe: Recipe) -> str:
    if recipe.devices == 1:
        return f"""\
    python {FILE}                     # on the text of the workload
    python {FILE} --text my.txt       # on a text, jsonl, csv or parquet file, a folder,
                                        # or a name on the hub
    python {FILE} --steps 2000 --save model.pt"""
    return f"""\
    {start(recipe)} {FILE}

trains on the text of the workload, with `--text my.txt` on a text, jsonl, csv or parquet file, a
folder, or a name on the hub. `--steps 2000 --save model.pt` trains longer and saves the weights.
With another number of processes each has another part of the global batch, which stays the same."""


def _settings(recipe: Recipe) -> Part:
    config, workload = recipe.config, recipe.workload
    process_settings = launch.with_torch(config)
    imports = ["import torch"]
    if config.memory_budget != 1.0:
        imports.append("import torch._functorch.config")
    constants = f"""
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TEXT = {workload.dataset!r}
SEQUENCE_LENGTH = {workload.sequence_length}
GLOBAL_BATCH = {workload.global_batch}
\"\"\"Sequences of one optimizer step.\"\"\"
MICRO_BATCH = {config.micro_batch_size}
\"\"\"Sequences of one forward pass.\"\"\"
STEPS = {workload.steps}
EVALUATION_SEQUENCES = {workload.evaluation_sequences}
LEARNING_RATE = {workload.learning_rate_of(config.optimizer, config.adapter)}
LEARNING_RATE_WARMUP_STEPS = {workload.learning_rate_warmup_steps}
SCHEDULE = "{workload.schedule}"
SEED = {workload.seed}
WEIGHTS_DTYPE = torch.{base_dtype(config)}
{_promise(recipe)}
\"\"\"Measured in the trial.\"\"\"
TRIAL = {f"{recipe.origin}, on {recipe.device_type}"!r}
"""
    return code("\n".join([*imports, *process_settings, constants.strip("\n")]))


def _promise(recipe: Recipe) -> str:
    if recipe.devices == 1:
        return f"PEAK_MEMORY_BYTES: int | None = {recipe.peak_memory_bytes}"
    return f"PEAK_MEMORY_BYTES_BY_RANK: tuple[int, ...] = {recipe.peak_memory_bytes_by_rank}"


_LEARNING_RATE = '''
from autotune.shipped.learning_rate import set_learning_rate
from autotune.shipped.schedule import scheduled_rate

def learning_rate(step: int, *, steps: int) -> float:
    """Returns the rate at `step`, counted from 0, of a training of `steps` steps."""
    return scheduled_rate(
        step,
        rate=LEARNING_RATE,
        steps=steps,
        warmup_steps=LEARNING_RATE_WARMUP_STEPS,
        schedule=SCHEDULE,
    )
'''


def _training(recipe: Recipe) -> Part:
    config = recipe.config
    contexts = []
    dtype = autocast_dtype(config)
    if dtype is not None:
        contexts.append(f"torch.autocast(DEVICE, dtype={dtype})")
    if config.activation_offload == "cpu":
        contexts.append("offloaded(model)")
    call = "loss: Tensor = model(tokens, labels)"
    forward = f"    with {', '.join(contexts)}:\n        {call}" if contexts else f"    {call}"
    text = _on_ranks(recipe) if recipe.devices > 1 else _on_one_device(config)
    imports = _TRAINING_IMPORTS
    if recipe.devices > 1 and not divides_weights(config):
        imports += "from torch.distributed.device_mesh import init_device_mesh\n"
    return code(
        imports
        + text.replace("FORWARD", forward)
        .replace("SUMMED_LOSS", _SUMMED_LOSS.strip("\n"))
        .replace("PREPARE", "move_to_device" if config.adapter == "none" else "adapt")
        .replace("FOR_EACH", _for_each_weight(config))
    )


_TRAINING_IMPORTS = """
from typing import Any
import numpy
import torch
from torch import Tensor, nn
"""


def _for_each_weight(config: TrainingConfig) -> str:
    if is_quantized(config):
        return _FOR_EACH_WEIGHT
    return _FOR_EACH_ON_HOST if divides_weights(config) else _FOR_EACH


def _on_one_device(config: TrainingConfig) -> str:
    warm_up = ""
    if config.compile != "none":
        warm_up = "    summed_loss(model, held_out, 0)  # compiles the graph without gradients\n"
    return f"{_TRAINING}\n{_FORWARD}\n{_TRAIN_STEP}\n{_EVALUATE}".replace("WARM_UP", warm_up)


def _on_ranks(recipe: Recipe) -> str:
    config = recipe.config
    before = ""
    if divides_weights(config):
        before = _RESHARD
    if config.compile != "none":
        before += (
            "    start = training.rank.index * MICRO_BATCH\n"
            "    summed_loss(training.module, held_out, start)  # compiles without gradients\n"
        )
    training = _TRAINING_ON_RANKS.replace("DISTRIBUTE", distribute_lines(recipe))
    evaluate = _EVALUATE_ON_RANKS.replace("BEFORE", before)
    return f"{training}\n{_FORWARD}\n{_TRAIN_STEP_ON_RANKS}\n{evaluate}"


_FOR_EACH = """\
    for parameter in model.parameters():
        parameter.data = parameter.data.to(WEIGHTS_DTYPE).to(DEVICE)"""
_FOR_EACH_ON_HOST = """\
    for parameter in model.parameters():  # which go to the device when they are divided
        parameter.data = parameter.data.to(WEIGHTS_DTYPE)"""
_FOR_EACH_WEIGHT = """\
    for parameter in model.parameters():
        if not is_quantized(parameter):
            parameter.data = parameter.data.to(WEIGHTS_DTYPE).to(DEVICE)"""

_TRAINING = '''
class Training:
    """The model with its techniques, and its updater."""

    def __init__(self) -> None:
        torch.manual_seed(SEED)
        self.model: Any = make_model()
        self.model.train()
        torch.manual_seed(SEED)  # dropout is the same as with weights from a file
        PREPARE(self.model)
        self.parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        """By their names before techniques wrap parts of the model."""
        apply_techniques(self.model)
        self.updater = Updater(list(self.parameters.values()))
'''

_TRAINING_ON_RANKS = '''
class Training:
    """The model with its techniques, divided among the ranks, and its updater."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        torch.manual_seed(SEED)
        self.model: Any = make_model()
        self.model.train()
        PREPARE(self.model)
        self.parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        """By their names before techniques wrap parts of the model."""
DISTRIBUTE
        self.updater = Updater(list(self.parameters.values()))
        torch.manual_seed(SEED + 1 + rank.index)  # each rank drops other activations
'''

_FORWARD = '''
@torch.no_grad()
def move_to_device(model: nn.Module) -> None:
    """Casts parameters on the host, one by one; buffers stay in their dtype."""
FOR_EACH
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(DEVICE)


def forward(model: Any, tokens: Tensor, labels: Tensor) -> Tensor:
    """Returns the summed token loss of a micro batch."""
FORWARD
    return loss
'''

_TRAIN_STEP = '''
def train_step(training: Training, batch: tuple[Tensor, Tensor], *, rate: float) -> float:
    """Makes one optimizer step on the global batch; returns the mean token loss before it.

    Losses are divided by the number of labels in the global batch, so that the gradients do not
    depend on the size of the micro batches.
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
'''

_TRAIN_STEP_ON_RANKS = '''
def train_step(training: Training, batch: tuple[Tensor, Tensor], *, rate: float) -> float:
    """Makes one optimizer step on the global batch; returns the mean token loss before it.

    Losses are divided by the number of labels in the global batch, so that the gradients do not
    depend on the size of the micro batches and on the number of ranks.
    """
    rank = training.rank
    training.updater.set_learning_rate(rate)
    # Ranks take the mean of their losses and gradients, which are parts of a sum.
    labels_per_rank = max(1, int((batch[1] != IGNORED_LABEL).sum())) / rank.size
    total = torch.zeros((), device=DEVICE)
    micro_batches = [rank.part_of(part).to(DEVICE).split(MICRO_BATCH) for part in batch]
    last = len(micro_batches[0]) - 1
    for index, (tokens, labels) in enumerate(zip(*micro_batches, strict=True)):
        with without_reduction(training.module, is_last=index == last):
            loss = forward(training.module, tokens.contiguous(), labels.contiguous())
            loss = loss / labels_per_rank
            training.updater.scale(loss).backward()
        total += loss.detach()
    training.updater.step()
    return rank.mean(total).item()
'''

_EVALUATE = '''
@torch.no_grad()
def evaluate(model: Any, held_out: Sequences) -> float:
    """Returns the mean token loss on the held-out sequences, in micro batches as in training."""
    model.eval()
WARM_UP    total_loss = 0.0
    total_labels = 0
    for start in range(0, EVALUATION_SEQUENCES, MICRO_BATCH):
        loss, valid_labels = summed_loss(model, held_out, start)
        total_loss += loss
        total_labels += valid_labels
    model.train()
    return total_loss / max(1, total_labels)


SUMMED_LOSS
'''

_RESHARD = """\
    # No backward pass follows, for which the weights of a block would have to stay.
    training.module.set_reshard_after_forward(True)
"""

_EVALUATE_ON_RANKS = '''
@torch.no_grad()
def evaluate(training: Training, held_out: Sequences) -> float:
    """Returns the mean token loss on the held-out sequences, in micro batches as in training."""
    rank = training.rank
    training.module.eval()
BEFORE    total_loss = 0.0
    total_labels = 0
    # Each rank has as many micro batches as the others; the last ones may have no labels.
    stride = MICRO_BATCH * rank.size
    end = -(-EVALUATION_SEQUENCES // stride) * stride
    for start in range(rank.index * MICRO_BATCH, end, stride):
        loss, valid_labels = summed_loss(training.module, held_out, start)
        total_loss += loss
        total_labels += valid_labels
    total_loss, total_labels = rank.add_up(total_loss, total_labels)
    return total_loss / max(1, total_labels)


SUMMED_LOSS
'''

_SUMMED_LOSS = '''
def summed_loss(model: Any, held_out: Sequences, start: int) -> tuple[float, int]:
    """Returns the summed loss and the number of labels of the micro batch that begins at `start`.

    The micro batch is always full; rows beyond the held-out sequences have no labels.
    """
    indices = numpy.arange(start, start + MICRO_BATCH)
    beyond = indices >= EVALUATION_SEQUENCES
    tokens, labels = held_out.batch(numpy.where(beyond, 0, indices))
    labels = labels.masked_fill(torch.from_numpy(beyond)[:, None], IGNORED_LABEL)
    loss = forward(model, tokens.contiguous().to(DEVICE), labels.contiguous().to(DEVICE))
    return loss.item(), int((labels != IGNORED_LABEL).sum())
'''


def _peak_memory(recipe: Recipe) -> Part:
    """Return what counts the peak of a step as trials do, on a CPU from the allocator's events."""
    config = recipe.config
    weights = "*training.model.parameters()"
    imports = ""
    if is_quantized(config):
        imports = "from autotune.shipped.quantized import tensors_behind\n"
        weights = "*(part for one in training.model.parameters() for part in tensors_behind(one))"
    return code(
        imports
        + _PEAK_MEMORY.replace("WEIGHTS", weights)
        .replace("OPTIMIZER", _owner_of_state(config))
        .replace("BUCKETS", _buckets(recipe))
    )


def _owner_of_state(config: TrainingConfig) -> str:
    """Return the optimizer whose state this process has."""
    if config.sharding == "zero1":
        return "training.updater.optimizer.optim"
    return "training.updater.optimizer"


def _buckets(recipe: Recipe) -> str:
    """Return what the communication has on the device between steps, as further entries."""
    is_replicated = recipe.devices > 1 and not divides_weights(recipe.config)
    return ", *training.buckets.buffers" if is_replicated else ""


_PEAK_MEMORY = '''
from collections.abc import Iterator
from contextlib import contextmanager
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function
from autotune.shipped.cpu_peak import peak_of, reallocate
from autotune.shipped.tensors import held_tensors

class PeakMemory:
    """The peak memory of training: of one step on a CPU, of all that follows it on a GPU."""

    bytes = 0

    @contextmanager
    def of_step(self, training: Training) -> Iterator[None]:
        """Must surround one step after the first, which makes the optimizer's state."""
        if DEVICE == "cuda":
            torch.cuda.reset_peak_memory_stats()
            yield
            return
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recording:
            resident_bytes = reallocate(resident_tensors(training))
            with record_function("measured step"):
                yield
        self.bytes, _ = peak_of(recording, within="measured step", alive_bytes=resident_bytes)

    def read(self) -> int:
        """Returns the bytes; 0 if they were not measured."""
        return torch.cuda.max_memory_allocated() if DEVICE == "cuda" else self.bytes


def resident_tensors(training: Training) -> list[Tensor]:
    """Returns what is there before and after a step: weights, buffers and optimizer state."""
    held = [tensor for module in training.model.modules() for _, tensor in held_tensors(module)]
    state = [
        value
        for of_parameter in OPTIMIZER.state.values()
        for value in of_parameter.values()
        if isinstance(value, Tensor)
    ]
    return [WEIGHTS, *held, *stateBUCKETS]
'''


def _main(recipe: Recipe) -> Part:
    if recipe.devices == 1:
        parts = _ON_ONE_DEVICE
    else:
        parts = {**_ON_RANKS, "SAVED": _SAVED_PARTS}
        if not divides_weights(recipe.config):
            parts["SAVED"] = _SAVED
        parts = {
            name: text.replace("COMMAND", f"{start(recipe)} {FILE}") for name, text in parts.items()
        }
    text = _MAIN
    for name, of_part in parts.items():
        text = text.replace(name, of_part)
    return code(text)


_MAIN = """
import argparse
import math
import time
import torch

def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", default=TEXT, help="file, folder or name on the hub")
    parser.add_argument(
        "--tokens", metavar="FOLDER", help="train.npy and held_out.npy of a study, not a text"
    )
    parser.add_argument("--steps", type=int, default=STEPS, help="number of optimizer steps")
    parser.add_argument("--save", metavar="FILE", help="file for the trained weights")
    arguments = parser.parse_args()
    steps = arguments.steps
READ    check_length("training", train, GLOBAL_BATCH)
    check_length("held-out", held_out, EVALUATION_SEQUENCES)
    training = TRAINING
    batches = training_order(sequences=len(train), global_batch=GLOBAL_BATCH, seed=SEED)
    timed_from = min(5, steps - 1)
    peak_memory = PeakMemory()
    started = time.perf_counter()
    for step in range(steps):
        if step == timed_from:
            started = time.perf_counter()
        batch = train.batch(next(batches))
        rate = learning_rate(step, steps=steps)
        if step == timed_from - 1:
            with peak_memory.of_step(training):
                loss = train_step(training, batch, rate=rate)
        else:
            loss = train_step(training, batch, rate=rate)
        if step % 10 == 9 or step == steps - 1:
            SAY(f"step {step + 1}: loss {loss:.4f}", flush=True)
    seconds = (time.perf_counter() - started) / max(1, steps - timed_from)
    tokens_per_second = GLOBAL_BATCH * SEQUENCE_LENGTH / seconds
    SAY(f"{tokens_per_second:,.0f} tokens/s after the first {timed_from} steps")
    SAY(f"perplexity {math.exp(evaluate(EVALUATED, held_out)):.4f}")
PEAKSSAVEDEND

def check_length(part: str, sequences: Sequences, needed: int) -> None:
    if len(sequences) < needed:
        raise SystemExit(
            f"the {part} text has {len(sequences)} sequences and {needed} are needed: use more text"
        )


if __name__ == "__main__":
    main()
"""

_SAVED = """\
    if arguments.save and training.rank.index == 0:
        weights = {name: weight.detach().cpu() for name, weight in training.parameters.items()}
        torch.save(weights, arguments.save)
"""
_SAVED_PARTS = """\
    if arguments.save:  # the ranks put each weight together, one after the other
        weights = {
            name: weight.full_tensor().detach().cpu()
            for name, weight in training.parameters.items()
        }
        if training.rank.index == 0:
            torch.save(weights, arguments.save)
"""
_ON_ONE_DEVICE = {
    "READ": "    train, held_out = read_text(arguments.tokens, arguments.text)\n",
    "TRAINING": "Training()",
    "SAY": "print",
    "EVALUATED": "training.model",
    "PEAKS": """\
    if peak_memory.read():
        print(f"peak memory {peak_memory.read() / 2**20:,.2f} MiB")
    if PEAK_MEMORY_BYTES is not None:
        print(f"promised    {PEAK_MEMORY_BYTES / 2**20:,.2f} MiB, measured in {TRIAL}")
""",
    "SAVED": _SAVED.replace(" and training.rank.index == 0", ""),
    "END": "",
}
"""{word in `_MAIN`: text}."""
_ON_RANKS = {
    "READ": """\
    rank = join(DEVICE, command="COMMAND")
    if GLOBAL_BATCH % (MICRO_BATCH * rank.size):
        raise SystemExit(
            f"micro batches of {MICRO_BATCH} sequences on each of {rank.size} devices do not add "
            f"up to the global batch of {GLOBAL_BATCH}: start another number of processes"
        )
    with rank.first_alone():
        train, held_out = read_text(arguments.tokens, arguments.text)
""",
    "TRAINING": "Training(rank)",
    "SAY": "rank.say",
    "EVALUATED": "training",
    "PEAKS": """\
    peaks = rank.gather(peak_memory.read())
    for index, peak in enumerate(peaks):
        if peak:
            rank.say(f"peak memory {peak / 2**20:,.2f} MiB on rank {index}")
    if len(PEAK_MEMORY_BYTES_BY_RANK) == rank.size:
        for index, peak in enumerate(PEAK_MEMORY_BYTES_BY_RANK):
            rank.say(f"promised    {peak / 2**20:,.2f} MiB on rank {index}, measured in {TRIAL}")
""",
    "END": "    torch.distributed.destroy_process_group()\n",
}
"""The same for several devices."""
