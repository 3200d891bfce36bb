"""The files of a profile, by hand: a trace, a page, a picture of the memory and generated code."""

import json

from autotune.reporting.profile_files import profile_folder, what_is_profiled

FILES = {
    "trace.json.gz": b"\x1f\x8b" + b"x" * 3000,
    "memory.html": b"<!doctype html><title>memory</title>",
    "snapshot.pickle": b"a pickle",
    "code/graph-0.py": b"print('<b>one</b>')\n",
    "code/graph-1.py": b"print(2)\n",
}


def write_profile(study_folder, record, *, workload, device_name, steps=3):
    """Write a profile of a trial to the work folder of its study, and return its folder."""
    folder = profile_folder(study_folder, record.number)
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    profiled = what_is_profiled(record, workload=workload, device_name=device_name)
    (folder / "profile.json").write_text(json.dumps({**profiled, "steps": steps}))
    return folder


def write_profile_of(result, number):
    """Write a profile of a trial of a result, and return its folder."""
    return write_profile(
        result.folder,
        result.trial(number),
        workload=result.workload,
        device_name=result.device.name,
    )
