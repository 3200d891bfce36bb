"""The CPU meter against peaks known by hand."""

import pytest
import torch
from torch import nn

from autotune.memory.cpu import CpuMeter
from autotune.memory.meter import resident_bytes
from autotune.shipped.tensors import held_tensors

MIB = 2**20


def floats(mebibytes: float) -> torch.Tensor:
    return torch.empty(int(mebibytes * MIB // 4))


def peak_of(block, resident=()) -> int:
    meter = CpuMeter()
    with meter.measuring(lambda: resident):
        block()
    return meter.reading().peak_memory_bytes


def test_the_peak_is_what_lives_at_once():
    def block():
        first = floats(8)
        second = floats(4)
        del first
        third = floats(6)
        del second, third

    assert peak_of(block) == 12 * MIB


def test_what_was_born_before_counts_when_it_is_named():
    before = floats(16)
    assert peak_of(lambda: floats(2), resident=[before]) == 18 * MIB


def test_memory_inside_one_operator_counts():
    x = floats(4)

    def block():
        torch.logsumexp(x.view(1024, -1), dim=1)  # makes a shifted copy inside

    assert peak_of(block, resident=[x]) > 4 * MIB + 4096


@pytest.mark.slow
def test_compiled_code_is_seen():
    compiled = torch.compile(lambda x: (x.sin() @ x.cos()).sum(), dynamic=False)
    x = torch.randn(512, 512)
    compiled(x)  # compilation is not what is measured
    # sin, cos and their product of one MiB each; x itself was there before
    assert 3 * MIB <= peak_of(lambda: compiled(x)) <= 3 * MIB + 65536


def test_readings_accumulate_to_the_largest():
    meter = CpuMeter()
    for size in (3, 5, 2):
        with meter.measuring(list):
            floats(size)
    assert meter.reading().peak_memory_bytes == 5 * MIB


def test_the_peak_knows_its_phase():
    meter = CpuMeter()
    with meter.measuring(list):
        with meter.phase("forward"):
            floats(1)
        with meter.phase("backward"):
            floats(7)
        with meter.phase("step"):
            floats(2)
    assert meter.reading().peak_phase == "backward"


def test_views_of_one_storage_count_once():
    x = floats(4)
    assert resident_bytes([x, x[:10], x.view(2, -1)]) == 4 * MIB


def test_on_a_cpu_the_device_needs_the_peak_and_nothing_more():
    meter = CpuMeter()
    with meter.measuring(list):
        floats(3)
    assert meter.reading().device_bytes == 3 * MIB


def test_a_training_step_needs_what_arithmetic_says(make_trainer):
    trainer = make_trainer(optimizer_fusion="kernel")
    measurement = trainer.run()
    kinds = measurement.bytes_by_kind
    parameters = sum(p.numel() for p in trainer.training.parts.model.parameters())
    assert kinds["parameters"] == 4 * parameters
    assert kinds["optimizer_state"] == pytest.approx(8 * parameters, rel=0.01)
    # What stays, all gradients or all activations at once, and no more than both together.
    stays = sum(kinds.values())
    workload = trainer._workload
    activation_floats = workload.tokens_per_step * workload.layers * (34 * workload.width + 3 * 96)
    assert (
        stays + 4 * parameters
        < measurement.peak_memory_bytes
        < stays + 4 * parameters + 4 * activation_floats
    )


@pytest.mark.slow
def test_the_peak_of_a_configuration_is_the_same_every_time(make_trainer):
    peaks = {make_trainer(checkpointing="block").run().peak_memory_bytes for _ in range(3)}
    assert len(peaks) == 1


# -- what is replaced ------------------------------------------------------------------------------


def test_a_tensor_that_is_replaced_stops_to_count_when_it_is_gone():
    kept = {"state": floats(16)}

    def replace():
        kept["state"] = floats(10)  # both are there for a moment
        floats(8)

    meter = CpuMeter()
    with meter.measuring(lambda: kept.values()):
        replace()
    assert meter.reading().peak_memory_bytes == 26 * MIB


def test_after_a_replacement_only_the_new_tensor_counts():
    kept = [floats(16)]
    meter = CpuMeter()
    with meter.measuring(lambda: kept):
        kept.clear()
        kept.append(floats(2))
        floats(15)
    assert meter.reading().peak_memory_bytes == 17 * MIB


def test_what_an_earlier_measurement_has_left_does_not_count_when_it_is_gone():
    meter, left = CpuMeter(), []
    with meter.measuring(list):
        left.append(floats(4))

    def block():
        left.clear()
        floats(6)

    assert peak_of(block) == 6 * MIB


def test_measuring_changes_no_number_and_no_view():
    whole = torch.arange(1000.0)
    part = whole[10:20]
    with CpuMeter().measuring(lambda: [whole, part]):
        part += 1
    expected = torch.arange(1000.0)
    expected[10:20] += 1
    assert torch.equal(whole, expected)


def test_a_tensor_in_memory_that_torch_cannot_allocate_counts(tmp_path):
    file = tmp_path / "weights.pt"
    torch.save(floats(4), file)
    mapped = torch.load(file, mmap=True)
    assert peak_of(lambda: floats(1), resident=[mapped]) == 5 * MIB


class Pair(torch.Tensor):
    """A tensor that is made of two others, as quantized ones are of codes and scales."""

    @staticmethod
    def __new__(cls, codes, scales):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=codes.dtype)

    def __init__(self, codes, scales):
        self.codes, self.scales = codes, scales

    def __tensor_flatten__(self):
        return ["codes", "scales"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(func)


@pytest.mark.parametrize(
    ("make", "mebibytes"),
    [
        (lambda: floats(4).share_memory_(), 4),
        (
            lambda: torch.sparse_coo_tensor(
                torch.zeros(1, MIB // 8, dtype=torch.int64), floats(0.5), (1,)
            ),
            1.5,
        ),
        (lambda: Pair(floats(2), floats(1)), 3),
        (lambda: floats(0), 0),
        (lambda: torch.ones(4).to_mkldnn(), 0),
    ],
    ids=["shared", "sparse", "of two tensors", "empty", "of oneDNN"],
)
def test_a_tensor_of_another_kind_counts_with_the_memory_that_torch_shows(make, mebibytes):
    kept = make()
    assert peak_of(lambda: floats(1), resident=[kept]) == (1 + mebibytes) * MIB


class Remembers(nn.Module):
    """Keeps the hidden states of its last call: as a buffer, as an attribute, or in a list."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.scale = nn.Parameter(torch.ones(MIB // 4))  # 1 MiB
        self.register_buffer("buffer", torch.zeros(1), persistent=False)
        self.attribute, self.listed = torch.zeros(1), [torch.zeros(1)]

    def forward(self, tokens, labels):
        hidden = (self.scale.detach() * tokens.sum()).repeat(8)  # 8 MiB
        match self.kind:
            case "buffer":
                self.buffer = hidden
            case "attribute":
                self.attribute = hidden
            case "list":
                self.listed[0] = hidden
        return self.scale.sum() * 1e-6


@pytest.mark.parametrize("kind", ["buffer", "attribute", "list"])
def test_a_model_that_replaces_what_it_keeps_has_the_peak_of_its_construction(kind):
    """1 MiB of weights, 8 MiB from the last step, and the next 8 MiB with their 1 MiB factor."""
    model = Remembers(kind)
    tokens = torch.ones(2, 4)
    meter = CpuMeter()
    model(tokens, tokens)
    with meter.measuring(lambda: [*model.parameters(), *(t for _, t in held_tensors(model))]):
        for _ in range(3):
            model(tokens, tokens)
    small = meter.reading().peak_memory_bytes - 18 * MIB
    assert 0 <= small < 4096
