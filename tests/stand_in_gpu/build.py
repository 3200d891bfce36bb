"""Builds the stand-in's libraries for the torch that this Python has: `python build.py [FOLDER]`.

The folder is `stand_in_gpu` in the environment of this Python unless named. gcc and nm compile and
read; headers come with torch's nvidia packages. What torch needs of a library and our sources do
not define becomes a function that does nothing (cuBLAS) or says that it is not supported (driver,
runtime, NVML), so that every CUDA build of torch 2 finds the names it asks for.
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
"""Descriptors of tensors in memory, which Triton's kernels read and nobody else."""

NOT_SUPPORTED, NVML_NOT_SUPPORTED = 801, 3


class Environment:
    """Where torch's CUDA build and its headers are, and which versions they have."""

    def __init__(self) -> None:
        import torch

        if torch.version.cuda is None:
            sys.exit(
                f"torch {torch.__version__} of {sys.prefix} is no CUDA build: install one, as make test-cuda does"
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
            int(one) for one in re.findall(r"sm_(\d+)", torch._C._cuda_getArchFlags())
        )
        self.cuda_version = _cuda_version(
            [*headers, *(packages / "nvidia").glob("*/include"), self.triton / "include"]
        )

    def undefined_symbols(self) -> set[str]:
        """All that torch and NVIDIA's libraries look for elsewhere, such as cudaMalloc@libcudart.so.13."""
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
        """`body` is C, with {name} for the function's own."""
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
        if is_versioned:  # torch asks for names of this version
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
        one for one in symbols if re.fullmatch(r"cu[A-Z]\w+", one)
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
        versioned = [one.split("@") for one in symbols if re.search(rf"@{name}\.so\.\d+$", one)]
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
    """Names that torch and Triton look up while they run: they stand as text in what looks them up."""
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
