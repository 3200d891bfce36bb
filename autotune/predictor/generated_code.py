"""Runs the programs that inductor generates for torch.compile on fake tensors, without kernels.

For each graph inductor writes a Python program that allocates, reuses and frees buffers and calls
kernels. Fusion, buffer reuse and order are all decided when that program is written. So inductor
compiles as always up to that point; then the program is run on fake tensors, where allocations are
recorded like any others and kernels do nothing. So nothing here has to model inductor. Source:
torch/_inductor/codegen/wrapper.py
"""

import hashlib
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch._functorch.config
import torch._inductor.async_compile
import torch._inductor.config
import torch._inductor.cpu_vec_isa
import torch._inductor.graph
from torch import Tensor, nn

from autotune.predictor.fake_mode import StorageWatch
from autotune.predictor.whole_numbers import part_of_whole_numbers

_NO_CACHES = {"fx_graph_cache": False, "fx_graph_remote_cache": False}


class GeneratedPrograms:
    """Collects the programs that inductor generates while `active`.

    With `for_gpu` it pads the rows of large results, as for a GPU, to multiples of 128 bytes.
    """

    def __init__(self, watch: StorageWatch, *, for_gpu: bool) -> None:
        self._watch = watch
        self._settings = {**_NO_CACHES, "disable_padding_cpu": not for_gpu}
        self._sources: list[str] = []

    @property
    def plan(self) -> str | None:
        """Hash of all programs, in 12 hexadecimal digits; None where nothing was compiled."""
        if not self._sources:
            return None
        # The comments differ between two compilations of the same graph: its number and paths.
        sources = "\n".join(re.sub(r"#.*", "", source) for source in self._sources)
        return hashlib.sha256(sources.encode()).hexdigest()[:12]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Makes every compiled graph a program without kernels, and disables inductor's caches."""
        graph = torch._inductor.graph.GraphLowering
        original_compile = graph._compile_to_module_lines

        def load(lowering: Any, code: Any) -> Any:
            program = self._load(code.value, constants=lowering.constants)
            numbers = part_of_whole_numbers(lowering.orig_gm)
            if numbers is not None:
                names = vars(program)
                names["call"] = partial(self._run_with_numbers, names["call"], numbers)
            return program

        graph._compile_to_module_lines = load  # type: ignore[method-assign, assignment]
        # Kernels are generated but never compiled. Without vector instructions that takes a third
        # less time, allocates the same, and does not run the C++ compiler to find what it supports.
        original_pick_vec_isa = torch._inductor.cpu_vec_isa.pick_vec_isa
        torch._inductor.cpu_vec_isa.pick_vec_isa = lambda: (
            torch._inductor.cpu_vec_isa.invalid_vec_isa
        )
        with (
            torch._inductor.config.patch(self._settings),
            torch._functorch.config.patch(enable_autograd_cache=False),
        ):
            try:
                yield
            finally:
                graph._compile_to_module_lines = original_compile  # type: ignore[method-assign]
                torch._inductor.cpu_vec_isa.pick_vec_isa = original_pick_vec_isa

    def _run_with_numbers(
        self,
        program: Callable[[list[Any]], Sequence[Any]],
        numbers: Callable[..., Mapping[int, Tensor]],
        args: list[Any],
    ) -> Sequence[Any]:
        """Runs a program; notes what is known of the whole numbers among its results."""
        known = {}
        try:
            with self._watch.not_recorded():
                for position, tensor in numbers(*args).items():
                    known[position] = self._watch.known(tensor)
                    del tensor  # which may be a view of an input, that the program frees
        except Exception:  # then nothing is known of them
            traceback.print_exc()
        results = program(args)
        for position, one in known.items():
            self._watch.note_known(results[position], one)
        return results

    def _load(self, source: str, *, constants: Mapping[str, Any]) -> ModuleType:
        self._sources.append(source)
        program = ModuleType("generated_program")
        program.__file__ = "<generated program>"
        names = vars(program)
        names.update(constants)
        async_compile = torch._inductor.async_compile.AsyncCompile
        torch._inductor.async_compile.AsyncCompile = _NoCompilation  # type: ignore[assignment, misc]
        try:
            exec(compile(source, "<generated program>", "exec"), names)
        finally:
            torch._inductor.async_compile.AsyncCompile = async_compile  # type: ignore[misc]
        for name, value in list(names.items()):
            if isinstance(value, _NoKernel):
                value.called = partial(self._watch.note_generated_kernel, name)
            elif name.startswith("empty_strided_"):
                names[name] = _empty_strided_on(name.removeprefix("empty_strided_"))
        names["reinterpret_tensor"] = _reinterpret_tensor
        names["assert_size_stride"] = lambda *_: None
        names["assert_alignment"] = lambda *_: None
        return program


class _NoKernel:
    """Replaces a compiled kernel. C++ kernels are called directly, Triton kernels by `run`."""

    called: Callable[[object], None] = staticmethod(lambda _: None)

    def __call__(self, *args: Any, **__: Any) -> None:
        self.called(args)

    def run(self, *args: Any, **__: Any) -> None:
        self.called(args)


class _NoCompilation:
    """Replaces inductor's AsyncCompile; returns kernels that do nothing, for every language."""

    def __getattr__(self, language: str) -> Callable[..., Any]:
        if language == "wait":
            return lambda _scope: None
        return lambda *_, **__: _NoKernel()


def _empty_strided_on(device: str) -> Callable[..., Tensor]:
    """Returns the allocation function for a device, such as `cpu` or `cpu_pinned`."""
    device_type = device.partition("_")[0]

    def empty_strided(size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device=device_type)

    return empty_strided


def _reinterpret_tensor(base: Tensor, size: Any, stride: Any, offset: int = 0) -> Tensor:
    return torch.as_strided(base, size, stride, base.storage_offset() + offset)


def is_compiled(module: nn.Module) -> bool:
    """Returns whether `module.compile` was called."""
    return module._compiled_call_impl is not None
