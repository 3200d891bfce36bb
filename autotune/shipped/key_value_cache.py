"""Turns off the caches of models of transformers, which training has no use for."""

from typing import Any

from torch import nn


def stop_caching(model: nn.Module) -> None:
    """Turns off the cache of keys and values that transformers' models fill in each forward pass.

    A block that is recomputed would add to the cache a second time: the cache would hold twice the
    keys and values, and `selective` would meet operators that were not in the forward pass.
    """
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", None) is True:
            config.use_cache = False
