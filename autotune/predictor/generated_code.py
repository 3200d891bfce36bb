"""torch.compile on fake tensors: inductor's own generated program is run, with its kernels left out.

Inductor writes, for each graph, a Python program that allocates buffers, reuses and frees them, and
calls kernels. Fusion, buffer reuse and order are all decided when that program is written. So
inductor compiles as always up to that point; then the program is run on fake tensors, where an
allocation is seen as any other and a kernel does nothing. There is no second model of what inductor
does. Source: torch/_inductor/codegen/wrapper.py
"""

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
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

_NO_CACHES = {"fx_graph_cache": False, "fx_graph_remote_cache": False}


class GeneratedPrograms:
    """The programs inductor wrote while this was active."""

    def __init__(self, watch: StorageWatch) -> None:
        self._watch = watch
        self._sources: list[str] = []

    @property
    def plan(self) -> str | None:
        """Hash of all programs; None where nothing was compiled."""
        if not self._sources:
            return None
        return hashlib.sha256("\n".join(map(_without_names, self._sources)).encode()).hexdigest()[
            :12
        ]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within it every compiled graph becomes a program without kernels; nothing reaches inductor's caches."""
        graph = torch._inductor.graph.GraphLowering
        before = graph._compile_to_module_lines

        def load(lowering: Any, code: Any) -> Any:
            return self._load(code.value, constants=lowering.constants)

        graph._compile_to_module_lines = load  # type: ignore[method-assign, assignment]
        # Kernels are written and never compiled. Without their vector form it takes a third less
        # time, allocates the same, and needs no look at what the C++ compiler can do here.
        vector_units = torch._inductor.cpu_vec_isa.pick_vec_isa
        torch._inductor.cpu_vec_isa.pick_vec_isa = lambda: (
            torch._inductor.cpu_vec_isa.invalid_vec_isa
        )
        with (
            torch._inductor.config.patch(_NO_CACHES),
            torch._functorch.config.patch(enable_autograd_cache=False),
        ):
            try:
                yield
            finally:
                graph._compile_to_module_lines = before  # type: ignore[method-assign]
                torch._inductor.cpu_vec_isa.pick_vec_isa = vector_units

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
                value.called = partial(self._watch.name_allocations, name)
            elif name.startswith("empty_strided_"):
                names[name] = _empty_strided_on(name.removeprefix("empty_strided_"))
        names["reinterpret_tensor"] = _reinterpret_tensor
        names["assert_size_stride"] = names["assert_alignment"] = lambda *_: None
        return program


class _NoKernel:
    """Stands for a compiled kernel: called as C++ kernels are, or by `run` as Triton's are."""

    called: Callable[[], None] = staticmethod(lambda: None)

    def __call__(self, *_: Any, **__: Any) -> None:
        self.called()

    def run(self, *_: Any, **__: Any) -> None:
        self.called()


class _NoCompilation:
    """Stands for inductor's AsyncCompile."""

    def __getattr__(self, language: str) -> Callable[..., Any]:
        return (lambda _scope: None) if language == "wait" else (lambda *_, **__: _NoKernel())


def _empty_strided_on(device: str) -> Callable[..., Tensor]:
    return lambda size, stride, dtype: torch.empty_strided(
        size, stride, dtype=dtype, device=device.partition("_")[0]
    )


def _reinterpret_tensor(base: Tensor, size: Any, stride: Any, offset: int = 0) -> Tensor:
    return torch.as_strided(base, size, stride, base.storage_offset() + offset)


def _without_names(source: str) -> str:
    """The program without what differs between two compilations of the same: its number and the paths in comments."""
    return re.sub(r"#.*", "", source)


def is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None
