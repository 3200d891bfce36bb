"""The eleven rows of the published table, predicted at full size on any machine, beside what was measured there.

    python studies/peak_memory/predict.py

Writes `predicted.json` here and prints the table. No GPU, no data and no 21 GiB of memory are needed.
"""

import json
import platform
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

from autotune.config import TrainingConfig
from autotune.executors.local import LocalExecutor
from autotune.space_file import load_space
from autotune.study.forecast import Forecaster
from autotune.workload import make_workload

GIB = 1024**3
FULL_SIZE = {
    "model": "deep-one",
    "layers": 32,
    "width": 2048,
    "heads": 16,
    "vocab_size": 8000,
    "sequence_length": 768,
    "global_batch": 4,
}
TABLE_TORCH = "2.8"
"""The release the table was measured with; its RMSNorm was not yet one kernel."""
PUBLISHED_GIB = {
    "control": 21.165,
    "bfloat16": 12.418,
    "checkpoint": 12.529,
    "compile": 19.712,
    "fused": 21.164,
    "fused_checkpoint": 7.425,
    "bf16_fused_chkpt": 3.975,
    "memory_budget_05": 13.561,
    "memory_budget_60": 15.636,
    "fused_memory_budget_05": 13.562,
    "bf16_budget_60": 6.709,
}
"""torch.cuda.max_memory_allocated on one RTX 4090; source: forgather, examples/tiny_experiments/peak_memory."""


def rows() -> dict[str, TrainingConfig]:
    space = load_space("peak_memory")
    fixed = {"optimizer": "adafactor-fixed-rate", "micro_batch_size": FULL_SIZE["global_batch"]}
    return {
        row["name"]: TrainingConfig(**{**{k: v for k, v in row.items() if k != "name"}, **fixed})
        for row in space.configurations
    }


def main() -> None:
    workload = make_workload("cpu", FULL_SIZE)
    results = []
    with TemporaryDirectory() as folder, LocalExecutor(Path(folder)) as executor:
        forecasters = [
            Forecaster(executor=executor, workload=workload, device_type="cuda", torch_version=release)
            for release in (TABLE_TORCH, None)
        ]
        for name, config in rows().items():
            as_published, today = (
                # Compiled code does not depend on the release: inductor fuses RMSNorm either way.
                forecaster.predict(config)
                for forecaster in (forecasters if config.compile == "none" else 2 * forecasters[:1])
            )
            measured = PUBLISHED_GIB[name]
            predicted = as_published.peak_memory_bytes / GIB
            results.append(
                {
                    "row": name,
                    "config": config.to_dict(),
                    "published_gib": measured,
                    "predicted_gib": predicted,
                    "ratio": predicted / measured,
                    "predicted_with_this_torch_gib": today.peak_memory_bytes / GIB,
                    "phase": as_published.phase,
                    "bytes_by_category": dict(as_published.bytes_by_category),
                    "seconds": as_published.seconds,
                }
            )
            held = ", ".join(
                f"{category.replace('_', ' ')} {size / GIB:.2f}"
                for category, size in as_published.bytes_by_category.items()
                if size > 0.05 * GIB
            )
            print(
                f"| {name} | {measured:.3f} | {predicted:.3f} | {predicted / measured:.3f} | "
                f"{today.peak_memory_bytes / GIB:.3f} | {as_published.phase} | {held} | {as_published.seconds:.0f} |",
                flush=True,
            )
    written = {
        "command": "python studies/peak_memory/predict.py",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.machine()}, Python {platform.python_version()}, torch {version('torch')}",
        "rows": results,
    }
    (Path(__file__).parent / "predicted.json").write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()
