"""The model of a script, made by the user's function."""

import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from autotune.shipped.script.written import FUNCTION, MODEL, SEQUENCE_LENGTH, SIZES, VOCABULARY
from autotune.shipped.signature import Expectation
from autotune.shipped.user_model import user_model


@torch.no_grad()
def make_model() -> nn.Module:
    """Calls FUNCTION of MODEL with those of the SIZES that it takes."""
    function = getattr(_module(), FUNCTION)
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    names = {parameter.name for parameter in parameters}
    sizes = {name: size for name, size in SIZES.items() if takes_all or name in names}
    with torch.enable_grad():
        network = function(**sizes)
    expected = Expectation(name=MODEL, vocab_size=VOCABULARY, sequence_length=SEQUENCE_LENGTH)
    # The attention kernels of a CPU, because the configuration may have turned them off.
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        return user_model(network, expected)


def _module() -> ModuleType:
    file = Path(MODEL).expanduser().absolute()
    if not MODEL.endswith(".py"):
        sys.path.insert(0, str(Path.cwd()))
        return importlib.import_module(MODEL)
    sys.path.insert(0, str(file.parent))
    spec = importlib.util.spec_from_file_location(f"autotune_own_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
