"""Builds the stand-in's libraries for the installed torch: `python build.py [FOLDER]`.

The default folder is `stand_in_gpu` in the environment of this Python. Needs gcc and nm; headers
come with torch's nvidia packages. A function that torch needs and our sources do not define is
generated: it does nothing (cuBLAS) or returns that it is not supported (driver, runtime, NVML). So
every CUDA build of torch 2 finds all names that it looks up.
"""

import re
import subprocess
import sys
from pathlib import Path

SOURCES = Path(__file__).parent / "libraries"
COMPILE = ("gcc", "-std=gnu11", "-O1", "-fPIC", "-Wall", "-Wextra", "-Wno-enum-conversion")

DRIVER_NAME = re.compile(rb"\bcu[A-Z][A-Za-z0-9_]{3,60}\b")
NVML_NAME = re.compile(rb"\bnvml[A-Z][A-Za-z0-9_]{3,60}\b")

SUCCEEDS = {"cuTensorMapEncodeTiled", "cuTensorMapEncodeIm2col"}
"""Functions for descriptors of tensors, which only Triton's kernels read."""

NOT_SUPPORTED, NVML_NOT_SUPPORTED = 801, 3


class Environment:
    """The paths and versions of torch's CUDA build and its headers."""

    def __init__(self) -> None:
        import torch

        if torch.version.cuda is None:
            sys.exit(
                f"torch {torch.__version__} of {sys.prefix} is not a CUDA build: install one, as "
                "make test-cuda does"
            )
        packages = Path(torch.__file__).parents[1]
        self.torch_libraries = packages / "torch" / "lib"
        self.users = [
            *self.torch_libraries.glob("*.so"),
            *(packages / "nvidia").glob("*/lib/*.so*"),
        ]
        headers = [file.parent for file in (packages / "nvidia").glob("*/include/driver_types.h")]
        self.triton = packages / "triton" / "backends" / "nvidia"
        if not headers:
            sys.exit(
                f"no CUDA headers in {packages / 'nvidia'}: install torch with its nvidia packages"
            )
        # Triton's headers for the few that the packages lack (crt/host_defines.h).
        self.include = [f"-I{folder}" for folder in (*headers, self.triton / "include")]
        self.capabilities = sorted(
            int(number) for number in re.findall(r"sm_(\d+)", torch._C._cuda_getArchFlags())
        )
        self.cuda_version = _cuda_version(
            [*headers, *(packages / "nvidia").glob("*/include"), self.triton / "include"]
        )

    def undefined_symbols(self) -> set[str]:
        """Returns what torch and NVIDIA's libraries import, such as cudaMalloc@libcudart.so.13."""
        symbols: set[str] = set()
        for library in self.users:
            listing = _output("nm", "--dynamic", "--undefined-only", str(library))
            symbols.update(line.split()[-1] for line in listing.splitlines() if line)
        return symbols


def _cuda_version(folders: list[Path]) -> int:
    for folder in folders:
        header = folder / "cuda.h"
        if header.exists() and (
            match := re.search(r"#define CUDA_VERSION (\d+)", header.read_text())
        ):
            return int(match[1])
    sys.exit(f"no cuda.h in {', '.join(map(str, folders))}")


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


class Library:
    """One library: our sources, and generated functions for the names that are missing in them."""

    def __init__(
        self, environment: Environment, folder: Path, *, name: str, sources: list[str]
    ) -> None:
        self._environment, self._folder, self._name = environment, folder, name
        self._parts = folder / "objects" / name
        self._parts.mkdir(parents=True, exist_ok=True)
        self._objects = [self._compile(SOURCES / f"{source}.c") for source in sources]

    def defined(self) -> set[str]:
        listing = _output("nm", "--defined-only", "--extern-only", *map(str, self._objects))
        return {line.split()[-1] for line in listing.splitlines() if len(line.split()) == 3}

    def add_missing(self, names: set[str], *, body: str, declaration: str = "") -> int:
        """Generates functions for the missing names; `body` is C, with {name} for the name.

        Returns how many there are.
        """
        missing = sorted(names - self.defined())
        lines = [
            declaration,
            *(f"int {name}(void) {{ {body.format(name=name)} }}" for name in missing),
        ]
        source = self._parts / f"generated_{len(self._objects)}.c"
        source.write_text("\n".join(lines) + "\n")
        self._objects.append(self._compile(source))
        return len(missing)

    def link(self, *with_libraries: str, is_versioned: bool = False) -> None:
        options = [f"-Wl,-soname,{self._name}"]
        if is_versioned:  # torch looks up names with this version
            script = self._parts / "versions.map"
            script.write_text(f"{self._name} {{ global: *; }};\n")
            options.append(f"-Wl,--version-script={script}")
        inputs = [
            *map(str, self._objects),
            f"-L{self._folder}",
            *(f"-l:{library}" for library in with_libraries),
        ]
        _run(
            "gcc",
            "-shared",
            *options,
            "-o",
            str(self._folder / self._name),
            *inputs,
            "-ldl",
            "-lpthread",
        )

    def _compile(self, source: Path) -> Path:
        target = self._parts / f"{source.stem}.o"
        facts = [
            f"-DCUDA_VERSION_SHOWN={self._environment.cuda_version}",
            f"-DCOMPILED_CAPABILITIES={','.join(map(str, self._environment.capabilities))}",
        ]
        _run(
            *COMPILE,
            *facts,
            f"-I{SOURCES}",
            *self._environment.include,
            "-c",
            str(source),
            "-o",
            str(target),
        )
        return target


def _run(*command: str) -> None:
    if subprocess.run(command, check=False).returncode != 0:
        sys.exit(f"the stand-in could not be built: {' '.join(command)}")


def build(folder: Path) -> None:
    environment = Environment()
    folder.mkdir(parents=True, exist_ok=True)
    symbols = environment.undefined_symbols()

    driver = Library(environment, folder, name="libcuda.so.1", sources=_DRIVER_SOURCES)
    names = _names_in(environment, DRIVER_NAME) | {
        symbol for symbol in symbols if re.fullmatch(r"cu[A-Z]\w+", symbol)
    }
    names = {name for name in names if not name.startswith("cuFile")}  # of a library of its own
    driver.add_missing(names & SUCCEEDS, body="return 0;")
    driver.add_missing(names, body=f"return {NOT_SUPPORTED};")
    driver.link()

    nvml = Library(
        environment,
        folder,
        name="libnvidia-ml.so.1",
        sources=["nvml", "topology", "ledger", "settings"],
    )
    nvml.add_missing(_names_in(environment, NVML_NAME), body=f"return {NVML_NOT_SUPPORTED};")
    nvml.link()

    for name, sources, body in (
        (
            "libcudart",
            ["runtime"],
            f'return stand_in_log_unsupported("{{name}}"), {NOT_SUPPORTED};',
        ),
        ("libcublas", ["cublas"], 'return stand_in_blas_routine("{name}");'),
        ("libcublasLt", ["cublasLt"], "return 0;"),
    ):
        versioned = [
            symbol.split("@") for symbol in symbols if re.search(rf"@{name}\.so\.\d+$", symbol)
        ]
        soname = versioned[0][1]
        library = Library(environment, folder, name=soname, sources=sources)
        declaration = (
            "int stand_in_log_unsupported(const char *); int stand_in_blas_routine(const char *);"
        )
        library.add_missing({symbol for symbol, _ in versioned}, body=body, declaration=declaration)
        library.link("libcuda.so.1", is_versioned=True)
        (folder / f"{name}.soname").write_text(soname)

    link = folder / "libcuda.so"  # what gcc finds for Triton
    link.unlink(missing_ok=True)
    link.symlink_to("libcuda.so.1")


_DRIVER_SOURCES = ["driver", "errors", "topology", "ledger", "settings"]


def _names_in(environment: Environment, pattern: re.Pattern[bytes]) -> set[str]:
    """Returns names that torch and Triton look up at run time, found as text in their files."""
    files = [environment.torch_libraries / "libc10_cuda.so", environment.triton / "driver.c"]
    found = {
        name.decode()
        for file in files
        if file.exists()
        for name in pattern.findall(file.read_bytes())
    }
    return {name for name in found if not name.endswith("_") and not name.endswith("_t")}


if __name__ == "__main__":
    build(Path(sys.argv[1] if len(sys.argv) > 1 else Path(sys.prefix) / "stand_in_gpu").absolute())
