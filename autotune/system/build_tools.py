"""Find what torch.compile needs besides Python packages: a compiler and the Python headers.

On CUDA, Triton builds a launcher for each kernel with a C compiler; on a CPU, inductor builds its
kernels with a C++ compiler. Both include Python.h. The lookup follows triton/runtime/build.py,
torch/_inductor/cpp_builder.py and torch/_inductor/config.py (cpp.cxx). Does not import torch.
"""

import os
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class BuildTool:
    """A tool that torch.compile needs."""

    name: str
    found: str | None
    """Its path; None if it is missing."""
    hint: str
    """What to do if it is missing."""


def c_compiler() -> BuildTool:
    """Returns the compiler that Triton uses: the one in CC, else gcc, else clang."""
    hint = "install gcc or clang, or set CC to a C compiler"
    name = os.environ.get("CC")
    if name is None:
        found = shutil.which("gcc") or shutil.which("clang")
    else:
        found = shutil.which(name)
        hint = f"CC is {name!r}, which was not found: {hint}"
    return BuildTool(name="C compiler", found=found, hint=hint)


def cpp_compiler() -> BuildTool:
    """Returns the compiler that inductor uses: the one in CXX, else g++."""
    name = os.environ.get("CXX", "g++")
    hint = f"install {name}, or set CXX to a C++ compiler"
    return BuildTool(name="C++ compiler", found=shutil.which(name), hint=hint)


def python_headers() -> BuildTool:
    """Returns the header Python.h of this Python."""
    file = Path(sysconfig.get_paths()["include"]) / "Python.h"
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return BuildTool(
        name="Python headers",
        found=str(file) if file.is_file() else None,
        hint=f"{file} is missing: install {python}-dev (on Fedora {python}-devel), "
        "or use a Python that has it",
    )


def why_no_compilation(device_type: str) -> str | None:
    """Returns in a sentence why torch.compile cannot work on this type of device, or None."""
    compiler = c_compiler() if device_type == "cuda" else cpp_compiler()
    for tool in (compiler, python_headers()):
        if tool.found is None:
            return f"torch.compile needs the {tool.name}; {tool.hint}"
    return None


def first_compile_error(text: str) -> str:
    """Returns the first error that a C++ compiler printed, from a message of torch that quotes it.

    It begins with a colon, to follow the first line of the message, and is empty where `text` has
    none.
    """
    _, _, printed = text.partition("C++ compile error")[2].partition("\nOutput:\n")
    for line in printed.splitlines():
        if "error" in line:
            return f": {line.strip()}"
    return ""
