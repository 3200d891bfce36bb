"""Draw the initial weights of a study once, on the host in float32, and load them for each trial.

Every trial of a study starts from the same file. Each tensor is cast on the host, from the
memory-mapped file, before it is moved, so the device never has more than the trained weights.
"""

from pathlib import Path

import torch
from torch import Tensor, nn

from autotune.models import build_model, family_of
from autotune.models.parts import ModelParts
from autotune.models.pretrained import read_pretrained
from autotune.spec.workload import Workload


def draw_weights(workload: Workload, *, file: Path) -> int:
    """Write the initial parameters and buffers to `file`; return the number of parameters."""
    torch.manual_seed(workload.seed)
    model = read_pretrained(workload) if workload.pretrained else build_model(workload).model
    family_of(workload).initialize(model)
    tensors = {
        name: tensor.detach()
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    }
    torch.save(tensors, file)
    return sum(parameter.numel() for parameter in model.parameters())


def load_model(
    workload: Workload, *, file: Path | None, dtype: torch.dtype, device: torch.device
) -> ModelParts:
    """Return the model on `device` with the weights of `file`.

    Floating-point parameters are in `dtype`, buffers as they were drawn. Without a file the weights
    are uninitialized memory, for a model on fake tensors.
    """
    with torch.device("meta"):
        parts = build_model(workload)  # some tensors may be on the CPU (`user_model.py`)
    if file is None:
        drawn = _empty_weights(parts.model)
    else:
        drawn = torch.load(file, mmap=True, weights_only=True)
    loaded: dict[nn.Parameter, nn.Parameter] = {}
    for name, parameter in list(parts.model.named_parameters(remove_duplicate=False)):
        if parameter not in loaded:  # tied parameters stay tied
            # copy=True: mapped pages belong to no allocator and must not be trained on.
            weight = drawn[name].to(dtype=dtype, copy=True).to(device)
            loaded[parameter] = nn.Parameter(weight, requires_grad=parameter.requires_grad)
        _assign(parts.model, name, loaded[parameter])
    for name, _ in list(parts.model.named_buffers()):
        _assign(parts.model, name, drawn[name].clone().to(device))
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
