"""Frozen weights come from the host for the block that runs; nothing else of a training changes.

On a CPU the host's copies are in memory that torch's allocator does not know of: what it counts is
what a device would have.
"""

import pytest
import torch

from autotune.execution.process.preparation import prepare
from autotune.execution.tasks import Prepare
from autotune.models.parts import ModelParts
from autotune.predictor.predict import predict
from autotune.shipped.quantized import scales_beside, tensors_behind
from autotune.spec.config import SEARCHED, TrainingConfig
from autotune.spec.prediction import PredictionRequest
from autotune.spec.training_request import TrainingRequest
from autotune.spec.workload import make_workload
from autotune.techniques import find_unavailable
from autotune.techniques.pinned_memory import bytes_to_host
from autotune.techniques.requirements import missing_parts
from autotune.training.trainer import Trainer
from tests.techniques.families import workload_of

ADAPTED = {"adapter": "lora", "precision": "bf16-mixed", "base_weights": "bf16"}
FROZEN = {**ADAPTED, "offload": "frozen"}


@pytest.mark.parametrize("checkpointing", SEARCHED["checkpointing"])
def test_losses_are_those_of_weights_on_the_device(checkpointing, losses_of):
    plain = losses_of(steps=3, **ADAPTED, checkpointing=checkpointing)
    assert losses_of(steps=3, **FROZEN, checkpointing=checkpointing) == plain


@pytest.mark.parametrize(
    "choices",
    [
        {"base_weights": "nf4"},
        {"base_weights": "int8"},
        {"base_weights": "fp8"},
        {"base_weights": "trained"},
        {"base_weights": "trained", "precision": "fp32", "adapter": "dora"},
        {"adapter_kernels": "fused", "checkpointing": "block"},
        {"activation_offload": "cpu"},
        {"feed_forward": "tiled"},
        {"optimizer_fusion": "backward"},
        {"micro_batch_size": 1, "loss": "chunked"},
        {"optimizer": "adamw-bf16"},
    ],
    ids=str,
)
def test_losses_with_other_techniques_are_those_of_weights_on_the_device(choices, losses_of):
    plain = losses_of(steps=3, **{**ADAPTED, **choices})
    assert losses_of(steps=3, **{**FROZEN, **choices}) == plain


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("checkpointing", ["none", "block", "sqrt"])
def test_compiled_blocks_have_the_same_losses(checkpointing, losses_of):
    choices = {"compile": "block", "checkpointing": checkpointing}
    plain = losses_of(steps=2, **ADAPTED, **choices)
    torch._dynamo.reset()
    assert losses_of(steps=2, **FROZEN, **choices) == plain


def test_a_model_whose_parts_are_found_by_running_it_has_the_same_losses(tmp_path):
    """A loss in chunks asks whether the logits are those of the head, by a forward pass."""
    workload = workload_of("llama", tmp_path)
    prepare(Prepare(workload=workload, folder=tmp_path / "prepared"))

    def losses(**choices):
        config = TrainingConfig(micro_batch_size=4, loss="chunked", **choices)
        request = TrainingRequest(
            workload=workload,
            config=config,
            folder=tmp_path / "prepared",
            device="cpu",
            cap_bytes=2**40,
            requested_at=0.0,
        )
        trainer = Trainer(request)
        batches = trainer.batches()
        return [trainer.step(step, next(batches)) for step in range(2)]

    assert losses(**FROZEN) == losses(**ADAPTED)


# -- what is on the device -------------------------------------------------------------------------


def frozen_parts(block):
    return [
        part
        for weight in block.parameters()
        if not weight.requires_grad
        for part in tensors_behind(weight)
        if not any(part is scale for scale in scales_beside(weight))
    ]


def is_there(block):
    [state] = {part.untyped_storage().nbytes() >= part.nbytes for part in frozen_parts(block)}
    return state


@pytest.mark.parametrize("base_weights", ["bf16", "nf4", "int8"])
@pytest.mark.parametrize("checkpointing", ["none", "block"])
def test_two_blocks_at_most_have_their_weights_while_one_computes(
    base_weights, checkpointing, make_trainer
):
    trainer = make_trainer(**{**FROZEN, "base_weights": base_weights}, checkpointing=checkpointing)
    blocks, seen = list(trainer.training.parts.blocks), []

    def note(index):
        return lambda *_: seen.append((index, [i for i, one in enumerate(blocks) if is_there(one)]))

    for index, block in enumerate(blocks):
        block.feed_forward.register_forward_pre_hook(note(index))
        block.feed_forward.register_full_backward_pre_hook(note(index))
    trainer.step(0, next(trainer.batches()))
    forward, backward = seen[: len(blocks)], seen[len(blocks) :]
    assert forward == [(0, [0, 1]), (1, [1, 2]), (2, [2, 3]), (3, [3])]
    assert set(map(str, backward)) == set(
        map(str, [(3, [2, 3]), (2, [1, 2]), (1, [0, 1]), (0, [0])])
    )
    assert not any(is_there(block) for block in blocks), "between two steps"


def test_embeddings_head_and_last_norm_stay_on_the_device(make_trainer):
    model = make_trainer(**FROZEN).training.parts.model
    away = {
        name
        for name, weight in model.named_parameters()
        if weight.untyped_storage().nbytes() < weight.nbytes
    }
    assert away
    assert all(name.startswith("blocks.") and "lora_" not in name for name in away)
    stay = {name for name, weight in model.named_parameters() if not weight.requires_grad} - away
    assert all(not name.startswith("blocks.") for name in stay)


NUMBERS_OF_A_STEP = 160
"""Bytes of single numbers that no prediction counts: as many as with weights on the device."""


@pytest.mark.parametrize(
    ("checkpointing", "base_weights"),
    [("none", "bf16"), ("block", "nf4"), pytest.param("sqrt", "bf16", marks=pytest.mark.slow)],
)
def test_the_peak_is_predicted(checkpointing, base_weights, workload, make_trainer):
    choices = {**FROZEN, "base_weights": base_weights, "checkpointing": checkpointing}
    trainer = make_trainer(**choices)
    batches = trainer.batches()
    for step in range(workload.warmup_steps):
        trainer.step(step, next(batches))
    with trainer._meter.measuring(trainer._resident_tensors):
        trainer.step(workload.warmup_steps, next(batches))
    config = TrainingConfig(micro_batch_size=workload.global_batch, **choices)
    request = PredictionRequest(workload=workload, config=config, device="cpu")
    unseen = trainer._meter.reading().peak_memory_bytes - predict(request).peak_memory_bytes
    assert 0 <= unseen <= NUMBERS_OF_A_STEP


@pytest.mark.parametrize("base_weights", ["bf16", "nf4"])
def test_the_hosts_memory_is_that_of_the_copies(base_weights, workload, make_trainer):
    config = TrainingConfig(**{**FROZEN, "base_weights": base_weights})
    trainer = make_trainer(**{**FROZEN, "base_weights": base_weights})
    host = trainer.training.on_host
    model = trainer.training.parts.model
    in_powers_of_two = sum(1 << (copy.nbytes - 1).bit_length() for copy in host.host_tensors())
    assert bytes_to_host(config, model.parameters()) == in_powers_of_two
    of_blocks = sum(
        part.nbytes for block in trainer.training.parts.blocks for part in frozen_parts(block)
    )
    assert sum(copy.nbytes for copy in host.host_tensors()) == of_blocks


SIZES = {"layers": 8, "width": 256, "heads": 4, "sequence_length": 64, "global_batch": 2}


def predicted(device, **choices):
    workload = make_workload("cpu", SIZES)
    config = TrainingConfig(micro_batch_size=2, **choices)
    gpu = {"compute_capability": "9.0"} if device == "cuda" else {}
    return predict(PredictionRequest(workload=workload, config=config, device=device, **gpu))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_prediction_has_two_blocks_of_frozen_weights_at_the_peak(device):
    plain = predicted(device, **ADAPTED, checkpointing="block")
    moved = predicted(device, **FROZEN, checkpointing="block")
    weights = 12 * SIZES["width"] ** 2 * 2  # of a block, in 16 bits
    assert plain.peak_memory_bytes - moved.peak_memory_bytes > 0.9 * 6 * weights
    assert moved.bytes_by_category["gathered_weights"] <= 2.1 * weights


def test_a_prediction_says_what_the_host_needs():
    [note] = [note for note in predicted("cuda", **FROZEN).notes if "host" in note]
    assert note.startswith("offload frozen takes")


# -- checkpoints, evaluation and inputs ------------------------------------------------------------


@pytest.mark.parametrize("base_weights", ["bf16", "nf4", "int8"])
def test_a_state_dict_is_that_of_weights_on_the_device(base_weights, make_trainer):
    choices = {"base_weights": base_weights}
    plain = make_trainer(**{**ADAPTED, **choices}).training.parts.model.state_dict()
    moved = make_trainer(**{**FROZEN, **choices}).training.parts.model.state_dict()
    assert list(plain) == list(moved)
    for name, value in plain.items():
        for expected, part in zip(tensors_behind(value), tensors_behind(moved[name]), strict=True):
            assert part.untyped_storage().nbytes() >= part.nbytes, name
            assert torch.equal(expected, part), name


def test_a_state_dict_is_loaded_into_the_copies_on_the_host(make_trainer, losses_of):
    plain = losses_of(steps=2, **ADAPTED)
    trainer = make_trainer(**FROZEN)
    model = trainer.training.parts.model
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for copy in trainer.training.on_host.host_tensors():
        copy.zero_()
    model.load_state_dict(state)
    batches = trainer.batches()
    assert [trainer.step(step, next(batches)) for step in range(2)] == plain


def test_an_evaluation_between_steps_has_the_same_loss(make_trainer):
    def evaluated(**choices):
        trainer = make_trainer(**choices)
        batches = trainer.batches()
        trainer.step(0, next(batches))
        loss = trainer._evaluate()
        return loss, trainer.step(1, next(batches))

    assert evaluated(**FROZEN) == evaluated(**ADAPTED)


def test_gradients_reach_the_inputs_of_the_first_block(make_trainer):
    def gradient(**choices):
        parts, seen = make_trainer(**choices).training.parts, []

        def keep(_block, inputs):
            seen.append(inputs[0].detach().requires_grad_())
            return (seen[0], *inputs[1:])

        parts.blocks[0].register_forward_pre_hook(keep)
        tokens = torch.arange(32).view(1, 32)
        parts.model(tokens, tokens).backward()
        return seen[0].grad

    assert torch.equal(gradient(**FROZEN), gradient(**ADAPTED))


# -- what is excluded ------------------------------------------------------------------------------


def test_it_is_unavailable_on_a_cpu():
    found = find_unavailable({"offload": ["none", "frozen"]}, device=torch.device("cpu"))
    assert found["offload"] == {"frozen": "frozen weights are in the host's memory already"}


def test_a_model_without_blocks_or_with_a_repeated_one_cannot_have_it():
    parts = ModelParts(model=torch.nn.Linear(2, 2))
    assert (
        "no blocks"
        in missing_parts(parts, {"offload": ["frozen"]}, sequence_length=8)["offload"]["frozen"]
    )
    owner = torch.nn.Module()
    owner.blocks = torch.nn.ModuleList([torch.nn.Linear(2, 2)] * 2)
    parts = ModelParts(model=owner, blocks_owner=owner, blocks_name="blocks")
    assert (
        "several times"
        in missing_parts(parts, {"offload": ["frozen"]}, sequence_length=8)["offload"]["frozen"]
    )
