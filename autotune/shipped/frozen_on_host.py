"""Keeps the frozen weights of blocks in the host's memory, and brings those of a block at a time.

Each weight stays the parameter that it is, on its device, but for its memory: that is allocated and
filled when its block is called, and when the backward pass comes to the output of the block, and
freed after each. So whatever autograd or a kernel has kept of a weight, such as its transpose, is
valid again in the backward pass. The weights of the block that comes next are copied at the same
time, on a stream of their own: two blocks of them are on the device at once.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from autotune.shipped.changed_method import Method, change_method
from autotune.shipped.quantized import is_quantized, scales_beside, tensors_behind

_OF_BLOCK = "_weights_on_host"
"""Attribute of a block: where its weights are, and its index."""


class FrozenOnHost:
    """The frozen weights of blocks, and which of them are on the device."""

    def __init__(self, blocks: int) -> None:
        self._weights: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(blocks)]
        """Of each block, each tensor on the device with its copy on the host."""
        self._on_device: set[int] = set()
        self._in_backward: int | None = None
        """The block whose backward pass runs."""
        self._is_on_cuda = False
        self._stream: Any = None
        """The stream of the copies, on CUDA."""
        self._arrived: dict[int, Any] = {}
        """The events after which the weights of a block are on the device."""

    def take(self, block: int, weight: Tensor) -> None:
        """Copies a weight to the host and frees its memory on the device.

        What of it shares memory with other tensors stays, and so do the scales of bitsandbytes.
        """
        for part in parts_to_host(weight):
            # Not a change of the weight to autograd, which would take what it has saved for stale.
            on_device = part.data
            self._is_on_cuda = on_device.is_cuda
            self._weights[block].append((on_device, copy_on_host(on_device)))
            on_device.untyped_storage().resize_(0)

    def follow(self, blocks: Sequence[nn.Module]) -> None:
        """Brings the weights of each block when it is called, and in its backward pass."""
        for index, block in enumerate(blocks):
            object.__setattr__(block, _OF_BLOCK, (self, index))
            change_method(block, "__call__", _with_its_weights)
            block.register_state_dict_post_hook(_with_weights_of_host)
            block.register_load_state_dict_pre_hook(_bring_before_loading)
            block.register_load_state_dict_post_hook(_keep_loaded)

    def host_tensors(self) -> Iterator[Tensor]:
        """Yields the copies on the host."""
        for weights in self._weights:
            yield from (copy for _, copy in weights)

    def host_copy(self, weight: Tensor) -> Tensor:
        """Returns a weight as it is on the host; another one as it is."""
        copies = {
            on_device.untyped_storage()._cdata: copy
            for weights in self._weights
            for on_device, copy in weights
        }
        if not hasattr(weight, "__tensor_flatten__"):
            return copies.get(weight.untyped_storage()._cdata, weight)
        names, context = weight.__tensor_flatten__()
        parts = {name: self.host_copy(getattr(weight, name)) for name in names}
        whole: Tensor = type(weight).__tensor_unflatten__(  # type: ignore[attr-defined]
            parts, context, weight.size(), weight.stride()
        )
        return whole

    def begin(self, block: int) -> None:
        """Brings a block's weights for its forward pass, which may be that of a recomputation."""
        is_in_backward = torch._C._current_graph_task_id() != -1
        if not is_in_backward and self._in_backward is not None:
            self.free_all()  # an exception has ended that backward pass
        last = len(self._weights) - 1 if self._in_backward is None else self._in_backward
        self._use(block, min(block + 1, last))

    def end(self, block: int) -> None:
        """Frees what the forward pass of a block has used."""
        if block != self._in_backward:
            self._free(block)

    def begin_backward(self, block: int, _gradient: Tensor) -> None:
        """Brings a block's weights for its backward pass."""
        if self._in_backward is None:
            torch.autograd.Variable._execution_engine.queue_callback(self.free_all)
        self._in_backward = block
        self._use(block, block - 1)

    def bring(self, block: int) -> None:
        """Brings the weights of a block that exists and has none on the device."""
        if not 0 <= block < len(self._weights) or block in self._on_device:
            return
        self._on_device.add(block)
        for on_device, source in self._weights[block]:
            on_device.untyped_storage().resize_(source.untyped_storage().nbytes())
            on_device.copy_(source, non_blocking=True)

    def free_all(self) -> None:
        """Frees the weights of all blocks, at the end of a backward pass or of one that failed."""
        self._in_backward = None
        for block in set(self._on_device):
            self._free(block)

    def keep(self, block: int) -> None:
        """Takes the weights of a block on the device for those on the host."""
        for on_device, source in self._weights[block]:
            source.copy_(on_device)
        self._free(block)

    def _use(self, block: int, following: int) -> None:
        for other in self._on_device - {block, following, self._in_backward}:
            self._free(other)
        missing = [one for one in (block, following) if one not in self._on_device]
        if not self._is_on_cuda:
            for one in missing:
                self.bring(one)
            return
        computing = torch.cuda.current_stream()
        self._stream = self._stream or torch.cuda.Stream()
        for one in missing:
            # It may get the memory of a block whose kernels still run.
            self._stream.wait_stream(computing)
            with torch.cuda.stream(self._stream):
                self.bring(one)
                self._arrived[one] = self._stream.record_event()
        computing.wait_event(self._arrived[block])

    def _free(self, block: int) -> None:
        for on_device, _ in self._weights[block]:
            on_device.untyped_storage().resize_(0)
        self._on_device.discard(block)


def parts_to_host(weight: Tensor) -> list[Tensor]:
    """Returns the tensors behind a weight that fill memory of their own, but for scales beside."""
    beside = {id(scale) for scale in scales_beside(weight)}
    return [
        part
        for part in tensors_behind(weight)
        if id(part) not in beside and part.nbytes == part.untyped_storage().nbytes() > 0
    ]


def emptied(weight: Tensor) -> list[Tensor]:
    """Returns the tensors behind a weight whose memory on the device is freed."""
    return [
        part for part in tensors_behind(weight) if part.untyped_storage().nbytes() < part.nbytes
    ]


def frozen_in_blocks(model: nn.Module, blocks: Sequence[nn.Module]) -> dict[str, int]:
    """Returns {name of a frozen weight: index of its block} of those that one block alone has.

    A weight that several blocks have, or one outside of them as well, is not listed.
    """
    owners = {module: index for index, block in enumerate(blocks) for module in block.modules()}
    users: dict[nn.Parameter, set[int | None]] = {}
    names: dict[nn.Parameter, str] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            users.setdefault(parameter, set()).add(owners.get(module))
            names[parameter] = f"{path}.{name}"
    found = {}
    for parameter, of_blocks in users.items():
        [index, *others] = of_blocks
        if index is not None and not others and not parameter.requires_grad:
            found[names[parameter]] = index
    return found


@torch.no_grad()
def keep_frozen_on_host(
    model: nn.Module, blocks: Sequence[nn.Module], device: torch.device | str
) -> None:
    """Moves a model to the device, one weight after the other, but for frozen ones of its blocks.

    Those come while a block runs. Weights that are quantized must be on the device before.
    """
    on_host = FrozenOnHost(len(blocks))
    block_of = {
        model.get_parameter(name): index for name, index in frozen_in_blocks(model, blocks).items()
    }
    for weight in model.parameters():
        is_taken = weight in block_of
        if not is_quantized(weight):
            weight.data = weight.data.to(device, copy=is_taken)  # memory that can be freed
        if is_taken:
            on_host.take(block_of[weight], weight)
    on_host.follow(blocks)


def copy_on_host(tensor: Tensor) -> Tensor:
    """Returns a copy in the host's memory, pinned for CUDA.

    For a tensor on the CPU it is in memory that torch's allocator does not know of, as that of a
    GPU does not know of the host's: its counts are then those that a device would have.
    """
    if tensor.is_cuda:
        copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
    else:
        memory = torch.frombuffer(bytearray(tensor.nbytes), dtype=torch.uint8)
        copy = memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
    return copy.copy_(tensor)


def _with_its_weights(call: Method) -> Method:
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        weights, index = getattr(self, _OF_BLOCK)
        weights.begin(index)
        try:
            output = call(self, *args, **kwargs)
        finally:
            weights.end(index)
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(functools.partial(weights.begin_backward, index))
        return output

    return called


def _with_weights_of_host(
    block: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any
) -> None:
    weights, _ = getattr(block, _OF_BLOCK)
    for name, value in state.items():
        if name.startswith(prefix) and isinstance(value, Tensor):
            state[name] = weights.host_copy(value)


def _bring_before_loading(block: nn.Module, *_: Any) -> None:
    weights, index = getattr(block, _OF_BLOCK)
    weights.bring(index)


def _keep_loaded(block: nn.Module, _keys: Any) -> None:
    weights, index = getattr(block, _OF_BLOCK)
    weights.keep(index)
