"""Compares the peaks of `autotune.checkpoint` with its budgets, and its speed with `checkpointing`.

    OMP_NUM_THREADS=1 python studies/activation_budget/measure.py [NAME ...]

Writes results.json here, a model at a time; `--table` prints it as README.md has it. Peaks are of
real steps, by the allocator's events. The speed is compared in turn, a step of one and a step of
the other, by the CPU time of this process, which other programs disturb less than the clock.
"""

import copy
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from autotune.memory.cpu import CpuMeter
from autotune.models import build_model
from autotune.predictor.activation_budget import planner_of
from autotune.predictor.user_training import UserTraining
from autotune.shipped.blocks import find_blocks
from autotune.shipped.granularity import recompute_but, recompute_in_blocks
from autotune.shipped.tensors import held_tensors
from autotune.spec.workload import make_workload

SHARES = (0.25, 0.5, 0.75)
"""Budgets, between the peaks with every block recomputed and with none."""
GRAINS = ("attention", "selective", "save-attention", "every-2", "block")
ROUNDS = 11
RESULTS = Path(__file__).parent / "results.json"

Step = Callable[[nn.Module, Any, Any], None]


# -- models ----------------------------------------------------------------------------------------


class Mixer(nn.Module):
    """Patches mixed by two feed-forward parts, without attention (arXiv:2105.01601)."""

    def __init__(self, *, layers: int = 6, patches: int = 196, width: int = 256) -> None:
        super().__init__()
        self.embedding = nn.Linear(768, width)
        self.blocks = nn.ModuleList(MixerBlock(patches, width) for _ in range(layers))
        self.head = nn.Linear(width, 10)

    def forward(self, patches: Tensor) -> Tensor:
        hidden = self.embedding(patches)
        for block in self.blocks:
            hidden = block(hidden)
        return F.cross_entropy(self.head(hidden.mean(1)), torch.zeros(len(hidden)).long())


class MixerBlock(nn.Module):
    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.tokens = nn.Sequential(nn.Linear(patches, 128), nn.GELU(), nn.Linear(128, patches))
        self.channels = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.tokens(self.norms[0](hidden).transpose(1, 2)).transpose(1, 2)
        return hidden + self.channels(self.norms[1](hidden))


def of_autotune(model: str, **settings: Any) -> tuple[nn.Module, Any, Step]:
    workload = make_workload("cpu", {"model": model, **settings})
    rows = torch.randint(0, 256, (settings["global_batch"], settings["sequence_length"] + 1))

    def step(model: nn.Module, batch: Any, optimizer: Any) -> None:
        optimizer.zero_grad()
        (model(batch[:, :-1], batch[:, 1:]) / batch.numel()).backward()
        optimizer.step()

    return build_model(workload).model, rows, step


def encoder() -> tuple[nn.Module, Any, Step]:
    layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True, dropout=0.1)
    return nn.TransformerEncoder(layer, num_layers=5), torch.randn(4, 256, 256), squares


def mixer() -> tuple[nn.Module, Any, Step]:
    return Mixer(), torch.randn(8, 196, 768), plain


def squares(model: nn.Module, batch: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()


def plain(model: nn.Module, batch: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(batch).backward()
    optimizer.step()


def hugging_face(kind: str, **settings: Any) -> tuple[nn.Module, Any, Step]:
    sizes = {
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1024,
        "max_position_embeddings": 512,
    }
    config = CONFIG_MAPPING[kind](**{**sizes, **settings})
    tokens = torch.randint(0, 1024, (4, 256))

    def step(model: nn.Module, batch: Any, optimizer: Any) -> None:
        optimizer.zero_grad()
        model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
        optimizer.step()

    return AutoModelForCausalLM.from_config(config), tokens, step


GPT = {"width": 256, "heads": 4, "sequence_length": 256, "global_batch": 4}
MODELS: dict[str, Callable[[], tuple[nn.Module, Any, Step]]] = {
    "gpt": lambda: of_autotune("gpt", layers=6, **GPT),
    "gpt, 1,024 tokens": lambda: of_autotune(
        "gpt", layers=3, **{**GPT, "sequence_length": 1024, "global_batch": 1}
    ),
    "deep-one": lambda: of_autotune("deep-one", layers=6, **GPT),
    "TransformerEncoder of torch, dropout": encoder,
    "mixer without attention, dropout": mixer,
    "llama": lambda: hugging_face("llama"),
    "gpt2, dropout": lambda: hugging_face("gpt2"),
    "qwen3": lambda: hugging_face("qwen3", head_dim=64),
    "gemma2": lambda: hugging_face("gemma2", head_dim=64),
    "phi3": lambda: hugging_face("phi3", pad_token_id=0),
}


# -- measuring -------------------------------------------------------------------------------------


class Trained:
    """A model with its optimizer, which makes steps."""

    def __init__(self, made: tuple[nn.Module, Any, Step]) -> None:
        self.model, self.batch, self.step = copy.deepcopy(made)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self()

    def __call__(self) -> None:
        self.step(self.model, self.batch, self.optimizer)

    def cpu_seconds(self) -> float:
        began = time.process_time()
        self()
        return time.process_time() - began

    def peak_bytes(self) -> int:
        def resident() -> list[Tensor]:
            found = [*self.model.parameters(), *tree_leaves(self.batch)]
            found += [t for m in self.model.modules() for _, t in held_tensors(m)]
            found += [p.grad for p in self.model.parameters() if p.grad is not None]
            found += tree_leaves(list(self.optimizer.state.values()))
            return [one for one in found if isinstance(one, Tensor)]

        meter = CpuMeter()
        with meter.measuring(resident):
            self()
        return meter.reading().peak_memory_bytes


def blocks_of(model: nn.Module) -> Any:
    found = find_blocks(model)
    assert found is not None
    return found


def within(made: tuple[nn.Module, Any, Step], kept: Any) -> Trained:
    """Returns the training with a plan applied."""
    made = copy.deepcopy(made)
    for block, choice in zip(blocks_of(made[0]).blocks, kept, strict=True):
        recompute_but(block, choice)
    return Trained(made)


def with_grain(made: tuple[nn.Module, Any, Step], grain: str) -> Trained:
    made = copy.deepcopy(made)
    found = blocks_of(made[0])
    recompute_in_blocks(list(found.blocks), grain, attention_name=found.attention_name)
    return Trained(made)


def measured(name: str) -> dict[str, Any]:
    torch.manual_seed(0)
    made = MODELS[name]()
    model, batch, step = made
    optimizer = torch.optim.AdamW(model.parameters())
    training = UserTraining(model=model, batch=batch, optimizer=optimizer, step=step)
    began = time.process_time()
    planner = planner_of(training, gpu=None)
    whole, least = planner.whole.peak_memory_bytes, planner.least.peak_memory_bytes
    result: dict[str, Any] = {
        "whole": whole,
        "least": least,
        "measured_whole": Trained(made).peak_bytes(),
        "cpu_seconds_of_two_predictions": time.process_time() - began,
        "budgets": [],
        "grains": {},
    }
    for share in SHARES:
        budget = round(least + share * (whole - least))
        began = time.process_time()
        plan = planner.find(budget)
        seconds = time.process_time() - began
        result["budgets"].append(
            {
                "share": share,
                "budget": budget,
                "predicted": plan.prediction.peak_memory_bytes,
                "measured": within(made, plan.kept).peak_bytes(),
                "cpu_seconds": seconds,
            }
        )
        print(name, result["budgets"][-1], flush=True)
    for grain in GRAINS:
        if grain == "attention" and blocks_of(model).attention_name is None:
            continue
        other = with_grain(made, grain)
        peak = other.peak_bytes()
        ours = within(made, planner.find(peak).kept)
        times = [(other.cpu_seconds(), ours.cpu_seconds()) for _ in range(ROUNDS)]
        result["grains"][grain] = {
            "peak": peak,
            "peak_of_plan": ours.peak_bytes(),
            "cpu_seconds": statistics.median(theirs for theirs, _ in times),
            "speed": statistics.median(theirs / own for theirs, own in times),
            "speeds": [theirs / own for theirs, own in times],
        }
        print(name, grain, result["grains"][grain], flush=True)
    return result


def table(results: dict[str, Any]) -> str:
    """Returns the results as two tables: peaks by share of the way, and speeds by grain."""
    lines = ["| model | least, whole, MiB | " + " | ".join(map(str, SHARES)) + " |"]
    lines.append("|---" * (2 + len(SHARES)) + "|")
    for name, one in results.items():
        peaks = [f"{100 * each['measured'] / each['budget']:.2f} %" for each in one["budgets"]]
        sizes = f"{one['least'] / 2**20:.1f}, {one['whole'] / 2**20:.1f}"
        lines.append(f"| {name} | {sizes} | {' | '.join(peaks)} |")
    lines += ["", f"| model | {' | '.join(GRAINS)} |", "|---" * (1 + len(GRAINS)) + "|"]
    for name, one in results.items():
        cells = [
            f"{grain['speed']:.2f} ({min(grain['speeds']):.2f} to {max(grain['speeds']):.2f})"
            if (grain := one["grains"].get(kind))
            else ""
            for kind in GRAINS
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(names: list[str]) -> None:
    for name in names or MODELS:
        found = measured(name)
        results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        results[name] = found
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:] == ["--table"]:
        print(table(json.loads(RESULTS.read_text())))
    else:
        main(sys.argv[1:])
