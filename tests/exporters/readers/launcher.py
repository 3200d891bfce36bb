"""What a process has set once `autotune_launch.py` has begun, found by running it in a process of its own."""

import functools
import json
import subprocess
import sys

from autotune.exporters.launch import FILE

SCRIPT = """
import json, os, torch, torch._functorch.config
switches = {"flash": "flash", "efficient": "mem_efficient", "cudnn": "cudnn", "math": "math"}
on = [name for name, flag in switches.items() if getattr(torch.backends.cuda, f"{flag}_sdp_enabled")()]
print(json.dumps({
    "memory_budget": float(torch._functorch.config.activation_memory_budget),
    "attention": "auto" if len(on) > 1 else on[0],
    "allocator": "expandable" if "expandable" in os.environ.get("PYTORCH_ALLOC_CONF", "") else "default",
    "tf32": torch.get_float32_matmul_precision() == "high",
}))
"""


def process_settings(export):
    """memory_budget, attention, allocator and whether products use TF32; torch's own where there is no launcher."""
    text = export.files.get(FILE)
    if text is None:
        return {"memory_budget": 1.0, "attention": "auto", "allocator": "default", "tf32": False}
    return dict(_run(text))


@functools.cache
def _run(text):
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / FILE).write_text(text)
        (Path(folder) / "train.py").write_text(SCRIPT)
        done = subprocess.run(
            [sys.executable, FILE, "train.py"], cwd=folder, capture_output=True, text=True, check=True
        )
    return json.loads(done.stdout)
