"""What torch.compile needs of the host beside Python packages: a compiler, and the headers of Python.

On CUDA Triton builds a launcher for each kernel with a C compiler; on a CPU inductor builds its
kernels with a C++ compiler. Both include Python.h. Looked up as they look; loads no torch. Source:
triton/runtime/build.py, torch/_inductor/cpp_builder.py, torch/_inductor/config.py (cpp.cxx)
"""

import os
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class BuildTool:
    name: str
    found: str | None
    """Where it is; None where it is missing."""
    way_out: str
    """What to do where it is missing."""


def c_compiler() -> BuildTool:
    """The one that Triton takes: what CC names, else gcc, else clang."""
    named = os.environ.get("CC")
    found = (
        shutil.which(named) if named is not None else shutil.which("gcc") or shutil.which("clang")
    )
    names_nothing = f"CC names {named!r}, which is not there: " if named is not None else ""
    way_out = f"{names_nothing}install gcc or clang, or let CC name a C compiler"
    return BuildTool(name="C compiler", found=found, way_out=way_out)


def cpp_compiler() -> BuildTool:
    """The one that inductor takes: what CXX names, else g++."""
    wanted = os.environ.get("CXX", "g++")
    way_out = f"install {wanted}, or let CXX name a C++ compiler"
    return BuildTool(name="C++ compiler", found=shutil.which(wanted), way_out=way_out)


def python_headers() -> BuildTool:
    file = Path(sysconfig.get_paths()["include"]) / "Python.h"
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return BuildTool(
        name="Python headers",
        found=str(file) if file.is_file() else None,
        way_out=f"{file} is missing: install {python}-dev (on Fedora {python}-devel), or use a Python that has it",
    )


def why_no_compilation(device_type: str) -> str | None:
    """Returns in one sentence why torch.compile cannot work for a device of that type; None if nothing is missing."""
    compiler = c_compiler() if device_type == "cuda" else cpp_compiler()
    for tool in (compiler, python_headers()):
        if tool.found is None:
            return f"torch.compile needs the {tool.name}; {tool.way_out}"
    return None
