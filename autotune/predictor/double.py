"""The double of a user's training: the same objects, tied in the same way, with fake tensors.

Modules, optimizers, the batch and the user's function are copied together, so that the copied
optimizer updates the copied module. A tensor becomes a fake one of the same layout on the fake
device, wherever it was; tensors that share memory still do. Whole numbers of a tensor on a CPU stay
known (`known_values.py`).

A function may name more than it is given: a reference model, a scheduler, a list of losses. What it
and the functions that it calls name is copied as well, and stands in for the originals while the
double runs: in the cells of closures and in the globals of their files. So nothing that belongs to
the user is changed.
"""

import copy
import inspect
import io
import sys
import sysconfig
import threading
import types
import weakref
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from autotune.errors import InvalidInput, class_and_first_line_of
from autotune.predictor.fake_mode import StorageWatch, is_of_program
from autotune.predictor.known_values import MOST_ELEMENTS

_SHARED = (
    *(types.ModuleType, types.GeneratorType, threading.Thread, torch.Generator),
    *(type(threading.Lock()), type(threading.RLock()), type(sys.stdout)),
    *(io.TextIOWrapper, io.BufferedReader, io.BufferedWriter, io.StringIO, io.BytesIO),
)
"""What no copy is made of. Nor of arrays of numpy and of data sets: they are large, and only
read."""
_UNCHANGEABLE = (
    *(type(None), bool, int, float, complex, str, bytes, type, types.BuiltinFunctionType),
    *(torch.device, torch.dtype, torch.Size),
)
_ABSENT = object()


class Double:
    """Makes copies with fake tensors of the mode of `watch`, all of them tied to each other."""

    def __init__(self, watch: StorageWatch) -> None:
        self._watch = watch
        self._memo: dict[int, Any] = {}
        self._storages: dict[int, tuple[Any, Any]] = {}
        self._functions: list[types.FunctionType] = []
        self._seen: set[types.FunctionType] = set()
        self._named: set[tuple[int, str]] = set()
        self._rows: int | None = None
        self._swapped: list[tuple[MutableMapping[str, Any], str, Any, Any]] = []
        self._cells: list[tuple[types.CellType, Any, Any]] = []
        self.models: dict[str, nn.Module] = {}
        """The copied models that the functions name themselves."""
        self.made: list[Tensor] = []
        """The fake tensors that the latest copy has made."""
        self.has_16_bit = False
        """Whether one of them has numbers of 16 bits."""

    def copy(self, value: Any, *, rows: int | None = None) -> Any:
        """Returns the double of an object, always the same one.

        With `rows`, tensors get so many as their first dimension. Raises InvalidInput for what
        cannot be copied.
        """
        self._rows = rows
        self.made = []
        with self._copying():
            try:
                return copy.deepcopy(value, self._memo)
            except InvalidInput:
                raise
            except Exception as error:  # whatever an object says about being copied
                raise InvalidInput(
                    f"{type(value).__name__} cannot be copied: {class_and_first_line_of(error)}",
                    hint="pass the torch modules and optimizers themselves, and a step that uses "
                    "its parameters",
                ) from error
            finally:
                self._rows = None

    def replace(self, original: Any, by: Any) -> None:
        """Makes `by` the double of an object that was not copied yet."""
        self._memo[id(original)] = by

    def fake(self, tensor: Tensor) -> Tensor:
        """Returns the double of a tensor that was copied."""
        found: Tensor = self._memo[id(tensor)]
        return found

    # -- what functions name -----------------------------------------------------------------------

    def copy_named(self, models: Iterable[nn.Module]) -> None:
        """Copies what the functions that were copied name, and what the classes of models name."""
        for kind in {type(module) for model in models for module in model.modules()}:
            self._copy_if_possible(kind)
        while self._functions:
            function = self._functions.pop()
            if function in self._seen:
                continue
            self._seen.add(function)
            names = function.__code__.co_freevars
            for name, cell in zip(names, function.__closure__ or (), strict=True):
                with suppress(ValueError):  # an empty cell
                    value = cell.cell_contents
                    self._cells.append((cell, value, self._copy_named(name, value)))
            if is_of_program(function.__code__.co_filename) and not _is_of_library(function):
                for name in _names_in(function.__code__):
                    self._copy_global(function.__globals__, name)

    def _copy_global(self, names: MutableMapping[str, Any], name: str) -> None:
        if (id(names), name) in self._named:
            return
        self._named.add((id(names), name))
        value = names.get(name, _ABSENT)
        self._swapped.append((names, name, value, self._copy_named(name, value)))

    def _copy_named(self, name: str, value: Any) -> Any:
        doubled = self._copy_if_possible(value)
        if isinstance(doubled, nn.Module) and doubled is not value:
            self.models[name] = doubled
        return doubled

    def _copy_if_possible(self, value: Any) -> Any:
        if inspect.isclass(value):
            self._functions += [one for one in vars(value).values() if inspect.isfunction(one)]
            return value
        if value is _ABSENT or isinstance(value, _UNCHANGEABLE):
            return value
        try:
            return self.copy(value)
        except InvalidInput:
            return value

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """Makes the names of the user's functions mean the doubles, and puts everything back."""
        for names, name, _, doubled in self._swapped:
            if doubled is not _ABSENT:
                names[name] = doubled
        for cell, _, doubled in self._cells:
            cell.cell_contents = doubled
        try:
            yield
        finally:
            for cell, value, _ in reversed(self._cells):
                cell.cell_contents = value
            for names, name, value, _ in reversed(self._swapped):
                if value is not _ABSENT:
                    names[name] = value
                elif name in names:
                    del names[name]

    # -- copying -----------------------------------------------------------------------------------

    @contextmanager
    def _copying(self) -> Iterator[None]:
        """Makes `copy.deepcopy` copy tensors as fake ones, and leave alone what is shared."""

        def shared(value: Any, _memo: Any) -> Any:
            return value

        def noted(function: Any, _memo: Any) -> Any:
            self._functions.append(function)
            return function

        def bound(method: Any, memo: Any) -> Any:
            self._functions.append(method.__func__)
            return types.MethodType(method.__func__, copy.deepcopy(method.__self__, memo))

        def doubled(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
            if id(tensor) not in memo:
                memo[id(tensor)] = self._fake(tensor, memo)
            found: Tensor = memo[id(tensor)]
            return found

        def tied(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
            # Its own way to be copied leaves out what a subclass has besides state and groups.
            kind = type(optimizer)
            made = memo[id(optimizer)] = kind.__new__(kind)
            for name, value in vars(optimizer).items():
                vars(made)[name] = copy.deepcopy(value, memo)
            return made

        def pointing(reference: Any, memo: Any) -> Any:
            # A scheduler has replaced the step of its optimizer by one that points to it so.
            original = reference()
            return reference if original is None else weakref.ref(copy.deepcopy(original, memo))

        numpy = sys.modules.get("numpy")
        arrays = () if numpy is None else (numpy.ndarray, numpy.memmap)
        dispatch: dict[Any, Any] = dict.fromkeys((*_SHARED, *arrays), shared)
        dispatch |= {
            types.FunctionType: noted,
            types.MethodType: bound,
            weakref.ref: pointing,
        }
        with ExitStack() as stack:
            stack.enter_context(patch.dict(copy._deepcopy_dispatch, dispatch))  # type: ignore[attr-defined]
            for kind in _with_own_copy(Tensor):
                stack.enter_context(patch.object(kind, "__deepcopy__", doubled))
            stack.enter_context(patch.object(Optimizer, "__deepcopy__", tied, create=True))
            for kind in (DataLoader, Dataset):
                stack.enter_context(patch.object(kind, "__deepcopy__", shared, create=True))
            yield

    def _fake(self, tensor: Tensor, memo: dict[int, Any]) -> Tensor:
        if is_lazy(tensor):
            raise InvalidInput(
                "a weight has no size before the model's first call, as in lazy modules",
                hint="call the model once, with a batch",
            )
        is_number = tensor.numel() == 1 and tensor.layout == torch.strided and _is_there(tensor)
        number = tensor.tolist() if is_number else None
        with self._watch.mode, torch.no_grad():
            if number is None or tensor.untyped_storage().nbytes() > tensor.element_size():
                fake = self._fake_of_layout(tensor)
            else:  # such as the count of its steps by which an optimizer corrects its averages
                fake = torch.tensor(number, dtype=tensor.dtype)
        fake.requires_grad_(tensor.requires_grad)
        if isinstance(tensor, nn.Parameter):
            fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
        for name, value in vars(tensor).items():
            if name not in vars(fake):
                setattr(fake, name, copy.deepcopy(value, memo))
        self._note_values(tensor, fake)
        self.has_16_bit |= fake.dtype in (torch.bfloat16, torch.float16)
        self.made.append(fake)
        return fake

    def _fake_of_layout(self, tensor: Tensor) -> Tensor:
        if hasattr(tensor, "__tensor_flatten__") and not isinstance(tensor, FakeTensor):
            names, context = tensor.__tensor_flatten__()
            inner = {name: self._fake_of_layout(getattr(tensor, name)) for name in names}
            kind: Any = type(tensor)
            made: Tensor = kind.__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())
            return made
        if tensor.layout != torch.strided:
            return self._watch.mode.from_tensor(tensor, static_shapes=True)
        if self._rows is not None and tensor.dim():
            return torch.empty((self._rows, *tensor.shape[1:]), dtype=tensor.dtype)
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:
            memory = torch.empty(storage.nbytes(), dtype=torch.uint8)
            self._storages[storage._cdata] = (storage, memory.untyped_storage())
        _, shared = self._storages[storage._cdata]
        fake = torch.empty(0, dtype=tensor.dtype)
        return fake.set_(shared, tensor.storage_offset(), tensor.shape, tensor.stride())

    def _note_values(self, tensor: Tensor, fake: Tensor) -> None:
        """Notes the values of whole numbers, such as tokens or a mask, which decide shapes."""
        if not _is_there(tensor) or tensor.is_floating_point() or tensor.is_complex():
            return
        if tensor.numel() <= MOST_ELEMENTS and tensor.layout == torch.strided:
            values = tensor.detach()
            self._watch.values.note(fake, values if self._rows is None else values[: self._rows])


def _with_own_copy(kind: type) -> Iterator[type]:
    """Yields the class and its subclasses that say themselves how they are copied."""
    if "__deepcopy__" in vars(kind):
        yield kind
    subclasses: list[type] = kind.__subclasses__()
    for subclass in subclasses:
        yield from _with_own_copy(subclass)


def _is_there(tensor: Tensor) -> bool:
    """Returns whether the values of a tensor can be read without a copy."""
    return tensor.device.type == "cpu" and type(tensor) in (Tensor, nn.Parameter)


def _names_in(code: types.CodeType) -> Iterator[str]:
    """Yields the names of globals and attributes that code uses, and functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


def _is_of_library(function: types.FunctionType) -> bool:
    """Returns whether a function is of an installed package, or of Python."""
    file = function.__code__.co_filename
    return "-packages" in file or file.startswith(sysconfig.get_path("stdlib"))
