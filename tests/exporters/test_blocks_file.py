"""`autotune_blocks.py` of the exports does the same to a model as the techniques of a trial."""

import copy

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from autotune.exporters.bundle import BLOCKS, shipped_text
from autotune.memory.cpu import CpuMeter
from autotune.models.gpt import build, find_parts
from autotune.shipped.blocks import find_blocks as find_own
from autotune.spec.config import CHOICES
from autotune.spec.workload import make_workload
from autotune.techniques import checkpointing as technique
from tests.exporters.readers.pytorch_script import fake_ranks
from tests.exporters.texts import imported
from tests.techniques.operators import OperatorCount

CHECKPOINTING = CHOICES["checkpointing"]
LAYERS = 6
FILE = imported(shipped_text(BLOCKS))
find_blocks, prepare_blocks, shard_blocks = FILE.find_blocks, FILE.prepare_blocks, FILE.shard_blocks


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return build(
        make_workload("cpu", {"layers": LAYERS, "width": 32, "heads": 2, "sequence_length": 32})
    )


@pytest.fixture(scope="module")
def plain_peak(model):
    return a_step(copy.deepcopy(model))[2]


def a_step(model):
    """Returns operators that ran, gradients in order of parameters, and the peak of live bytes."""
    tokens = torch.arange(64).view(2, 32)
    meter = CpuMeter()
    with meter.measuring(model.parameters), OperatorCount() as counted:
        model(tokens, tokens).backward()
    return (
        counted.count,
        [parameter.grad for parameter in model.parameters()],
        meter.reading().peak_memory_bytes,
    )


@pytest.mark.slow
@pytest.mark.parametrize("granularity", CHECKPOINTING)
def test_blocks_are_recomputed_as_in_a_trial(model, plain_peak, granularity):
    own, shipped = copy.deepcopy(model), copy.deepcopy(model)
    technique.checkpoint_in_blocks(find_parts(own), granularity)
    technique.checkpoint_segments(find_parts(own), granularity)
    prepare_blocks(shipped, checkpointing=granularity)
    own_count, own_gradients, own_peak = a_step(own)
    count, gradients, peak = a_step(shipped)
    assert count == own_count
    assert all(torch.equal(one, other) for one, other in zip(gradients, own_gradients, strict=True))
    assert peak == pytest.approx(own_peak, rel=0.001)
    assert (peak < 0.95 * plain_peak) == (granularity != "none")


@pytest.mark.parametrize("granularity", CHECKPOINTING)
def test_saved_weights_keep_their_names(model, granularity):
    shipped = copy.deepcopy(model)
    prepare_blocks(shipped, checkpointing=granularity)
    assert shipped.state_dict().keys() == model.state_dict().keys()
    shipped.load_state_dict(model.state_dict())


def test_each_block_is_compiled_with_what_it_recomputes(model):
    shipped = copy.deepcopy(model)
    prepare_blocks(shipped, checkpointing="every-2", compiled=True)
    blocks = list(shipped.blocks)
    assert all(block._compiled_call_impl is not None for block in blocks)
    assert [isinstance(block, FILE.Changed) for block in blocks] == [True, False] * 3


def test_segments_run_compiled_blocks(model):
    shipped = copy.deepcopy(model)
    prepare_blocks(shipped, checkpointing="sqrt", compiled=True)
    assert len(FILE.sharded_units(list(shipped.blocks))) == round(LAYERS**0.5)
    assert all(block._compiled_call_impl is not None for block in shipped.blocks)


def test_products_of_blocks_are_converted_to_fp8_and_the_head_is_not(model):
    torchao = pytest.importorskip("torchao.float8.float8_linear")
    shipped = copy.deepcopy(model)
    prepare_blocks(shipped, fp8=True)
    converted = [
        name for name, layer in shipped.named_modules() if isinstance(layer, torchao.Float8Linear)
    ]
    assert len(converted) == 5 * LAYERS
    assert not isinstance(shipped.head, torchao.Float8Linear)


def test_products_of_blocks_are_converted_to_int8_and_the_head_is_not(model):
    shipped = copy.deepcopy(model)
    prepare_blocks(shipped, int8=True)
    kinds = [type(layer).__name__ for layer in shipped.modules()]
    assert kinds.count("Int8Linear") == 5 * LAYERS
    assert type(shipped.head) is torch.nn.Linear


def test_blocks_are_found_where_trials_find_them(model):
    owner = torch.nn.Module()
    owner.network = copy.deepcopy(model)
    assert find_blocks(owner).blocks is owner.network.blocks
    assert find_own(owner).blocks is owner.network.blocks


class Base(torch.nn.Module):
    """What the blocks of a hybrid model have in common."""

    def forward(self, x):
        return x


class Attending(Base):
    pass


class Recurrent(Base):
    pass


@pytest.mark.parametrize(
    ("modules", "are_blocks"),
    [
        ([Attending(), Recurrent()], True),
        ([torch.nn.Linear(2, 2), torch.nn.ReLU()], False),
        ([torch.nn.Conv1d(2, 2, 1), torch.nn.Conv2d(2, 2, 1)], False),
        ([], False),
    ],
)
def test_modules_of_several_classes_are_blocks_if_they_share_a_base(modules, are_blocks):
    owner = torch.nn.Module()
    owner.layers = torch.nn.ModuleList(modules)
    assert (find_own(owner) is not None) == are_blocks
    if are_blocks:
        prepare_blocks(owner)
    else:
        with pytest.raises(ValueError, match="has no list of blocks"):
            prepare_blocks(owner)


def test_a_model_without_blocks_is_rejected_with_a_hint():
    with pytest.raises(
        ValueError, match=r"Linear has no list of blocks of one class: name it with path="
    ):
        prepare_blocks(torch.nn.Linear(2, 2), checkpointing="block")


def test_a_model_that_caches_keys_and_values_can_be_recomputed():
    transformers = pytest.importorskip("transformers")
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64}
    settings = transformers.LlamaConfig(**sizes, num_attention_heads=2, vocab_size=64)
    model = transformers.AutoModelForCausalLM.from_config(settings)
    assert model.config.use_cache
    prepare_blocks(model, checkpointing="selective")
    tokens = torch.arange(32).view(2, 16)
    model(input_ids=tokens, labels=tokens).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("granularity", ["none", "every-2", "sqrt"])
def test_each_block_is_sharded_however_it_is_recomputed(model, granularity):
    sharded = copy.deepcopy(model)
    with fake_ranks(4):
        prepare_blocks(sharded, checkpointing=granularity)
        shard_blocks(sharded, device="cpu", group=2)
        blocks = list(sharded.blocks)
        assert all(isinstance(block, FSDPModule) for block in [*blocks, sharded])
        shapes = {parameter.device_mesh.shape for parameter in sharded.parameters()}
    assert shapes == {(2, 2)}
