"""Fine-tunes a small pretrained model by full training and by adapters, each at five rates.

    python studies/finetune/rates.py --out studies/finetune/results.json
    python studies/finetune/rates.py --table studies/finetune/results.json

The model, Llama-shaped with half a million parameters and bytes as tokens, is first trained on
the documentation of Python's standard library, by a plain loop. Then it is fine-tuned by searches
of autotune on another one, the standard library's own source code. A search has every kind of
training at one of five multiples of its default rate, so that each kind is compared at its own best
rate. Both texts are on every machine. The first form goes on where the file ends.
"""

import argparse
import json
import os
import platform
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import autotune
from autotune.shipped import python_docs
from autotune.spec.learning_rates import ADAPTER_FACTOR, FINE_TUNING

MULTIPLES = (1.0, 3.0, 10.0, 30.0, 100.0)
"""Of the default rates: 2e-5 for full training with AdamW, ten times as much for adapters."""
SEEDS = (0, 1)
STEPS = 120
PRETRAINING_STEPS = 1500
SEQUENCE_LENGTH, BATCH = 128, 8
CODE_BYTES = 2**21
SIZES = {
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 256,
    "max_position_embeddings": SEQUENCE_LENGTH,
    "tie_word_embeddings": True,
}
SPACE = """
[defaults]
precision = "bf16-mixed"

[[configurations]]
name = "full"

[[configurations]]
name = "lora, rank 8"
adapter = "lora"
base_weights = "bf16"

[[configurations]]
name = "lora, rank 8, attention only"
adapter = "lora"
adapter_targets = "attention"
base_weights = "bf16"

[[configurations]]
name = "lora, rank 32"
adapter = "lora"
adapter_rank = 32
base_weights = "bf16"

[[configurations]]
name = "lora, rank 8, nf4"
adapter = "lora"
base_weights = "nf4"

[[configurations]]
name = "dora, rank 8"
adapter = "dora"
base_weights = "bf16"
"""


# -- the pretrained model and the texts ------------------------------------------------------------


def pretrain(folder: Path) -> None:
    """Train a model on the documentation, and save it as transformers does."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    text = "\n".join(python_docs.standard_library_texts()).encode()
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=2e-3, total_steps=PRETRAINING_STEPS, pct_start=0.05
    )
    for step in range(PRETRAINING_STEPS):
        starts = torch.randint(0, len(tokens) - SEQUENCE_LENGTH - 1, (BATCH,))
        rows = torch.stack([tokens[start : start + SEQUENCE_LENGTH + 1] for start in starts])
        logits = model(input_ids=rows[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 500 == 0:
            print(f"pretraining: step {step}, loss {loss.item():.3f}", flush=True)
    model.save_pretrained(folder)


def write_code(file: Path) -> None:
    """Write source code of the standard library, the first files in alphabetical order."""
    library = Path(sysconfig.get_path("stdlib"))
    written = 0
    with file.open("w", encoding="utf-8") as text:
        for source in sorted(library.glob("*.py")):
            content = source.read_text(encoding="utf-8", errors="replace")
            text.write(content)
            written += len(content)
            if written > CODE_BYTES:
                return


# -- the searches ----------------------------------------------------------------------------------


def fine_tune(folder: Path, *, multiple: float, seed: int) -> Iterator[dict[str, Any]]:
    """Yield what each kind of training arrives at, all at `multiple` times their default rates."""
    full = FINE_TUNING["adamw"] * multiple
    rates = {"adamw": full, "lora/adamw": ADAPTER_FACTOR * full}
    result = autotune.search(
        max_mem="4GiB",
        space=str(folder / "kinds.toml"),
        model=str(folder / "model"),
        pretrained=True,
        dataset=str(folder / "code.txt"),
        sequence_length=SEQUENCE_LENGTH,
        global_batch=BATCH,
        steps=STEPS,
        evaluation_sequences=64,
        learning_rates=rates,
        schedule="cosine",
        seed=seed,
        trials=SPACE.count("[[configurations]]") + 1,
        confirm=False,
        storage=f"sqlite:///{folder}/studies.db",
        name=f"rate-{multiple:g}-seed-{seed}",
    )
    for trial in result.trials:
        if trial.name is None or trial.name.startswith("baseline"):
            continue
        yield {
            "kind": trial.name,
            "multiple": multiple,
            "seed": seed,
            "learning_rate": rates["adamw" if trial.config.adapter == "none" else "lora/adamw"],
            "perplexity_before": result.initial_perplexity,
            "perplexity": trial.perplexity,
            "outcome": trial.outcome,
            "peak_memory_bytes": trial.peak_memory_bytes,
        }


def run(out: Path) -> None:
    found: dict[str, Any] = {"machine": machine(), "trainings": []}
    if out.exists():
        found = json.loads(out.read_text())
    done = {(one["multiple"], one["seed"]) for one in found["trainings"]}
    folder = Path(tempfile.gettempdir()) / "autotune-finetune"
    folder.mkdir(exist_ok=True)
    if not (folder / "model").exists():
        pretrain(folder / "model")
    write_code(folder / "code.txt")
    (folder / "kinds.toml").write_text(SPACE)
    for seed in SEEDS:
        for multiple in MULTIPLES:
            if (multiple, seed) in done:
                continue
            for training in fine_tune(folder, multiple=multiple, seed=seed):
                print(training, flush=True)
                found["trainings"].append(training)
            out.write_text(json.dumps(found, indent=1) + "\n")


def machine() -> Mapping[str, Any]:
    packages = ("torch", "transformers", "peft", "torchao", "bitsandbytes")
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}",
        "versions": {name: metadata.version(name) for name in packages},
        "command": "python studies/finetune/rates.py --out studies/finetune/results.json",
    }


# -- the table -------------------------------------------------------------------------------------


def table(trainings: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a Markdown table: for each kind the perplexity at each multiple, mean over seeds."""
    multiples = sorted({one["multiple"] for one in trainings})
    yield f"| kind | {' | '.join(f'x {multiple:g}' for multiple in multiples)} | best rate |"
    yield "|---" * (len(multiples) + 2) + "|"
    for kind in dict.fromkeys(one["kind"] for one in trainings):
        means: dict[float, float] = {}
        cells = []
        for multiple in multiples:
            here = [o for o in trainings if (o["kind"], o["multiple"]) == (kind, multiple)]
            values = [one["perplexity"] for one in here if one["perplexity"] is not None]
            if not here or len(values) < len(here):
                cells.append("diverged" if here else "")
                continue
            means[multiple] = sum(values) / len(values)
            spread = (max(values) - min(values)) / 2
            cells.append(f"{means[multiple]:.3f} ±{spread:.3f}")
        best = min(means, key=lambda multiple: means[multiple])
        (rate,) = {
            one["learning_rate"]
            for one in trainings
            if (one["kind"], one["multiple"]) == (kind, best)
        }
        yield f"| {kind} | {' | '.join(cells)} | {rate:g} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="file of results, which is continued")
    parser.add_argument("--table", type=Path, help="file of results to print as a table")
    given = parser.parse_args()
    if given.out is not None:
        run(given.out)
    if given.table is not None:
        print("\n".join(table(json.loads(given.table.read_text())["trainings"])))


if __name__ == "__main__":
    main()
