"""The GPU and the torch release of a prediction for CUDA. The choice of kernels depends on both."""

from dataclasses import dataclass

import torch

from autotune.spec.prediction import parse_compute_capability

ASSUMED_COMPUTE_CAPABILITY = "8.0"
"""An A100: used where no compute capability is specified and no GPU is present."""


_MULTIPROCESSORS = {
    (7, 0): 80,
    (7, 5): 40,
    (8, 0): 108,
    (8, 6): 82,
    (8, 9): 128,
    (9, 0): 132,
    (10, 0): 148,
    (12, 0): 170,
}
"""Of a V100, T4, A100, RTX 3090, RTX 4090, H100 or H200, B200, RTX 5090, by NVIDIA's data sheets.
Other GPUs of the same capability have fewer or a few more."""
_USUAL_MULTIPROCESSORS = 128


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU and the torch release that runs on it."""

    capability: tuple[int, int]
    """Compute capability: (9, 0) for an H100 or H200, (10, 0) for a B200, (8, 9) for an RTX
    4090."""
    release: tuple[int, int]
    """The torch release, for example (2, 11)."""
    prefers_cudnn: bool = True
    """Whether the cuDNN of that torch is recent enough for torch to prefer its attention. The GPU
    must be, too."""
    is_assumed: bool = False
    """Whether no GPU was specified, so that this one is an assumption."""

    @property
    def multiprocessors(self) -> int:
        """The number of streaming multiprocessors of the usual GPU of this capability."""
        return _MULTIPROCESSORS.get(self.capability, _USUAL_MULTIPROCESSORS)

    @property
    def threads_of_a_multiprocessor(self) -> int:
        """The most threads that run on a multiprocessor at once.

        Source: CUDA C++ Programming Guide, technical specifications per compute capability.
        """
        if self.capability == (7, 5):
            return 1024
        return (
            2048 if self.capability in ((7, 0), (8, 0)) or self.capability[0] in (9, 10) else 1536
        )

    @property
    def name(self) -> str:
        major, minor = self.capability
        return f"compute capability {major}.{minor}"


def gpu_of(compute_capability: str | None, torch_version: str | None) -> Gpu:
    """Returns the GPU of a prediction; None stands for the assumed GPU and the installed torch.

    Raises InvalidInput for an invalid compute capability.
    """
    major, minor = (torch_version or torch.__version__).split(".")[:2]
    return Gpu(
        capability=parse_compute_capability(compute_capability or ASSUMED_COMPUTE_CAPABILITY),
        release=(int(major), int(minor)),
        prefers_cudnn=torch_version is not None or _has_recent_cudnn(),
        is_assumed=compute_capability is None,
    )


_PREFERRED_CUDNN = 91500
"""torch prefers the attention of cuDNN releases newer than this: check_prefer_cudnn_attention in
aten/src/ATen/native/transformers/cuda/sdp_utils.cpp. The wheels for CUDA 12 come with an older one.
"""


def _has_recent_cudnn() -> bool:
    """Returns whether the installed torch prefers its cuDNN.

    True where it has none: the prediction is then for another machine's torch.
    """
    version = torch.backends.cudnn.version() if torch.version.cuda else None
    return version is None or version > _PREFERRED_CUDNN
