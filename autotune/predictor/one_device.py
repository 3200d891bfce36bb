"""Runs a user's program on the fake device, whatever device it names, and without a trace.

All fake tensors are on a CPU (`fake_step.py`). So what a program moves to a GPU, or makes there,
stays where it is, autocast for a GPU is autocast here, and waiting for a GPU is nothing. What is
moved to the host is still counted.

Values that a program reads are made up. A number that is only written somewhere, as a loss in a
log, does no harm: an `unknown` number notes when it decides something.
"""

import io
import logging
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.amp.autocast_mode import autocast
from torch.overrides import TorchFunctionMode

from autotune.predictor.fake_mode import StorageWatch
from autotune.predictor.measured_kernels import on_real_tensors

_HALVES = (torch.float16, torch.bfloat16)
_STAY = (Tensor.cuda, Tensor.cpu, Tensor.pin_memory)
_READ = (Tensor.tolist, Tensor.numpy, Tensor.__array__)
_NOTHING = (
    *("synchronize", "empty_cache", "reset_peak_memory_stats", "memory_allocated"),
    *("max_memory_allocated", "memory_reserved", "max_memory_reserved", "ipc_collect"),
)
"""Functions of torch.cuda that a training may call and that say nothing here."""


class UnknownFloat(float):
    """A number that a program has read from a fake tensor, or computed from such a number."""


class UnknownInt(int):
    """The same of a whole number."""


_COMPUTE = ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "neg", "abs")
_DECIDE = ("lt", "le", "gt", "ge", "eq", "ne", "bool", "int")


def unknown(number: Any, note: Callable[[], None]) -> Any:
    """Returns a number for which `note` is called where it decides what the program does."""
    if isinstance(number, bool) or not isinstance(number, float | int):
        note()
        return number
    kind = UnknownFloat if isinstance(number, float) else UnknownInt
    made: Any = kind(number)
    made.note = note
    return made


def _follow(kind: Any, plain: type) -> None:
    def computing(compute: Callable[..., Any]) -> Callable[..., Any]:
        def computed(self: Any, *others: Any) -> Any:
            result = compute(self, *others)
            return result if result is NotImplemented else unknown(result, self.note)

        return computed

    def deciding(decide: Callable[..., Any]) -> Callable[..., Any]:
        def decided(self: Any, *others: Any) -> Any:
            self.note()
            return decide(self, *others)

        return decided

    for name in _COMPUTE:
        setattr(kind, f"__{name}__", computing(getattr(plain, f"__{name}__")))
    for name in (*_DECIDE, *(("index",) if plain is int else ())):
        setattr(kind, f"__{name}__", deciding(getattr(plain, f"__{name}__")))
    kind.__hash__ = plain.__hash__


_follow(UnknownFloat, float)
_follow(UnknownInt, int)


class OneDevice(TorchFunctionMode):
    """Runs what is asked of another device on the fake one."""

    def __init__(self, watch: StorageWatch, *, has_host: bool) -> None:
        """With `has_host`, the device that is predicted for has memory besides that of the host."""
        super().__init__()
        self._watch = watch
        self._has_host = has_host
        self.uses_16_bit = False
        self.uses_autocast = False

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        keywords = dict(kwargs or {})
        to_gpu = func is Tensor.cuda or (func is Tensor.to and len(args) > 1 and _is_gpu(args[1]))
        if to_gpu and self._has_host and not self._watch.counts(args[0]):
            args = (args[0].clone(), *args[1:])  # of data that were on the host until now
        if func in _STAY:
            return args[0]
        if func in _READ and isinstance(args[0], FakeTensor):
            return self._read(func, args[0])
        if func is Tensor.item:
            return self._item(args[0])
        if _is_gpu(keywords.get("device")):
            keywords["device"] = "cpu"
        if func is Tensor.to and to_gpu:
            args = (args[0], "cpu", *args[2:])
        result = func(*args, **keywords)
        if isinstance(result, Tensor) and result.dtype in _HALVES:
            self.uses_16_bit = True
        return result

    def _item(self, tensor: Tensor) -> Any:
        watch = self._watch
        watch.defers_reads, watch.has_deferred = True, False
        try:
            number = tensor.item()
        finally:
            watch.defers_reads = False
        return unknown(number, watch.note_read) if watch.has_deferred else number

    def _read(self, func: Any, tensor: Tensor) -> Any:
        """Returns values in the form that the program asks for, made up where they are unknown."""
        values = self._watch.values.of(tensor)
        if values is None:
            self._watch.note_read()
            with on_real_tensors():
                values = torch.full(tensor.shape, self._watch.answer).to(tensor.dtype)
        with on_real_tensors(), torch._C.DisableTorchFunction():
            return values.tolist() if func is Tensor.tolist else values.numpy()


def _is_gpu(device: Any) -> bool:
    if isinstance(device, int) and not isinstance(device, bool):
        return True
    kind = device.type if isinstance(device, torch.device) else str(device).partition(":")[0]
    return kind in ("cuda", "mps", "xpu")


@contextmanager
def as_if_on(watch: StorageWatch, *, has_host: bool) -> Iterator[OneDevice]:
    """Runs what is inside on the fake device, and yields what is seen of it."""
    enter: Any = autocast.__enter__
    make: Any = autocast.__init__
    mode = OneDevice(watch, has_host=has_host)

    def make_here(
        self: Any, device_type: str, dtype: Any = None, enabled: bool = True, **options: Any
    ) -> None:
        if _is_gpu(device_type):
            device_type, dtype = "cpu", dtype or torch.float16
        make(self, device_type, dtype, enabled, **options)

    def enter_here(self: Any) -> Any:
        if _is_gpu(self.device):  # made before; left on the same device
            self.device = "cpu"
            entered_elsewhere.append(self)
        if self._enabled and self.fast_dtype in _HALVES:
            mode.uses_16_bit = mode.uses_autocast = True
        return enter(self)

    entered_elsewhere: list[Any] = []
    nothing: Any = dict.fromkeys(_NOTHING, lambda *_, **__: 0)
    with (
        patch.multiple(autocast, __init__=make_here, __enter__=enter_here),
        patch.multiple(torch.cuda, **nothing),
        mode,
    ):
        try:
            yield mode
        finally:
            for one in entered_elsewhere:
                one.device = "cuda"


@contextmanager
def without_a_trace() -> Iterator[None]:
    """Drops what is printed, logged and warned of inside, and puts random numbers back."""
    states: list[Any] = [
        (torch.set_rng_state, torch.get_rng_state()),
        (random.setstate, random.getstate()),
    ]
    if torch.cuda.is_initialized():
        states.append((torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()))
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        states.append((numpy.set_state, numpy.get_state()))
    logging_disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with (
            redirect_stdout(io.StringIO()),
            redirect_stderr(io.StringIO()),
            warnings.catch_warnings(action="ignore"),
        ):
            yield
    finally:
        logging.disable(logging_disabled)
        for put_back, state in states:
            put_back(state)
