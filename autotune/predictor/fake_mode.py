"""Records when the storages of fake tensors are allocated and freed, and by which operator.

A fake tensor has shape, dtype, device and storage but no memory, so a step of any size runs on any
machine. One storage is one block of the allocator, counted once however many tensors view it. Each
block is recorded with its phase, module and operator.

The recording is done inside the FakeTensorMode and not in a separate dispatch mode: with another
dispatch mode active, torch.compile silently runs eager code. Memory that kernels allocate inside is
invisible here; the `scratch` function returns it. An operator of bitsandbytes that hides several
tensors is run in its steps. Source:
https://docs.pytorch.org/docs/stable/torch.compiler_fake_tensor.html
"""

import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from autotune.memory.recording import Block, Phase, Recording, Scope
from autotune.predictor.known_values import KnownValues
from autotune.predictor.routing import Known, Routing
from autotune.predictor.work import WorkMeter, tensors_in
from autotune.spec.prediction import Category

_ITEM = torch.ops.aten._local_scalar_dense.default
_NONZERO = torch.ops.aten.nonzero.default
_MASKED_SELECT = torch.ops.aten.masked_select.default
_INDEX = torch.int64
_DEVICE = torch.ops.prim.device.default
_ADD = torch.ops.aten.add.Tensor
_GATHER = "fsdp.all_gather_copy_in"
"""Operator of FSDP2 that prepares a buffer for the gathered weights of a block."""
_IN_PLACE_IN_BACKWARD = {
    torch.ops.aten.scatter_add.default: ("GatherBackward0", torch.ops.aten.scatter_add_.default),
    torch.ops.aten.index_put.default: ("IndexBackward0", torch.ops.aten.index_put_.default),
}
"""Operators of which autograd runs the form in place in this node, but not for fake tensors.

Source: gather_backward in aten/src/ATen/native/TensorAdvancedIndexing.cpp and index_backward in
torch/csrc/autograd/FunctionsManual.cpp
"""
_FOUR_BIT_PRODUCT = "bitsandbytes.gemm_4bit"
_RECURRENT_LAYER = torch.ops.aten.mkldnn_rnn_layer.default
_GROUPED_PRODUCT = torch.ops.aten._grouped_mm.default
_PRODUCT_IN_FP8_OUT = torch.ops.aten._scaled_mm.out
"""Compiled code calls it. torch has no fake kernel for it and runs the real one, for minutes."""
_REFERENCES_OF_ONE_HOLDER = (4, 2)
"""What `_references_to` returns where there is one besides those of the call."""
_LOSSES_WITH_SUMMANDS = (
    *(torch.ops.aten.mse_loss.default, torch.ops.aten.smooth_l1_loss.default),
    *(torch.ops.aten.binary_cross_entropy.default, torch.ops.aten.soft_margin_loss.default),
)
"""Operators that compute their summands in the memory of the result, which stays as large while the
loss is there. Source: aten/src/ATen/native/Loss.cpp
"""
_RESULTS_ON_DEVICE = {torch.ops.aten._scaled_dot_product_efficient_attention.default: 2}
"""How many results an operator has on a GPU. The others, the seed and the offset of random numbers,
are on the host."""
_ALLOCATIONS = ("aten.empty_strided", "aten.as_strided", "aten.new_empty")
"""Operators that do not show what the memory is for: the next operator or generated kernel does."""


Scratch = Sequence[Sequence[int]]
"""Bytes of the blocks that an operator allocates while it runs. Those of one sequence are there
together, and are freed before those of the next are allocated."""


class StorageWatch:
    """A `PhaseMarker` that records the storages of the fake tensors of `mode`.

    `round_up` converts the bytes of a tensor to those of the allocator's block. `scratch` returns
    what an operator with these arguments and results allocates while it runs, besides its results.
    `workspace` returns the bytes of a last result that the fake kernel leaves empty.
    """

    def __init__(
        self,
        *,
        round_up: Callable[[int], int] = lambda size_bytes: size_bytes,
        scratch: Callable[[Any, Sequence[Any], Any, Mapping[str, Any]], Scratch] = lambda *_: (),
        workspace: Callable[[Any, Sequence[Any]], int] = lambda *_: 0,
    ) -> None:
        # Not a subclass: higher-order operators have rules for exactly this class.
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._fake_dispatch = self.mode.dispatch
        self.mode.dispatch = self._dispatch  # type: ignore[method-assign]
        self._round_up = round_up
        self._scratch = scratch
        self._workspace = workspace
        self._recording: Recording | None = None
        self._known: dict[int, weakref.ref[Any]] = {}
        self._blocks: dict[int, Block] = {}
        self._blocks_before: dict[int, Block] = {}
        """What was alive when the last recording ended and still is."""
        self._modules: list[str] = []
        self._module_of_node: dict[int, str] = {}
        self._scope: Scope | None = None
        self._unnamed: list[Block] = []
        self.phases_on_host: frozenset[str] = frozenset()
        """Phases whose tensors are all in the host's memory, where that is not the device's."""
        self._is_on_host = False
        self._is_in_kernel = False
        self._is_recorded = True
        self.values = KnownValues()
        self.routing = Routing()
        self.work = WorkMeter()
        """What the recorded step computes."""
        self.reads: list[str] = []
        """Where a module has read a value that is not known: file, line and module."""
        self.masks: list[str] = []
        """Where how much a mask selects is not known."""
        self.latest_unknown = ""
        """What has been assumed last: a value that was read, or how much a mask selects."""
        self.answer: float = 1
        """What is returned there."""
        self.is_of_user = False
        """Whether the step is a user's, who may decide by values outside of the model, too."""
        self.defers_reads = False
        """Whether a value that is read now may decide nothing; `note_read` is called if it does."""
        self.has_deferred = False
        """Whether such a value was not known."""

    # -- recording ---------------------------------------------------------------------------------

    @contextmanager
    def recording(
        self,
        resident: Callable[[], Iterable[tuple[Category, str, Tensor]]],
        *,
        continues: bool = False,
    ) -> Iterator[Recording]:
        """Records what runs inside it.

        `resident` returns category, name and tensor of what is alive at the start; anything else
        that is alive then is not recorded, but with `continues` what the recording before has left,
        such as a loss that the program keeps. No reference to the tensors is stored, so those that
        are replaced meanwhile are freed.
        """
        recording = Recording()
        self._recording = recording
        self.work.clear()
        self._note_start(resident(), recording, continues=continues)
        try:
            yield recording
        finally:
            self._recording = None
            self._blocks_before = self._blocks
            self._blocks = {}

    def _note_start(
        self,
        resident: Iterable[tuple[Category, str, Tensor]],
        recording: Recording,
        *,
        continues: bool,
    ) -> None:
        left = []  # no references to it may outlive this call
        for key, before in self._blocks_before.items() if continues else ():
            left.append((self._known[key](), before))
        self._known.clear()
        for category, name, tensor in resident:
            module, _, last_name = name.rpartition(".")
            block = self._note_storage(tensor, module=module, operator=last_name)
            if block is not None:
                block.born = -1
                block.resident = category
                block.earlier = self._blocks_before.get(tensor.untyped_storage()._cdata)
                recording.resident.append(block)
        for storage, before in left:
            self._note_left(storage, before, recording)
        recording.events.clear()

    def _note_left(self, storage: Any, before: Block, recording: Recording) -> None:
        """Records what a recording has left and nobody has named."""
        if storage is None or storage._cdata in self._known:
            return
        key = storage._cdata
        self._known[key] = weakref.ref(storage, lambda _: self._forget(key))
        block = self._add_block(
            key, storage.nbytes(), module=before.module, operator=before.operator
        )
        block.born = -1
        block.resident = "gradients" if before.is_gradient else before.resident or "activations"
        block.earlier = before
        recording.resident.append(block)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if self._recording is None:
            yield
            return
        phase = Phase(name=name, first_event=len(self._recording.events))
        self._recording.phases.append(phase)
        if name == "forward":
            self._scope = Scope()
        with self.on_host() if name in self.phases_on_host else nullcontext():
            yield
        self._end_scope()
        phase.last_event = len(self._recording.events)

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """Records nothing of what is allocated inside: it is in the host's memory."""
        self._is_on_host = True
        try:
            yield
        finally:
            self._is_on_host = False

    @contextmanager
    def not_recorded(self) -> Iterator[None]:
        """Runs operators of which only the values matter: no training runs them."""
        self._is_recorded = False
        try:
            with torch.no_grad():
                yield
        finally:
            self._is_recorded = True

    def known(self, tensor: Tensor) -> tuple[Tensor | None, Known | None]:
        """Returns what is known of the elements of a tensor."""
        return self.values.of(tensor), self.routing.known(tensor)

    def note_known(self, tensor: Tensor, known: tuple[Tensor | None, Known | None]) -> None:
        """Notes what is known of the elements of a tensor."""
        values, expected = known
        self.values.note(tensor, values)
        self.routing.note(tensor, expected)

    def note_real(self, tensor: Tensor) -> None:
        """Records a tensor that is not fake, such as the state of a random number generator."""
        if self._recording is not None:
            self._note_storage(tensor, module=None, operator="random state")

    @property
    def recorded(self) -> Recording | None:
        """The recording that runs."""
        return self._recording

    def counts(self, tensor: Tensor) -> bool:
        """Returns whether a tensor's memory is recorded, as that of tensors on the host is not."""
        return tensor.untyped_storage()._cdata in self._blocks

    def note_workspace(self, size_bytes: int) -> None:
        """Records memory that a library allocates and never frees."""
        if self._recording is not None:
            workspace = Block(
                size_bytes=self._round_up(size_bytes),
                module=self._module(),
                operator="workspace",
                born=len(self._recording.events),
                stream=_stream(),
            )
            self._recording.workspaces.append(workspace)

    def mark_gradients(self, gradients: Iterable[Tensor]) -> None:
        """Marks the blocks of these tensors as gradients."""
        for gradient in gradients:
            block = self._blocks.get(gradient.untyped_storage()._cdata)
            if block is not None:
                block.is_gradient = True

    def note_generated_kernel(self, kernel: str, args: object) -> None:
        """Records that a kernel that inductor has generated runs with these arguments."""
        self.name_allocations(kernel)
        self.values.forget_written(tensors_in(args))
        if self._recording is not None:
            self.work.count_kernel(self._phase_name(), args)

    def name_allocations(self, kernel: str) -> None:
        """Attributes the memory that was allocated since the last kernel to this one."""
        for block in self._unnamed:
            block.operator = kernel
        self._unnamed.clear()

    # -- current module and phase ------------------------------------------------------------------

    def enter_module(self, path: str) -> None:
        """Must be called before the forward pass of a module."""
        if not self._modules and self._phase_name() == "backward":
            self._scope = Scope()  # a recomputation
        self._modules.append(path)

    def leave_module(self, *, first_node: int) -> None:
        """Assigns the autograd nodes created since the module was entered to it.

        `first_node` is autograd's sequence number at that time.
        """
        path = self._modules.pop()
        if self._phase_name() == "backward":
            if not self._modules:
                self._end_scope()
            return
        for node in range(first_node, torch._C._autograd._get_sequence_nr()):
            self._module_of_node.setdefault(node, path)

    def _end_scope(self) -> None:
        if self._scope is not None and self._recording is not None:
            self._scope.ended = len(self._recording.events)
        self._scope = None

    def _phase_name(self) -> str:
        if self._recording is None or not self._recording.phases:
            return ""
        phase = self._recording.phases[-1]
        return phase.name if phase.last_event < 0 else ""

    def _module(self) -> str:
        if self._modules:
            return self._modules[-1]
        node = torch._C._current_autograd_node()
        return "" if node is None else self._module_of_node.get(node._sequence_nr(), "")

    # -- storages ----------------------------------------------------------------------------------

    def _dispatch(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is _DEVICE:  # as often as all other operators together
            return self._fake_dispatch(func, types, args, kwargs or {})
        if func is _ITEM and args[0].constant is None:
            return self._read(args[0])
        if not self._is_recorded:
            return self._run_for_values(func, types, args, kwargs or {})
        if func is _ADD and not kwargs:
            total = self._sum_in_place(*args)
            if total is not None:
                return total
        if func in _IN_PLACE_IN_BACKWARD:
            node, in_place = _IN_PLACE_IN_BACKWARD[func]
            if self._runs_node(node):
                with self.mode:
                    return in_place(*args, **(kwargs or {}))
        result: Any
        if func is _GROUPED_PRODUCT and args[0].dtype != torch.bfloat16:
            with self.mode:
                result = _grouped_product(*args, **(kwargs or {}))
        elif func is _NONZERO:
            result = args[0].new_empty((self._rows(args[0]), args[0].dim()), dtype=_INDEX)
        elif func is _MASKED_SELECT:
            result = args[0].new_empty(self._rows(args[1]))
        elif func is _PRODUCT_IN_FP8_OUT:
            result = (kwargs or {})["out"]
        elif _name_of(func) == _FOUR_BIT_PRODUCT:
            with self.mode:
                result = _four_bit_product(*args, **(kwargs or {}))
        else:
            result = self._run_fake_kernel(func, types, args, kwargs or {})
        if result is NotImplemented:  # a DTensor runs the operator on its local part
            return result
        if func is _RECURRENT_LAYER:
            # The last result is the workspace, which the fake kernel leaves empty.
            size_bytes = self._workspace(func, args)
            with self.mode:
                result = (*result[:-1], result[-1].new_empty(size_bytes))
        if func in _LOSSES_WITH_SUMMANDS and result.dim() == 0:
            with self.mode:
                result = result.new_empty(args[0].numel()).resize_(())
        if not self._is_in_kernel:
            self.values.pass_on(func, args, kwargs or {}, result)
            self.routing.pass_on(func, args, kwargs or {}, result)
        if self._recording is not None and not self._is_in_kernel:
            name = _name_of(func)
            self.work.count(self._phase_name(), func, args, kwargs or {}, result)
            tensors = list(tensors_in(result))[: _RESULTS_ON_DEVICE.get(func)]
            if tensors and self._unnamed and name not in _ALLOCATIONS:
                self.name_allocations(name)
            self._ignore_unknown((args, kwargs))
            for tensor in tensors:
                self._note_storage(tensor, module=None, operator=name)
            if name == _GATHER:
                self._mark_gathered(tensors)
            scratch = self._scratch(func, args, result, kwargs or {})
            if not self._is_on_host:
                for together in scratch:
                    self._note_scratch(together, operator=name)
        return result

    def _read(self, tensor: Tensor) -> float:
        """Returns a value for a tensor of one element whose value the program reads."""
        known = self.values.of(tensor)
        if known is not None:
            return known.item()
        is_in_model = bool(self._modules) or torch._C._current_autograd_node() is not None
        is_in_program = self.is_of_user and not _is_read_by_torch()
        if not (is_in_model or is_in_program) or _is_in_optimizer():
            # An optimizer, a gradient scaler or the training step reads the value. None of their
            # branches changes the memory, so that any value will do.
            return 0.0
        expected = self.routing.value(tensor)
        if expected is not None:
            return expected
        if self.defers_reads:
            self.has_deferred = True
        else:
            self.note_read()
        answer = self.answer
        if tensor.dtype == torch.bool:
            return answer > 0
        return float(answer) if tensor.is_floating_point() else max(0, int(answer))

    def note_read(self) -> None:
        """Notes that the program now depends on a value that is not known."""
        self.reads.append(self._where())
        self.latest_unknown = value_read_at(self.reads[-1])

    def _run_for_values(
        self, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run an operator to see what is known of its results."""
        result = self._run_fake_kernel(func, types, args, kwargs)
        if not self._is_in_kernel:
            self.values.pass_on(func, args, kwargs, result)
            self.routing.pass_on(func, args, kwargs, result)
        return result

    def _rows(self, mask: Tensor) -> int:
        """Returns how many elements of a mask are true, or are expected to be."""
        known = self.values.of(mask)
        if known is not None:
            return int(known.count_nonzero())
        if not self.routing.knows_mean(mask):
            self.masks.append(self._where())
            self.latest_unknown = f"how much {self.masks[-1]} selects by a mask (aten.nonzero)"
        return self.routing.rows(mask)

    def _where(self) -> str:
        """Returns the line and the module that run."""
        path = self._module()
        return f"{_line_that_runs()} in {path}" if path else _line_that_runs()

    def _run_fake_kernel(
        self, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run torch's fake kernel, without recording the operators that it consists of.

        A real kernel does not run them: the fake one of addmm adds in fp32, for example.
        """
        was_in_kernel = self._is_in_kernel
        self._is_in_kernel = True
        try:
            return self._fake_dispatch(func, types, args, kwargs)
        finally:
            self._is_in_kernel = was_in_kernel

    def _sum_in_place(self, first: Any, second: Any) -> Tensor | None:
        """Returns the gradient to which autograd adds another one of the same tensor, if to any.

        Autograd adds in place to a gradient that it alone holds, but never to a fake one, for which
        it allocates the sum. Source: accumulate in torch/csrc/autograd/input_buffer.cpp
        """
        node = torch._C._current_autograd_node()
        if self._recording is None or node is None or torch.is_grad_enabled():
            return None
        if not (isinstance(first, Tensor) and isinstance(second, Tensor)):
            return None
        if first.shape != second.shape or first.dtype != second.dtype:
            return None
        # Of terms in the formula of one operator, none is from an earlier one.
        if all(self._node_of(term) == node._sequence_nr() for term in (first, second)):
            return None
        for term in (first, second):
            if not term._is_view() and _references_to(term) == _REFERENCES_OF_ONE_HOLDER:
                return term
        return None

    def _runs_node(self, name: str) -> bool:
        """Returns whether autograd runs a node of this name, and not the graph of a gradient."""
        node = torch._C._current_autograd_node()
        return node is not None and node.name() == name and not torch.is_grad_enabled()

    def _node_of(self, tensor: Tensor) -> int | None:
        """Returns the number of the autograd node that allocated a tensor, None if unknown."""
        block = self._blocks.get(tensor.untyped_storage()._cdata)
        return None if block is None else block.node

    def _ignore_unknown(self, values: object) -> None:
        """Ignores arguments that are not known yet: they are older than the recording."""
        for tensor in tensors_in(values):
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self._known:
                self._known[key] = weakref.ref(storage, lambda _, key=key: self._forget(key))  # type: ignore[misc]

    def _note_storage(self, tensor: Tensor, *, module: str | None, operator: str) -> Block | None:
        """Records the storage of `tensor` and returns its block; None if it is already recorded."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return None
        self._known[key] = weakref.ref(storage, lambda _: self._forget(key))
        if self._is_on_host:
            return None
        if module is None:
            module = self._module()
        block = self._add_block(key, storage.nbytes(), module=module, operator=operator)
        if operator in _ALLOCATIONS:
            self._unnamed.append(block)
        return block

    def note_resized(self, storage: torch.UntypedStorage) -> None:
        """Records that a storage has another size, as those of gathered weights have in turn."""
        key = storage._cdata
        block = self._blocks.pop(key, None)
        if self._recording is None:
            return
        if block is not None:
            block.died = len(self._recording.events)
            self._recording.events.append((-1, block))
        if key not in self._known:
            self._known[key] = weakref.ref(storage, lambda _: self._forget(key))
        if storage.nbytes():
            block = self._add_block(
                key, storage.nbytes(), module=self._module(), operator="all_gather"
            )
            block.resident = "gathered_weights"

    def _mark_gathered(self, tensors: Iterable[Tensor]) -> None:
        """Marks the memory in which the gathered weights of a block arrive together."""
        for tensor in tensors:
            block = self._blocks.get(tensor.untyped_storage()._cdata)
            if block is not None:
                block.resident = "gathered_weights"
                block.operator = "all_gather"

    def _add_block(self, key: int, size_bytes: int, *, module: str, operator: str) -> Block:
        assert self._recording is not None
        node = torch._C._current_autograd_node()
        block = Block(
            size_bytes=self._round_up(size_bytes),
            module=module,
            operator=operator,
            born=len(self._recording.events),
            scope=self._scope,
            in_phase=self._phase_name(),
            node=None if node is None else node._sequence_nr(),
            stream=_stream(),
        )
        self._blocks[key] = block
        self._recording.events.append((+1, block))
        return block

    def _note_scratch(self, sizes: Sequence[int], *, operator: str) -> None:
        """Records blocks of these bytes that are freed again while the operator runs."""
        assert self._recording is not None
        born = len(self._recording.events)
        blocks = [
            Block(
                size_bytes=self._round_up(size_bytes),
                module=self._module(),
                operator=operator,
                born=born + number,
                died=born + len(sizes) + number,
                scope=self._scope,
                in_phase=self._phase_name(),
                stream=_stream(),
            )
            for number, size_bytes in enumerate(sizes)
        ]
        self._recording.events += [(+1, block) for block in blocks]
        self._recording.events += [(-1, block) for block in blocks]

    def _forget(self, key: int) -> None:
        del self._known[key]
        self._blocks_before.pop(key, None)
        block = self._blocks.pop(key, None)
        if block is not None and self._recording is not None:
            block.died = len(self._recording.events)
            self._recording.events.append((-1, block))


def _references_to(tensor: Tensor) -> tuple[int, int]:
    """Returns how many references there are to an argument of an operator, and to its memory."""
    use_count: int = tensor._use_count()  # type: ignore[attr-defined]
    return use_count, torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


_TORCH_FOLDER = str(Path(torch.__file__).parent)
_OWN_FOLDER = str(Path(__file__).parent)
_CALLS_OPERATORS = (
    *(f"{_TORCH_FOLDER}/{name}.py" for name in ("overrides", "_ops", "_compile", "utils/_stats")),
    *(f"{_TORCH_FOLDER}/{name}" for name in ("_subclasses/", "_dynamo/eval_frame.py")),
)
"""Files of torch through which every operator of a fake tensor goes, whoever calls it."""


def _line_that_runs() -> str:
    """Returns the innermost line that is neither of torch nor of the predictor."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if is_of_program(frame.f_code.co_filename):
            return line_in_words(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return "a compiled program"


def is_of_program(file: str) -> bool:
    """Returns whether code is neither of torch nor of the predictor, nor generated."""
    is_typed = file.startswith(("<ipython-input", "<stdin>", "<string>"))
    return is_typed or not file.startswith((_TORCH_FOLDER, _OWN_FOLDER, "<"))


def line_in_words(file: str, line: int) -> str:
    """Returns `line 12 of train.py`; for code of a notebook, the cell as its reader sees it."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    cell = getattr(getattr(shell, "compile", None), "format_code_name", lambda _: None)(file)
    return f"line {line} of {'cell ' + cell[1] if cell else Path(file).name}"


def _is_read_by_torch() -> bool:
    """Returns whether code of torch, such as a GradScaler, reads the value of a tensor."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_OWN_FOLDER, *_CALLS_OPERATORS)):
            return file.startswith(_TORCH_FOLDER)
        frame = frame.f_back
    return False


def _is_in_optimizer() -> bool:
    """Returns whether an optimizer makes a step, as one may during the backward pass."""
    file = inspect.getfile(torch.optim.Optimizer)  # it wraps the step of every optimizer
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename == file:
            return True
        frame = frame.f_back
    return False


def value_read_at(place: str) -> str:
    """Returns in words which value is read at this line."""
    return f"the value that {place} reads (aten._local_scalar_dense)"


def _stream() -> int:
    """Returns the identity of the current stream: code for CUDA uses torch.cpu's stand-ins here."""
    return id(torch.cpu.current_stream())


def _grouped_product(
    first: Tensor,
    second: Tensor,
    ends: Tensor | None = None,
    bias: Tensor | None = None,
    dtype: Any = None,
) -> Tensor:
    """Returns the fake result of aten::_grouped_mm; torch's fake kernel supports only bfloat16.

    [rows, k] by [groups, k, n] gives [rows, n]; [m, rows] by [rows, n] gives [groups, m, n], with
    the rows split at `ends`.
    """
    shape: tuple[int, ...] = (*first.shape[:-1], second.shape[-1])
    if first.dim() == 2 and second.dim() == 2:
        assert ends is not None
        shape = (ends.shape[0], *shape)
    elif first.dim() == 3 and second.dim() == 2:
        shape = (first.shape[1], second.shape[1])
    return first.new_empty(shape, dtype=dtype or first.dtype)


def _four_bit_product(
    rows: Tensor,
    packed: Tensor,
    shape: Sequence[int],
    absmax: Tensor,
    blocksize: int,
    quant_type: str,
    bias: Tensor | None = None,
    absmax_8bit: Tensor | None = None,
    absmax_code: Tensor | None = None,
    absmax_offset: Tensor | None = None,
) -> Tensor:
    """Computes a product with an nf4 weight in the steps that bitsandbytes hides in one operator.

    The whole weight is converted first. On CUDA that is so above 1,536 rows; fewer may need less.
    Source: bitsandbytes/backends, _gemm_4bit_default_impl in default/ops.py and
    bitsandbytes::gemm_4bit in cuda/ops.py
    """
    operators = torch.ops.bitsandbytes
    if absmax_8bit is not None:
        scales = operators.dequantize_blockwise(
            absmax_8bit, absmax, absmax_code, 256, torch.float32
        )
        absmax = scales + absmax_offset
        del scales
    weight = operators.dequantize_4bit(packed, absmax, blocksize, quant_type, shape, rows.dtype)
    flat = rows.reshape(-1, rows.shape[-1])
    # Not F.linear, which the mode would see as one operator without the memory of its product.
    result_shape = (*rows.shape[:-1], shape[0])
    if bias is not None:
        return torch.addmm(bias, flat, weight.t()).view(result_shape)
    return torch.mm(flat, weight.t()).view(result_shape)


def _name_of(operator: Any) -> str:
    """Returns `aten.mm` for any overload of it."""
    packet = getattr(operator, "overloadpacket", operator)
    return str(packet).replace("::", ".")
