"""Facts of a machine, each measured in a process of its own and printed as one JSON object.

    python studies/gpu/programs/facts.py NAME cuda:0 [--small]

Torch is imported once; each measurement is then made in a process forked from it, which is as a
trial is started: what a measurement takes of the device is gone with it, and one that crashes is
one result.
"""

import json
import os
import platform
import shutil
import signal
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from studies.gpu.used_memory import nvml_handle, used_bytes

PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "optuna",
    "datasets",
    "transformers",
    "torchao",
    "nvidia-ml-py",
    "autotune",
)
VARIABLES = (
    "CUDA",
    "PYTORCH",
    "NVIDIA",
    "TRITON",
    "TORCH",
    "CUBLAS",
    "CUDNN",
    "OMP_",
    "LD_LIBRARY",
    "AUTOTUNE",
)
FORK_SECONDS = 60


def in_fork(work: Callable[[], Any]) -> Any:
    """What `work` returns in a forked process, or {"failed": why}."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read_end)
        signal.alarm(FORK_SECONDS)
        try:
            found = work()
        except BaseException as error:
            found = {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"}
        with os.fdopen(write_end, "w") as pipe:
            json.dump(found, pipe)
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        text = pipe.read()
    _, status = os.waitpid(pid, 0)
    if text:
        return json.loads(text)
    return {"failed": f"the process ended with {os.waitstatus_to_exitcode(status)}"}


# -- the machine -----------------------------------------------------------------------------------


def machine(device: str, **_: Any) -> dict[str, Any]:
    """Returns versions, processors, memory, compilers, environment and the device's name."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in PACKAGES},
        },
        "system": platform.platform(),
        "processor": _processor(),
        "processors": os.cpu_count(),
        "memory_bytes": memory,
        "memory_limit": _text("/sys/fs/cgroup/memory.max"),
        "shared_memory_bytes": _free("/dev/shm"),
        "disk_bytes": _free("."),
        "compilers": {
            name: shutil.which(name) for name in ("cc", "gcc", "g++", "clang", "nvcc", "nvidia-smi")
        },
        "python_headers": (Path(sysconfig.get_paths()["include"]) / "Python.h").exists(),
        "environment": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)
        },
        "device": _named(device),
    }


def _named(device: str) -> dict[str, Any]:
    import torch

    def look() -> dict[str, Any]:
        if device == "cpu":
            return {"name": _processor(), "why": ""}
        found = torch.cuda.get_device_properties(device)
        return {"name": found.name, "why": "", "total_memory_bytes": found.total_memory}

    found = in_fork(look)
    return {"name": "", "why": found["failed"]} if "failed" in found else dict(found)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    lines = (_text("/proc/cpuinfo") or "").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _text(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def _free(path: str) -> int | None:
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None


def nvml(device: str, **_: Any) -> dict[str, Any]:
    """Returns NVML's facts of the device, asked one by one: some devices do not answer all."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return {"available": False, "why": str(error)}

    def handle() -> Any:
        return nvml_handle(device)

    questions: Mapping[str, Callable[[], Any]] = {
        "driver": pynvml.nvmlSystemGetDriverVersion,
        "nvml": pynvml.nvmlSystemGetNVMLVersion,
        "devices": pynvml.nvmlDeviceGetCount,
        "name": lambda: pynvml.nvmlDeviceGetName(handle()),
        "uuid": lambda: pynvml.nvmlDeviceGetUUID(handle()),
        "capability": lambda: pynvml.nvmlDeviceGetCudaComputeCapability(handle()),
        "used_bytes": lambda: pynvml.nvmlDeviceGetMemoryInfo(handle()).used,
        "free_bytes": lambda: pynvml.nvmlDeviceGetMemoryInfo(handle()).free,
        "total_bytes": lambda: pynvml.nvmlDeviceGetMemoryInfo(handle()).total,
        "reserved_bytes": lambda: (
            pynvml.nvmlDeviceGetMemoryInfo(handle(), version=pynvml.nvmlMemory_v2).reserved
        ),
        "compute_mode": lambda: pynvml.nvmlDeviceGetComputeMode(handle()),
        "mig": lambda: pynvml.nvmlDeviceGetMigMode(handle()),
        "persistence": lambda: pynvml.nvmlDeviceGetPersistenceMode(handle()),
        "ecc": lambda: pynvml.nvmlDeviceGetEccMode(handle()),
        "power_limit_milliwatts": lambda: pynvml.nvmlDeviceGetEnforcedPowerLimit(handle()),
        "sm_clock_mhz": lambda: pynvml.nvmlDeviceGetClockInfo(handle(), pynvml.NVML_CLOCK_SM),
        "most_sm_clock_mhz": lambda: pynvml.nvmlDeviceGetMaxClockInfo(
            handle(), pynvml.NVML_CLOCK_SM
        ),
        "temperature": lambda: pynvml.nvmlDeviceGetTemperature(
            handle(), pynvml.NVML_TEMPERATURE_GPU
        ),
        "utilization_percent": lambda: pynvml.nvmlDeviceGetUtilizationRates(handle()).gpu,
        "processes": lambda: len(pynvml.nvmlDeviceGetComputeRunningProcesses(handle())),
    }
    found: dict[str, Any] = {"available": True}
    for name, ask in questions.items():
        try:
            answer = ask()
        except Exception as error:  # an older driver lacks whole functions
            answer = f"not known: {error}"
        found[name] = answer.decode() if isinstance(answer, bytes) else answer
    return found


def properties(device: str, **_: Any) -> dict[str, Any]:
    """What torch says of the device."""
    import torch

    def look() -> dict[str, Any]:
        found = torch.cuda.get_device_properties(device)
        free, total = torch.cuda.mem_get_info(device)
        named = {name: str(getattr(found, name)) for name in dir(found) if not name.startswith("_")}
        return {
            **named,
            "capability": list(torch.cuda.get_device_capability(device)),
            "free_bytes": free,
            "total_bytes": total,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "architectures": torch.cuda.get_arch_list(),
            "bf16": torch.cuda.is_bf16_supported(including_emulation=False),
            "allocator": torch.cuda.get_allocator_backend(),
        }

    found = in_fork(look)
    return dict(found)


# -- memory outside the allocator ------------------------------------------------------------------


def context(device: str, **_: Any) -> dict[str, Any]:
    """Growth of the device's used memory while a context is made, and how long that takes."""
    import torch

    def look() -> dict[str, Any]:
        before, began = used_bytes(device), time.perf_counter()
        torch.cuda.set_device(device)
        torch.empty(1, device=device)
        torch.cuda.synchronize()
        seconds, after = time.perf_counter() - began, used_bytes(device)
        free, total = torch.cuda.mem_get_info(device)
        return {
            "by_nvml_bytes": None if before is None or after is None else after - before,
            "reserved_bytes": torch.cuda.memory_reserved(device),
            "used_by_all_bytes": total - free,
            "seconds": round(seconds, 3),
        }

    return {f"time {number}": in_fork(look) for number in (1, 2, 3)}


def outside(device: str, *, small: bool) -> dict[str, Any]:
    """Returns device bytes outside the allocator after the kernels of a technique ran."""
    import torch

    def after(work: Callable[[Any], None], setting: str = "") -> dict[str, Any]:
        if setting:
            torch._C._accelerator_setAllocatorSettings(setting)
        before = used_bytes(device)
        torch.cuda.set_device(device)
        torch.empty(1, device=device)
        torch.cuda.synchronize()
        work(torch)
        torch.cuda.synchronize()
        now, free_total = used_bytes(device), torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device)
        return {
            "outside_bytes": None if before is None or now is None else now - before - reserved,
            "used_by_all_less_reserved_bytes": free_total[1] - free_total[0] - reserved,
        }

    width = 64 if small else 1024
    found = {
        name: in_fork(lambda work=work: after(work))
        for name, work in kernels(device, width).items()
    }
    expandable = "expandable_segments:True"
    found["expandable segments"] = in_fork(
        lambda: after(lambda torch: torch.empty(2**25, device=device), expandable)
    )
    return found


def kernels(device: str, width: int) -> dict[str, Callable[[Any], None]]:
    """Kernels by the technique that needs them: each takes torch and runs them."""

    def product(dtype: str, *, tf32: bool = False) -> Callable[[Any], None]:
        def work(torch: Any) -> None:
            torch.backends.cuda.matmul.allow_tf32 = tf32
            x = torch.ones(
                width, width, device=device, dtype=getattr(torch, dtype), requires_grad=True
            )
            (x @ x).sum().backward()

        return work

    def fp8(torch: Any) -> None:
        x = torch.ones(width, width, device=device).to(torch.float8_e4m3fn)
        one = torch.ones((), device=device)
        torch._scaled_mm(x, x.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

    def attention(backend: str) -> Callable[[Any], None]:
        def work(torch: Any) -> None:
            attend(torch, device, backend, "bfloat16", (2, 4, 128, 64)).sum().backward()

        return work

    def optimizer(**options: Any) -> Callable[[Any], None]:
        def work(torch: Any) -> None:
            parameter = torch.nn.Parameter(torch.ones(width, width, device=device))
            made = torch.optim.AdamW([parameter], **options)
            parameter.grad = torch.ones_like(parameter)
            made.step()

        return work

    def model(torch: Any, compiled: bool = False) -> None:
        parts = torch.nn
        block = parts.Sequential(
            parts.Linear(width, 4 * width), parts.GELU(), parts.Linear(4 * width, width)
        )
        block = parts.Sequential(
            parts.Embedding(256, width), parts.LayerNorm(width), block, parts.Linear(width, 256)
        )
        block = block.to(device)
        call = torch.compile(block) if compiled else block
        tokens = torch.zeros(64, dtype=torch.long, device=device)
        with torch.autocast("cuda", torch.bfloat16):
            loss = parts.functional.cross_entropy(call(tokens), tokens)
        loss.backward()

    def pinned(torch: Any) -> None:
        host = torch.empty(2**22, pin_memory=True)
        host.copy_(torch.ones(2**22, device=device), non_blocking=True)

    return {
        "nothing but the context": lambda torch: None,
        "product fp32": product("float32"),
        "product tf32": product("float32", tf32=True),
        "product bf16": product("bfloat16"),
        "product fp16": product("float16"),
        "product fp8": fp8,
        **{
            f"attention {name}": attention(name)
            for name in ("auto", "flash", "efficient", "cudnn", "math")
        },
        "optimizer loop": optimizer(foreach=False),
        "optimizer foreach": optimizer(foreach=True),
        "optimizer kernel": optimizer(fused=True),
        "a model's step": model,
        "a model's step, compiled": lambda torch: model(torch, compiled=True),
        "offload to pinned memory": pinned,
    }


# -- forks -----------------------------------------------------------------------------------------


def forks(device: str, **_: Any) -> dict[str, Any]:
    """Checks that the trial server has not touched CUDA and that two trials in a row work."""
    from tempfile import TemporaryDirectory

    from autotune.execution.server.client import TrialServer
    from autotune.execution.tasks import CheckDevice

    with (
        TemporaryDirectory() as folder,
        TrialServer(log_file=Path(folder) / "server.log") as server,
    ):

        def check(number: int) -> str:
            began = time.monotonic()
            future = server.submit(
                CheckDevice(device=device), log_file=Path(folder) / f"{number}.log"
            )
            try:
                future.result(timeout=FORK_SECONDS)
                return f"works, {time.monotonic() - began:.2f} s"
            except Exception as error:
                return f"FAILED: {type(error).__name__}: {error}"

        trials = [check(number) for number in (1, 2)]
        found: dict[str, Any] = {"first trial": trials[0], "second trial": trials[1]}
        pid = server.pid
        opened = [os.path.realpath(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
        maps = Path(f"/proc/{pid}/maps").read_text()
        libraries = {
            line.split("/")[-1]
            for line in maps.splitlines()
            if "libcuda.so" in line or "libnvidia-" in line
        }
        found["devices that the server holds open"] = sorted(
            {name for name in opened if "/dev/nvidia" in name}
        )
        found["driver libraries in the server"] = sorted(libraries)
        is_refused = any("re-initialize" in words for words in trials)
        found["clean"] = not is_refused and not found["devices that the server holds open"]
        found["threads of the server"] = len(list(Path(f"/proc/{pid}/task").iterdir()))
        found["the server is a process on the device"] = _is_on_device(pid, device)
        return found


def _is_on_device(pid: int, device: str) -> bool | str:
    import pynvml

    try:
        return pid in [
            process.pid
            for process in pynvml.nvmlDeviceGetComputeRunningProcesses(nvml_handle(device))
        ]
    except Exception as error:  # no GPU, or a container whose process numbers are its own
        return f"not known: {error}"


# -- inside the allocator --------------------------------------------------------------------------


def workspaces(device: str, **_: Any) -> dict[str, Any]:
    """Returns bytes that stay allocated after the first products of both passes, by dtype."""
    import torch

    def look(dtype: Any, tf32: bool) -> dict[str, Any]:
        torch.backends.cuda.matmul.allow_tf32 = tf32
        x = torch.zeros(64, 64, device=device, dtype=dtype)
        bias = torch.zeros(64, device=device, dtype=dtype)
        leaf = x.clone().requires_grad_()

        def growth(work: Callable[[], Any]) -> int:
            before = torch.cuda.memory_allocated(device)
            work()
            torch.cuda.synchronize()
            return torch.cuda.memory_allocated(device) - before

        def forward_and_backward() -> None:
            (leaf @ leaf).sum().backward()
            leaf.grad = None

        found = {
            "forward_bytes": growth(lambda: x @ x),
            "again_bytes": growth(lambda: x @ x),
            "with_bias_bytes": growth(lambda: torch.nn.functional.linear(x, x, bias)),
            "backward_thread_bytes": growth(forward_and_backward),
        }
        torch.cuda.synchronize()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            found["another_stream_bytes"] = growth(lambda: x @ x)
        return found

    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    found = {
        name: in_fork(lambda dtype=dtype: look(dtype, False)) for name, dtype in dtypes.items()
    }
    found["tf32"] = in_fork(lambda: look(torch.float32, True))
    return found


CHOICES = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn", 4: "overrideable", -1: "error"}
SHAPES = ((16, 12, 1024, 64), (4, 16, 768, 128), (2, 32, 4096, 128), (8, 8, 512, 64))
"""Sequences, heads, tokens, size of a head: the default model on CUDA, the published table's, a
long and a short."""
SMALL_SHAPES = ((2, 2, 64, 32), (1, 2, 128, 64))


def attend(
    torch: Any, device: str, backend: str, dtype: str, shape: Sequence[int], *, mask: bool = False
) -> Any:
    """Returns scaled_dot_product_attention of new tensors with gradients; causal or with a mask."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backends = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "math": SDPBackend.MATH,
    }
    tensors = [
        torch.ones(*shape, device=device, dtype=getattr(torch, dtype), requires_grad=True)
        for _ in range(3)
    ]
    bias = None
    if mask:
        bias = torch.zeros(1, 1, shape[2], shape[2], device=device, dtype=getattr(torch, dtype))
    call = torch.nn.functional.scaled_dot_product_attention
    if backend == "auto":
        return call(*tensors, attn_mask=bias, is_causal=not mask)
    with sdpa_kernel([backends[backend]]):
        return call(*tensors, attn_mask=bias, is_causal=not mask)


def attention_choice(device: str, *, small: bool) -> dict[str, Any]:
    """Returns the kernel that torch chooses by dtype and shape, and those that its profiler saw."""
    import torch

    def look(dtype: str) -> dict[str, Any]:
        found = {}
        for shape in SMALL_SHAPES if small else SHAPES:
            q = torch.zeros(*shape, device=device, dtype=getattr(torch, dtype), requires_grad=True)
            bias = torch.zeros(1, 1, shape[2], shape[2], device=device, dtype=q.dtype)
            causal = CHOICES[int(torch._fused_sdp_choice(q, q, q, None, 0.0, True))]
            masked = CHOICES[int(torch._fused_sdp_choice(q, q, q, bias, 0.0, False))]
            found["x".join(map(str, shape))] = f"causal {causal}, with a mask {masked}"
        return found

    def names(dtype: str) -> list[str]:
        from torch.profiler import ProfilerActivity, profile

        shape = (SMALL_SHAPES if small else SHAPES)[0]
        attend(torch, device, "auto", dtype, shape).sum().backward()
        with profile(activities=[ProfilerActivity.CUDA]) as recorded:
            attend(torch, device, "auto", dtype, shape).sum().backward()
            torch.cuda.synchronize()
        return sorted(
            {
                event.name[:120]
                for event in recorded.events()
                if "attn" in event.name or "mha" in event.name
            }
        )

    dtypes = ("float32", "bfloat16", "float16")
    chosen = {dtype: in_fork(lambda dtype=dtype: look(dtype)) for dtype in dtypes}
    ran = {
        f"{dtype}, kernels that ran": in_fork(lambda dtype=dtype: names(dtype)) for dtype in dtypes
    }
    return {**chosen, **ran}


def attention_memory(device: str, *, small: bool) -> dict[str, Any]:
    """What each kernel takes of the allocator beyond its tensors, in forward and in backward.

    `kept`: beyond the output after forward; `forward`, `backward`: peaks beyond what stood before
    the call, the output and the gradients included; `output`: bytes of one of these tensors.
    """
    import torch

    def look(backend: str, dtype: str, shape: Sequence[int], mask: bool) -> dict[str, Any]:
        small_shape = (1, 2, 64, shape[3])
        attend(
            torch, device, backend, dtype, small_shape, mask=mask
        ).sum().backward()  # libraries' first calls
        output = attend(torch, device, backend, dtype, shape, mask=mask)
        size = output.untyped_storage().nbytes()
        output.backward(torch.ones_like(output))
        del output
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        output = attend(torch, device, backend, dtype, shape, mask=mask)
        torch.cuda.synchronize()
        inputs = 3 * size + (shape[2] ** 2 * output.element_size() if mask else 0)
        kept = torch.cuda.memory_allocated(device) - before - size - inputs
        forward = torch.cuda.max_memory_allocated(device) - before - inputs
        gradient = torch.ones_like(output)
        stood = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        output.backward(gradient)
        torch.cuda.synchronize()
        return {
            "output_bytes": size,
            "kept_bytes": kept,
            "forward_bytes": forward,
            "backward_bytes": torch.cuda.max_memory_allocated(device) - stood,
        }

    found = {}
    for shape in SMALL_SHAPES if small else SHAPES:
        for dtype in ("bfloat16", "float32"):
            for backend in ("auto", "flash", "efficient", "cudnn", "math"):
                if dtype == "float32" and backend in ("flash", "cudnn"):
                    continue  # kernels for 16-bit numbers
                name = f"{backend} {dtype} {'x'.join(map(str, shape))}"
                found[name] = in_fork(lambda a=(backend, dtype, shape, False): look(*a))
    for backend in ("auto", "efficient", "math"):
        shape = (SMALL_SHAPES if small else SHAPES)[1]
        name = f"{backend} bfloat16 {'x'.join(map(str, shape))} with a mask"
        found[name] = in_fork(lambda a=(backend, "bfloat16", shape, True): look(*a))
    return found


FACTS: Mapping[str, Callable[..., dict[str, Any]]] = {
    "machine": machine,
    "nvml": nvml,
    "properties": properties,
    "context": context,
    "outside": outside,
    "forks": forks,
    "workspaces": workspaces,
    "attention_choice": attention_choice,
    "attention_memory": attention_memory,
}


def main() -> None:
    # As in the process that trials are forked from: asking whether there is a GPU must not make a
    # context here.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    name, device, *flags = sys.argv[1:]
    if name != "nvml":
        import torch  # noqa: F401  # once, for all that are forked
    print(json.dumps(FACTS[name](device, small="--small" in flags)))


if __name__ == "__main__":
    main()
