"""Every technique on every model family has the right losses and the right effect.

The plain tests run rows in which every two values meet once, without torch.compile; the slow ones
every value of every technique alone on every family, and such rows with torch.compile.
"""

import functools
import time

import pytest
import torch

from autotune.execution.process.preparation import prepare
from autotune.execution.tasks import Prepare
from autotune.models import build_model
from autotune.shipped import activation_offload
from autotune.shipped.int8 import Int8Linear
from autotune.shipped.quantized import tensors_behind
from autotune.spec.config import (
    CHOICES,
    OF_SEVERAL_DEVICES,
    LegalityContext,
    TrainingConfig,
    rule_violations,
)
from autotune.spec.training_request import TrainingRequest
from autotune.techniques import find_unavailable
from autotune.techniques.requirements import missing_parts
from autotune.training.trainer import Trainer
from tests.techniques.families import FAMILIES, GLOBAL_BATCH, LAYERS, RUN, workload_of
from tests.techniques.operators import OperatorCount
from tests.techniques.pairwise import pairwise

STEPS = 3
TOLERANCES = {"fp32": 1e-5, "fp8": 3e-2, "int8-mixed": 3e-2}
OF_16_BIT = 2e-2
PLAIN_SHARE = 32
"""The plain tests run one in this many of the sampled rows."""
PLAIN = TrainingConfig(micro_batch_size=GLOBAL_BATCH)
OF_OTHER_TESTS = (*OF_SEVERAL_DEVICES, "compile_mode", "engine")
"""Techniques that need several devices, a GPU, or a process of their own."""
EVERY_CHOICE = {
    # First, so that what does not go with accumulation is found before the others are tried.
    "micro_batch_size": (GLOBAL_BATCH, 1),
    **{field: values for field, values in CHOICES.items() if field not in OF_OTHER_TESTS},
    "offload": ("none", "frozen"),
}
RECOMPUTED = {
    "none": 0,
    "every-4": 1,
    "every-2": 2,
    "attention": 4,
    "selective": 4,
    "selective-2": 4,
    "save-attention": 4,
    "block": 4,
    "sqrt": 4,
}
"""Attention parts of four blocks that run again in backward."""


# -- combinations ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("families")


@functools.cache
def excluded(family, folder):
    """{technique: {value: reason}} of what this device or this family cannot do."""
    with torch.device("meta"):
        parts = build_model(workload_of(family, folder))
    lacking = missing_parts(parts, CHOICES, sequence_length=RUN["sequence_length"])
    unavailable = unavailable_here()
    return {
        field: {**unavailable.get(field, {}), **lacking.get(field, {})} for field in EVERY_CHOICE
    }


@functools.cache
def unavailable_here():
    choices = {
        field: values
        for field, values in CHOICES.items()
        if field not in ("compile", "activation_offload", "offload")
    }
    return find_unavailable(choices, device=torch.device("cpu"))


def works(row, folder):
    lacking = excluded(row["family"], folder) if "family" in row else {}
    here = all(str(row[field]) not in lacking.get(field, {}) for field in row)
    others = {field: getattr(PLAIN, field) for field in OF_OTHER_TESTS}
    return here and not rule_violations(
        {**others, **row}, LegalityContext(global_batch=GLOBAL_BATCH)
    )


def sampled(folder, *, compile_scopes):
    choices = {
        # First, so that what no adapter goes with is found before the others are tried.
        "adapter": EVERY_CHOICE["adapter"],
        "family": FAMILIES,
        **EVERY_CHOICE,
        "compile": compile_scopes,
    }
    return pairwise(choices, lambda row: works(row, folder))


# -- training and counting -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trainer_of(folder):
    """trainer_of("llama", config) is a Trainer of the family's small workload."""

    @functools.cache
    def prepared(family):
        workload = workload_of(family, folder)
        prepare(Prepare(workload=workload, folder=folder / family))
        return workload

    def make(family, config):
        workload = prepared(family)
        return Trainer(
            TrainingRequest(
                workload=workload,
                config=config,
                folder=folder / family,
                device="cpu",
                cap_bytes=2**40,
                requested_at=time.monotonic(),
            )
        )

    return make


@pytest.fixture(scope="module")
def losses_of_plain(trainer_of):
    """The losses with the row's precision, optimizer and adapter and no other technique."""

    @functools.cache
    def losses(family, config):
        return trained(trainer_of(family, config))

    return lambda row: losses(row["family"], plain_config(row))


def plain_config(row):
    fields = ("precision", "optimizer", "adapter", "adapter_targets")
    choices = {field: row[field] for field in fields}
    if (
        row["precision"] == "bf16-true"
    ):  # a loop over its operations rounds at each, a fused kernel at the end
        choices["optimizer_fusion"] = row["optimizer_fusion"]
    return TrainingConfig(**choices, micro_batch_size=GLOBAL_BATCH)


@pytest.fixture
def moved(monkeypatch):
    """Collects what is copied to the host."""
    seen, to_host = [], activation_offload.to_host
    monkeypatch.setattr(activation_offload, "SMALLEST_BYTES", 4096)
    monkeypatch.setattr(
        activation_offload, "to_host", lambda tensor: (seen.append(tensor), to_host(tensor))[1]
    )
    return seen


@pytest.fixture
def eager_updates():
    """AdamW in 8 bits compiles its update, which takes longer than all else here."""
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


def trained(trainer):
    batches = trainer.batches()
    return [trainer.step(step, next(batches)) for step in range(STEPS)]


def calls_of(modules):
    count = []
    for module in modules:
        module.register_forward_pre_hook(lambda *_: count.append(1))
    return count


def attention_parts(parts):
    named = [
        m
        for name, m in parts.model.named_modules()
        if name.rpartition(".")[2] == parts.attention_name
    ]
    # Recomputation is inside of a call: what is in the attention is called again.
    return [next(iter(module.children())) for module in named]


def check_losses(row, losses, losses_of_plain):
    expected = losses_of_plain(row)
    assert losses == pytest.approx(expected, rel=TOLERANCES.get(row["precision"], OF_16_BIT))


def check_effects(row, trainer, moved):
    """Checks that one step shows the effect of every technique of `row`, and no other."""
    parts, micro_batches = trainer.training.parts, GLOBAL_BATCH // row["micro_batch_size"]
    attended, headed = calls_of(attention_parts(parts)), calls_of([parts.head])
    batch = next(trainer.batches())
    with OperatorCount() as counted:
        trainer.step(STEPS, batch)
    count = counted.count
    assert len(attended) == micro_batches * (LAYERS + RECOMPUTED[row["checkpointing"]])
    assert (len(headed) > micro_batches) == (row["loss"] == "chunked")
    assert bool(moved) == (row["activation_offload"] == "cpu")
    if row["attention"] == "math":
        assert not any("flash" in name for name in count)
    assert any(name.startswith(("_fused_ad", "_fused_sgd")) for name in count) == (
        row["optimizer_fusion"] == "kernel"
    )
    # Only then; Adafactor's own foreach has steps of other names.
    assert row["optimizer_fusion"] == "foreach" or not count["_foreach_addcdiv_"]
    check_weights(row, parts.model)
    # Its products are seen as plain ones from outside of its tensors.
    assert any(type(module).__name__ == "Float8Linear" for module in parts.model.modules()) == (
        row["precision"] == "fp8"
    )
    assert any(isinstance(module, Int8Linear) for module in parts.model.modules()) == (
        row["precision"] == "int8-mixed"
    )


def check_weights(row, model):
    """Checks what is trained, and in which number format everything is stored."""
    is_16_bit = row["precision"] in ("bf16-true", "bf16-stochastic")
    trained_dtype = torch.bfloat16 if is_16_bit else torch.float32
    weights = dict(model.named_parameters())
    assert {weight.dtype for weight in weights.values() if weight.requires_grad} == {trained_dtype}
    adapters = {name for name in weights if "lora_" in name}
    assert bool(adapters) == (row["adapter"] != "none")
    for name, weight in weights.items():
        assert weight.requires_grad == (name in adapters or not adapters)
    stored = {part.dtype for weight in weights.values() for part in tensors_behind(weight)}
    quantized = row["base_weights"].removesuffix("-experts")
    assert (torch.int8 in stored) == (quantized == "int8")
    assert (torch.float8_e4m3fn in stored) == (quantized == "fp8")
    assert (torch.uint8 in stored) == (quantized == "nf4")
    if row["base_weights"] == "trained":
        assert stored == {trained_dtype}
    if row["base_weights"] in ("bf16", "fp16"):
        in_16_bits = {"bf16": torch.bfloat16, "fp16": torch.float16}[row["base_weights"]]
        assert stored == {in_16_bits, torch.float32}


def config_of(row):
    return TrainingConfig(**{field: value for field, value in row.items() if field != "family"})


# -- the contract ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("eager_updates")
def test_every_two_values_that_can_be_combined_preserve_losses_and_effects(
    folder, trainer_of, losses_of_plain, moved
):
    sample = sampled(folder, compile_scopes=("none",))
    assert {row["family"] for row in sample} == set(FAMILIES)
    for row in sample[::PLAIN_SHARE]:
        keeps_the_contract(row, trainer_of, losses_of_plain, moved)


@pytest.mark.slow
@pytest.mark.usefixtures("eager_updates")
def test_the_rest_of_every_two_values(folder, trainer_of, losses_of_plain, moved):
    sample = sampled(folder, compile_scopes=("none",))
    for index, row in enumerate(sample):
        if index % PLAIN_SHARE:
            keeps_the_contract(row, trainer_of, losses_of_plain, moved)


def keeps_the_contract(row, trainer_of, losses_of_plain, moved):
    moved.clear()
    try:
        losses_of_plain(row)  # first: it sets the process
        trainer = trainer_of(row["family"], config_of(row))
        check_losses(row, trained(trainer), losses_of_plain)
        moved.clear()
        check_effects(row, trainer, moved)
    except Exception as error:
        raise AssertionError(f"{row}: {error}") from error


@pytest.mark.slow
@pytest.mark.usefixtures("eager_updates")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        (f, v)
        for f in EVERY_CHOICE
        for v in EVERY_CHOICE[f]
        if f != "compile" and v != getattr(PLAIN, f)
    ],
)
def test_every_value_of_every_technique_alone(
    family, field, value, folder, trainer_of, losses_of_plain, moved
):
    row = {"family": family, **PLAIN.to_dict(), field: value}
    if reason := excluded(family, folder).get(field, {}).get(str(value)):
        pytest.skip(reason)
    if broken := rule_violations(row, LegalityContext(global_batch=GLOBAL_BATCH)):
        pytest.skip(broken[0])
    keeps_the_contract(row, trainer_of, losses_of_plain, moved)


@pytest.mark.slow
@pytest.mark.parametrize("scope", ["block", "model"])
@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_with_every_checkpointing_the_losses_are_the_same(
    family, scope, folder, trainer_of, losses_of_plain
):
    for checkpointing in CHOICES["checkpointing"]:
        row = {
            "family": family,
            **PLAIN.to_dict(),
            "compile": scope,
            "checkpointing": checkpointing,
        }
        if works(row, folder):
            torch._dynamo.reset()
            check_losses(row, trained(trainer_of(family, config_of(row))), losses_of_plain)
