"""A script's loss gets float32 from a model in mixed precision, in every form of output."""

import collections
import dataclasses
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import CausalLMOutput

from autotune.spec.config import TrainingConfig
from autotune.techniques.user_training import apply_to_user_model
from autotune.techniques.widened import widened


@dataclasses.dataclass
class Plain:
    logits: Tensor
    extra: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    logits: Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenWithSlots:
    logits: Tensor


class WithSlots:
    __slots__ = ("logits", "unset")

    def __init__(self, logits):
        self.logits = logits


class SlotsOfTwo(WithSlots):
    __slots__ = "name"

    def __init__(self, logits):
        super().__init__(logits)
        self.name = "two"


class Named(NamedTuple):
    logits: Tensor
    name: str = ""


class OwnMapping(dict):
    pass


class RefersToItself:
    def __init__(self, logits):
        self.logits, self.me = logits, self


FORMS = {
    "tensor": (lambda logits: logits, lambda output: output),
    "tuple": (lambda logits: (logits, None), lambda output: output[0]),
    "list": (lambda logits: [logits], lambda output: output[0]),
    "mapping": (
        lambda logits: collections.OrderedDict(logits=logits),
        lambda output: output["logits"],
    ),
    "own mapping": (lambda logits: OwnMapping(logits=logits), lambda output: output["logits"]),
    "user mapping": (
        lambda logits: collections.UserDict(logits=logits),
        lambda output: output["logits"],
    ),
    "transformers": (lambda logits: CausalLMOutput(logits=logits), lambda output: output.logits),
    "nested": (
        lambda logits: {"first": [Plain(Frozen(logits), extra=(1, "text"))]},
        lambda output: output["first"][0].logits.logits,
    ),
    **{
        kind.__name__: (kind, lambda output: output.logits)
        for kind in (Plain, Frozen, FrozenWithSlots, WithSlots, SlotsOfTwo, Named)
    },
    "namespace": (lambda logits: SimpleNamespace(logits=logits), lambda output: output.logits),
    "itself": (RefersToItself, lambda output: output.logits),
}


class Model(nn.Module):
    def __init__(self, form):
        super().__init__()
        torch.manual_seed(0)
        self.form = form
        self.embedding, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)

    def forward(self, tokens):
        return self.form(self.head(self.embedding(tokens)))


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("form", FORMS)
def test_the_loss_is_that_of_logits_in_float32(form, precision):
    """As where the script widens the logits itself."""
    make, logits_of = FORMS[form]
    tokens = torch.arange(16).view(2, 8)
    applied, plain = Model(make), Model(lambda logits: logits)
    apply_to_user_model(TrainingConfig(precision=precision), applied)
    if precision == "bf16-true":
        plain.bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16-mixed"):
        logits = plain(tokens).float()
    output = applied(tokens)
    assert type(output) is type(make(logits))
    found = F.cross_entropy(logits_of(output).flatten(0, 1), tokens.flatten())
    assert found.item() == F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).item()
    found.backward()
    assert applied.head.weight.grad is not None


def test_an_object_that_holds_nothing_narrow_is_returned_itself():
    output = Plain(torch.zeros(2), extra=[SimpleNamespace(count=1)])
    assert widened((output,))[0] is output


def test_a_part_that_is_in_float32_stays_the_same_object():
    hidden = torch.zeros(2)
    output = widened(Plain(torch.zeros(2, dtype=torch.bfloat16), extra=hidden))
    assert (output.logits.dtype, output.extra) == (torch.float32, hidden)


def test_a_cache_of_keys_and_values_stays_as_the_model_reads_it():
    cache = DynamicCache()
    cache.update(*torch.zeros(2, 1, 1, 4, 2, dtype=torch.bfloat16), 0)
    output = widened(Plain(torch.zeros(2, dtype=torch.bfloat16), extra=cache))
    assert output.extra is cache
    assert cache.layers[0].keys.dtype == torch.bfloat16


def test_a_compiled_model_widens_the_tensors_of_a_dataclass():
    model = Model(Plain)
    config = TrainingConfig(precision="bf16-mixed")
    apply_to_user_model(config, model)
    compiled = torch.compile(model, backend="eager")
    assert compiled(torch.zeros(1, 4, dtype=torch.int64)).logits.dtype == torch.float32
