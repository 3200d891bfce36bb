"""Predicts what `adapter_kernels fused` saves, which axolotl has for LoRA unless its file says no.

python -m studies.public_files.lora_kernels
"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from autotune.predictor.predict import predict
from autotune.spec.config import TrainingConfig
from autotune.spec.prediction import PredictionRequest
from autotune.spec.workload import make_workload

LLAMA_3_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
GIB = 2**30


def peak_bytes(model: Path, **choices: Any) -> int:
    workload = make_workload(
        "cuda", {"model": str(model), "global_batch": 2, "sequence_length": 4096}
    )
    config = TrainingConfig(
        precision="bf16-mixed",
        adapter="lora",
        adapter_rank=16,
        attention="flash",
        loss="chunked",
        allocator="expandable",
        micro_batch_size=2,
        **choices,
    )
    request = PredictionRequest(
        workload=workload,
        config=config,
        device="cuda",
        compute_capability="9.0",
        extrapolates="any",
    )
    return predict(request).peak_memory_bytes


def main() -> None:
    with TemporaryDirectory() as folder:
        model = Path(folder) / "config.json"
        model.write_text(json.dumps(LLAMA_3_8B))
        for base_weights in ("bf16", "nf4"):
            for checkpointing in ("block", "none"):
                choices = {"base_weights": base_weights, "checkpointing": checkpointing}
                plain = peak_bytes(model, **choices)
                fused = peak_bytes(model, **choices, adapter_kernels="fused")
                share = 100 * (1 - fused / plain)
                print(
                    f"base_weights {base_weights}, checkpointing {checkpointing}: "
                    f"{plain / GIB:.2f} GiB, fused {fused / GIB:.2f} GiB, {share:.1f} % less",
                    flush=True,
                )


if __name__ == "__main__":
    main()
