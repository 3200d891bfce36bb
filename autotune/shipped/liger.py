"""Puts the kernels of the package liger-kernel into a model of transformers, on a GPU."""

from torch import nn


def use_liger(model: nn.Module) -> None:
    """Replaces norms, gated activations and rotary embeddings of a model, in place.

    It is a `PreTrainedModel`, or the module around one. The loss stays, which `use_liger_kernel` of
    transformers' Trainer replaces as well.
    """
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(
        model=getattr(model, "network", model),
        cross_entropy=False,
        fused_linear_cross_entropy=False,
    )
