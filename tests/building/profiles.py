"""The files of a profile, by hand: a trace, a page, a picture of the memory and generated code."""

import dataclasses
import json

from autotune.reporting.profile_files import profile_folder, what_is_profiled
from autotune.spec.prediction import CATEGORIES, Timeline
from autotune.spec.profile import OperatorUse, Profile

FILES = {
    "trace.json.gz": b"\x1f\x8b" + b"x" * 3000,
    "memory.html": b"<!doctype html><title>memory</title>",
    "snapshot.pickle": b"a pickle",
    "code/graph-0.py": b"print('<b>one</b>')\n",
    "code/graph-1.py": b"print(2)\n",
}

PROFILE = Profile(
    device="cpu",
    steps=3,
    step_seconds=1.0,
    profiled_step_seconds=2.0,
    phase_seconds={"forward": 0.6, "backward": 1.2, "step": 0.2},
    recomputed_seconds=0.0,
    idle_seconds=None,
    operators=(
        OperatorUse(
            name="aten::mm", calls=4, host_seconds=1.0, device_seconds=0.0, allocated_bytes=600
        ),
    ),
    other_operators=0,
    peak_memory_bytes=1000,
    peak_phase="forward",
    bytes_by_category={**dict.fromkeys(CATEGORIES, 0), "parameters": 400, "activations": 600},
    holders=(),
    timeline=Timeline(events=(), bytes_by_category={}, phases=(), peak_event=-1),
    compilation=None,
    files=(*FILES, "profile.json"),
    torch_version="2.13.0",
)


def write_profile(study_folder, record, *, workload, device_name, steps=3):
    """Write a profile of a trial to the work folder of its study, and return its folder."""
    folder = profile_folder(study_folder, record.number)
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    profiled = what_is_profiled(record, workload=workload, device_name=device_name)
    profile = dataclasses.replace(PROFILE, steps=steps).to_dict()
    (folder / "profile.json").write_text(json.dumps({**profiled, **profile}))
    return folder


def write_profile_of(result, number, *, steps=3):
    """Write a profile of a trial of a result, and return its folder."""
    return write_profile(
        result.folder,
        result.trial(number),
        workload=result.workload,
        device_name=result.device.name,
        steps=steps,
    )
