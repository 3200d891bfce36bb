"""Draw the initial weights of a study once, on the host in float32, and load them for each trial.

Every trial of a study starts from the same file. Each tensor is cast on the host, from the
memory-mapped file, before it is moved, so the device never has more than the stored weights.
"""

from pathlib import Path

import torch
from torch import Tensor, nn

from autotune.models import build_model, family_of
from autotune.models.parts import ModelParts
from autotune.models.pretrained import read_pretrained
from autotune.shipped.seeds import seed_generators
from autotune.spec.workload import Workload


class Placement:
    """How a model gets its weights: all of them in `dtype`, on `device`.

    A technique that stores them in another way, or adds some, overrides its methods.
    """

    def __init__(self, *, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device

    def change(self, parts: ModelParts) -> ModelParts:
        """Change the model while it is on the meta device, without weights; return its parts."""
        return parts

    def name_in_file(self, name: str) -> str | None:
        """Returns the name in the file of a parameter; None for one that the file does not have."""
        return name

    def place(self, name: str, parameter: nn.Parameter, weight: Tensor | None) -> nn.Parameter:
        """Returns the parameter for `parameter`, on the device.

        `weight` is its tensor in the file, on the host; None if the file has none.
        """
        assert weight is not None
        # copy=True: mapped pages belong to no allocator and must not be trained on.
        placed = weight.to(dtype=self.dtype, copy=True).to(self.device)
        return nn.Parameter(placed, requires_grad=parameter.requires_grad)

    def outline(self, name: str, parameter: nn.Parameter, weight: Tensor | None) -> nn.Parameter:
        """Returns what `place` would, on the meta device."""
        return nn.Parameter(
            torch.empty_like(parameter, dtype=self.dtype, device="meta"),
            requires_grad=parameter.requires_grad,
        )

    def whole(self, name: str, parameter: nn.Parameter, weight: Tensor | None) -> Tensor:
        """Returns the numbers of a parameter of which this device is to have a part.

        They may be on the host and in another number format: a part of them is copied and cast.
        """
        assert weight is not None
        return weight

    def unquantized(self) -> tuple[int, int]:
        """Returns how many numbers of the model's weights are not quantized, and how many are."""
        return 0, 0

    def current(self, parameter: nn.Parameter) -> nn.Parameter:
        """Returns what has taken the place of a parameter that was placed, or the same."""
        return parameter


def draw_weights(workload: Workload, *, file: Path) -> int:
    """Write the initial parameters and buffers to `file`; return the number of parameters."""
    seed_generators(workload.seed)
    model = read_pretrained(workload) if workload.pretrained else build_model(workload).model
    family_of(workload).initialize(model)
    tensors = {
        name: tensor.detach()
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    }
    # Into a file of Python, whose error says that the disk is full: torch's own does not.
    with file.open("wb") as opened:
        torch.save(tensors, opened)
    return sum(parameter.numel() for parameter in model.parameters())


def load_model(workload: Workload, *, file: Path | None, placement: Placement) -> ModelParts:
    """Returns the model with the weights of `file`, placed by `placement`; buffers as drawn.

    Without a file the weights are uninitialized memory, for a model on fake tensors.
    """
    with torch.device("meta"):
        parts = build_model(workload)  # some tensors may be on the CPU (`user_model.py`)
    if file is None:
        drawn = _empty_weights(parts.model)
    else:
        drawn = torch.load(file, mmap=True, weights_only=True)
    parts = placement.change(parts)
    placed: dict[nn.Parameter, nn.Parameter] = {}
    for name, parameter in list(parts.model.named_parameters(remove_duplicate=False)):
        if parameter not in placed:  # tied parameters stay tied
            name_in_file = placement.name_in_file(name)
            weight = None if name_in_file is None else drawn[name_in_file]
            placed[parameter] = placement.place(name, parameter, weight)
        _assign(parts.model, name, placed[parameter])
    for name, _ in list(parts.model.named_buffers()):
        stored = drawn[placement.name_in_file(name) or name]
        _assign(parts.model, name, stored.clone().to(placement.device))
    return parts


def _empty_weights(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: torch.empty_like(tensor, device="cpu", requires_grad=False)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    }


def _assign(model: nn.Module, path: str, tensor: Tensor) -> None:
    owner_path, _, name = path.rpartition(".")
    owner = model.get_submodule(owner_path)
    if isinstance(tensor, nn.Parameter):
        setattr(owner, name, tensor)
    else:
        owner._buffers[name] = tensor
