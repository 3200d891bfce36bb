"""Predicts deep models whole and by extrapolation over their depth, and compares the two.

    python -m studies.depth_extrapolation.measure            # all cases
    python -m studies.depth_extrapolation.measure 13 14 15   # these ones

Writes results.json next to this file; cases that are not run keep their rows. The configs are
written down here from the sizes that the models' authors published; the attention of the gemma
models alternates between a window and all tokens.
"""

import fcntl
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from autotune.spec.prediction import Extrapolation

RESULTS = Path(__file__).with_name("results.json")

MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama of 8 B": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    },
    "qwen3 of 4 B, tied": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
    },
    "gpt2 of 1.5 B": {
        "model_type": "gpt2",
        "vocab_size": 50257,
        "n_embd": 1600,
        "n_layer": 48,
        "n_head": 25,
        "n_positions": 2048,
    },
    "gemma2 of 9 B, every second layer local": {
        "model_type": "gemma2",
        "vocab_size": 256000,
        "hidden_size": 3584,
        "intermediate_size": 14336,
        "num_hidden_layers": 42,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "sliding_window": 1024,
        "tie_word_embeddings": True,
    },
    "gemma3 of 27 B, five of six layers local": {
        "model_type": "gemma3_text",
        "vocab_size": 262208,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "sliding_window": 1024,
        "tie_word_embeddings": True,
    },
    "llama of 1.1 B": {
        "model_type": "llama",
        "vocab_size": 32000,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    },
    "gpt2 of 355 M": {
        "model_type": "gpt2",
        "vocab_size": 50257,
        "n_embd": 1024,
        "n_layer": 24,
        "n_head": 16,
        "n_positions": 2048,
    },
    "qwen3 of 0.6 B, tied": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
    },
    "gemma2 of 2.6 B, every second layer local": {
        "model_type": "gemma2",
        "vocab_size": 256000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "sliding_window": 1024,
        "tie_word_embeddings": True,
    },
}
OWN_MODELS: Mapping[str, Mapping[str, Any]] = {
    "deep-one of 1.6 B, 4 x 768 tokens": {
        "model": "deep-one",
        "layers": 32,
        "width": 2048,
        "heads": 16,
        "vocab_size": 8000,
        "sequence_length": 768,
        "global_batch": 4,
    },
    "gpt of 300 M, 4 x 1,024 tokens": {
        "model": "gpt",
        "layers": 24,
        "width": 1024,
        "heads": 16,
        "sequence_length": 1024,
        "global_batch": 4,
    },
}
DEEP_ONE, GPT = OWN_MODELS
LORA = {"adapter": "lora", "adapter_rank": 16, "precision": "bf16-mixed"}
BLOCK = {"checkpointing": "block"}
MODEL = {"compile": "model"}
MIXED, PURE = {"precision": "bf16-mixed"}, {"precision": "bf16-true"}
CASES: tuple[tuple[str, str, Mapping[str, Any]], ...] = (
    ("llama of 8 B", "cuda", {**LORA, **BLOCK, "base_weights": "bf16"}),
    ("llama of 8 B", "cuda", {**LORA, **BLOCK, "base_weights": "nf4"}),
    ("llama of 8 B", "cuda", {**LORA, "base_weights": "int8", "optimizer_fusion": "foreach"}),
    ("llama of 8 B", "cuda", {"precision": "bf16-true", **BLOCK, "optimizer_fusion": "backward"}),
    ("llama of 8 B", "cuda", {"precision": "bf16-mixed", "compile": "block"}),
    ("llama of 8 B", "cpu", {"checkpointing": "selective", "optimizer_fusion": "kernel"}),
    ("qwen3 of 4 B, tied", "cuda", {"precision": "bf16-mixed", **BLOCK}),
    ("qwen3 of 4 B, tied", "cuda", {**LORA, **BLOCK, "adapter_rank": 64, "base_weights": "bf16"}),
    ("gpt2 of 1.5 B", "cuda", {"precision": "bf16-true", "checkpointing": "every-2"}),
    ("gpt2 of 1.5 B", "cuda", {"precision": "bf16-mixed", "optimizer_fusion": "foreach"}),
    ("gemma2 of 9 B, every second layer local", "cuda", {"precision": "bf16-mixed", **BLOCK}),
    ("gemma2 of 9 B, every second layer local", "cuda", {**LORA, **BLOCK, "base_weights": "nf4"}),
    ("gemma3 of 27 B, five of six layers local", "cuda", {"precision": "bf16-true", **BLOCK}),
    (DEEP_ONE, "cpu", MODEL),
    (DEEP_ONE, "cuda", {**MODEL, **MIXED}),
    (GPT, "cpu", {**MODEL, **BLOCK, "optimizer_fusion": "kernel"}),
    ("llama of 1.1 B", "cpu", {**MODEL, **PURE}),
    ("gemma2 of 2.6 B, every second layer local", "cpu", MODEL),
    ("qwen3 of 0.6 B, tied", "cuda", {**MODEL, **PURE, "optimizer_fusion": "foreach"}),
    ("gpt2 of 355 M", "cuda", {**MODEL, **MIXED}),
    (GPT, "cuda", {**MODEL, **MIXED, "checkpointing": "selective"}),
    ("llama of 1.1 B", "cuda", {**MODEL, **MIXED}),
    (GPT, "cpu", {**MODEL, **MIXED, "optimizer_fusion": "foreach"}),
    (DEEP_ONE, "cuda", {**MODEL, **PURE, "checkpointing": "every-2"}),
)


def measure(number: int) -> dict[str, Any]:
    """Returns the two predictions of a case in this process, and the processor seconds of each."""
    # Imported only in the process of a case.
    import torch

    from autotune.models import transformers_network  # noqa: F401
    from autotune.predictor.predict import predict
    from autotune.spec.config import TrainingConfig
    from autotune.spec.model_file import model_name, sizes_of
    from autotune.spec.prediction import PredictionRequest
    from autotune.spec.workload import make_workload

    name, device, choices = CASES[number]
    if name in OWN_MODELS:
        settings = dict(OWN_MODELS[name])
    else:
        content = MODELS[name]
        settings = {"model": model_name(content), "model_config": dict(content)}
        settings.update(sizes_of(content), sequence_length=2048, global_batch=1)
    workload = make_workload(device, settings)
    config = TrainingConfig(**{"micro_batch_size": workload.global_batch, **choices})

    def timed(layers: int, *, extrapolates: Extrapolation) -> tuple[Any, float]:
        shallow = make_workload(device, {**settings, "layers": layers})
        started = time.process_time()
        request = PredictionRequest(
            workload=shallow, config=config, device=device, extrapolates=extrapolates
        )
        prediction = predict(request)
        torch.compiler.reset()
        return prediction, round(time.process_time() - started, 1)

    assert workload.layers is not None
    timed(2, extrapolates="nothing")  # torch and its libraries are slower the first time
    extrapolated, seconds = timed(workload.layers, extrapolates="any")
    whole, whole_seconds = timed(workload.layers, extrapolates="nothing")
    return {
        "model": name,
        "layers": workload.layers,
        "device": device,
        "config": dict(choices),
        "extrapolated_from": extrapolated.extrapolated_from,
        "checked_at": extrapolated.checked_at,
        "check_error_bytes": extrapolated.check_error_bytes,
        "extrapolated_bytes": extrapolated.peak_memory_bytes,
        "whole_bytes": whole.peak_memory_bytes,
        "is_within_bounds": extrapolated.lower_bound_bytes
        <= whole.peak_memory_bytes
        <= extrapolated.upper_bound_bytes,
        "phase": [extrapolated.phase, whole.phase],
        "processor_seconds": seconds,
        "whole_processor_seconds": whole_seconds,
    }


def main() -> None:
    if sys.argv[1:2] == ["--here"]:
        print(json.dumps(measure(int(sys.argv[2]))))
        return
    for number in map(int, sys.argv[1:] or range(len(CASES))):
        command = [sys.executable, "-m", "studies.depth_extrapolation.measure", "--here"]
        ended = subprocess.run([*command, str(number)], capture_output=True, text=True, check=False)
        row: dict[str, Any] = {"case": number}
        if ended.returncode:
            row["error"] = ended.stderr.strip().splitlines()[-2:]
        else:
            row.update(json.loads(ended.stdout.splitlines()[-1]))
        print(json.dumps(row), file=sys.stderr, flush=True)
        write(row)


def write(row: Mapping[str, Any]) -> None:
    """Replaces the row of a case in the results; several programs may do so at the same time."""
    with RESULTS.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        rows = [one for one in json.load(file)["rows"] if one["case"] != row["case"]]
        rows.append({**row, "date": datetime.now(UTC).date().isoformat()})
        about = {
            "python": platform.python_version(),
            "cores": os.cpu_count(),
            "rows": sorted(rows, key=lambda one: one["case"]),
        }
        file.seek(0)
        file.write(json.dumps(about, indent=1) + "\n")
        file.truncate()


if __name__ == "__main__":
    main()
