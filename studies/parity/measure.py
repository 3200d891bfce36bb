"""Measures differences of first steps between configurations of one numerics class.

    python studies/parity/measure.py

Every configuration is compared with the plain training of its precision and optimizer, by the
losses of three steps and the gradient of each block at the first, as the parity check of a search
does it. Writes `results.json.xz` next to this file, or to `--out`, and resumes where it stopped.
Takes about twenty minutes on two CPU cores.
"""

import argparse
import datetime
import itertools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autotune.execution.local import LocalExecutor
from autotune.execution.prepared_folder import PREPARED
from autotune.execution.server.limits import time_limits
from autotune.execution.tasks import Prepare, Trace
from autotune.spec.config import LegalityContext, TrainingConfig, rule_violations
from autotune.spec.parity import NoTrace, ParityTrace
from autotune.spec.search_space import SearchSpace
from autotune.spec.study import StudyDefinition
from autotune.spec.workload import make_workload
from autotune.study.running.parity_gate import plain_form
from studies.compressed import read_json, write_json

HERE = Path(__file__).parent
GLOBAL_BATCH = 8
GPT2 = {
    "model_type": "gpt2",
    "n_layer": 4,
    "n_embd": 128,
    "n_head": 4,
    "vocab_size": 256,
    "n_positions": 128,
}


def dropout(share: float) -> dict[str, float]:
    return dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), share)


MODELS = {
    "gpt": {},
    "deep-one": {"model": "deep-one"},
    "gpt2, no dropout": GPT2 | dropout(0.0),
    "gpt2, dropout 0.1": GPT2 | dropout(0.1),
    "gpt2, dropout 0.5": GPT2 | dropout(0.5),
}
PRECISIONS = ("fp32", "bf16-mixed", "bf16-true", "fp16-mixed")
OPTIMIZERS = ("adamw", "adafactor")


def configurations(name: str) -> list[TrainingConfig]:
    """Each technique alone, and some together; with dropout, where two are run for one, fewer."""
    variants: list[dict[str, Any]] = [
        {},
        {"micro_batch_size": 2},
        {"checkpointing": "block"},
        {"checkpointing": "selective"},
        {"checkpointing": "sqrt", "micro_batch_size": 2},
        {"optimizer_fusion": "foreach"},
        {"optimizer_fusion": "kernel"},
        {"optimizer_fusion": "backward"},
        {"compile": "block"},
        {"compile": "model"},
        {"compile": "block", "checkpointing": "block"},
        {"compile": "block", "memory_budget": 0.5},
        {"compile": "model", "memory_budget": 0.5},
        {"compile": "block", "memory_budget": 0.0, "optimizer_fusion": "backward"},
    ]
    made = []
    for precision, optimizer, variant in itertools.product(PRECISIONS, OPTIMIZERS, variants):
        if optimizer == "adafactor" and variant.get("compile"):
            continue  # compiled code ends where the optimizer begins
        chosen = {
            "precision": precision,
            "optimizer": optimizer,
            "micro_batch_size": GLOBAL_BATCH,
            **variant,
        }
        if "dropout 0." in name and (
            precision not in ("fp32", "bf16-mixed") or optimizer != "adamw"
        ):
            continue
        config = TrainingConfig(**chosen)
        if not rule_violations(config.to_dict(), LegalityContext(global_batch=GLOBAL_BATCH)):
            made.append(config)
    return made


def definition_of(name: str, folder: Path, executor: LocalExecutor) -> StudyDefinition:
    settings = dict(MODELS[name])
    if "model_type" in settings:
        file = folder / "config.json"
        file.write_text(json.dumps(settings))
        settings = {"model": str(file)}
    device, _ = executor.probe("cpu", {})
    return StudyDefinition(
        name="parity",
        workload=make_workload(
            "cpu", {"global_batch": GLOBAL_BATCH, "sequence_length": 128, **settings}
        ),
        space=SearchSpace(name="parity", techniques={}),
        device=device,
        unavailable={},
        cap_bytes=device.total_memory_bytes,
        seed=0,
        sampler="random",
    )


def largest(trace: ParityTrace, reference: ParityTrace) -> dict[str, float]:
    """Relative differences: of the losses at worst, and of the blocks' gradients at worst."""
    return {
        "loss": max(
            abs(mine / its - 1) for mine, its in zip(trace.losses, reference.losses, strict=True)
        ),
        "gradient": max(
            (trace.gradient_difference(reference, block) for block in trace.gradient_norms),
            default=0.0,
        ),
    }


def measure(
    name: str,
    executor: LocalExecutor,
    folder: Path,
    results: dict[str, Any],
    keep: Callable[[], None],
) -> None:
    definition = definition_of(name, folder, executor)
    study_folder = folder / name.replace(" ", "-").replace(",", "")
    executor.run(Prepare(workload=definition.workload, folder=study_folder / PREPARED))
    results.setdefault("device", definition.device.name)
    results.setdefault("versions", dict(definition.device.versions))

    def trace(config: TrainingConfig, *, with_dropout: bool = True) -> ParityTrace | NoTrace:
        training = executor.training(
            definition, config, study_folder=study_folder, enforce_cap=False
        )
        task = Trace(training=training, dropout=with_dropout)
        return executor.run(task, limits=time_limits(600.0))

    plain: dict[str, ParityTrace | NoTrace] = {}
    for config in configurations(name):
        key = f"{name}: {config.describe()}"
        if key in results["pairs"]:
            continue
        # Without random numbers the plain training serves every micro batch.
        size = config.micro_batch_size if "dropout 0." in name else 1
        form = plain_form(config, micro_batch_size=size)
        if form.fingerprint not in plain:
            plain[form.fingerprint] = trace(form)
        mine, reference = trace(config), plain[form.fingerprint]
        missing = [one for one in (mine, reference) if isinstance(one, NoTrace)]
        if isinstance(mine, NoTrace) or isinstance(reference, NoTrace):
            found: dict[str, Any] = {"failure": missing[0].message}
        else:
            found = largest(mine, reference)
        results["pairs"][key] = {"model": name, "config": config.to_dict(), **found}
        print(key, found, flush=True)
        keep()


def print_summary(results: dict[str, Any]) -> None:
    """The largest differences, by model, precision and what recomputes."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for pair in results["pairs"].values():
        config = pair["config"]
        kind = (
            "eager"
            if config["compile"] == "none"
            else "compiled"
            if config["memory_budget"] == 1.0
            else "budget < 1"
        )
        groups.setdefault((pair["model"], config["precision"], kind), []).append(pair)
    for (model, precision, kind), pairs in groups.items():
        known = [pair for pair in pairs if "failure" not in pair]
        if known:
            loss, gradient = (max(pair[what] for pair in known) for what in ("loss", "gradient"))
            print(
                f"{model:18s} {precision:11s} {kind:11s} {len(known):3d}  loss {loss:.1e}  "
                f"gradient {gradient:.1e}"
            )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=HERE / "results.json.xz")
    parser.add_argument("--read", type=Path, help="only print the summary of these results")
    options = parser.parse_args()
    if options.read is not None:
        print_summary(read_json(options.read))
        return
    out = options.out
    results = read_json(out) if out.exists() else {"date": str(datetime.date.today()), "pairs": {}}

    def keep() -> None:
        write_json(out, results)

    with tempfile.TemporaryDirectory() as folder, LocalExecutor(Path(folder)) as executor:
        for name in MODELS:
            measure(name, executor, Path(folder), results, keep)
    print_summary(results)


if __name__ == "__main__":
    main()
