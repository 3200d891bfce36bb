"""The trainer: what it measures is what happened."""

import dataclasses
import gc
import math
import time

import pytest
import torch

from autotune.execution.process.preparation import prepare
from autotune.execution.tasks import Prepare, Probe, Train
from autotune.spec.config import TrainingConfig
from autotune.spec.parity import UPDATE_STEPS
from autotune.spec.training_request import TrainingRequest, unwatched
from autotune.training.parity import GradientSketch
from autotune.training.step import Diverged
from autotune.training.trainer import Trainer, trace, train
from tests.building.results import ON_CUDA_IN_THIS_PROCESS
from tests.building.small_blocks import with_small_blocks


@pytest.fixture
def request_for(workload, prepared):
    """request_for(steps=..., ...) is a training request with those workload settings."""

    def make(*, cap_bytes=2**40, enforce_cap=True, choices=None, **settings):
        changed = dataclasses.replace(workload, **settings)
        return TrainingRequest(
            workload=changed,
            config=TrainingConfig(**{"micro_batch_size": changed.global_batch, **(choices or {})}),
            folder=prepared,
            device="cpu",
            cap_bytes=cap_bytes,
            enforce_cap=enforce_cap,
            requested_at=0.0,
        )

    return make


def test_a_training_repeats_to_the_last_bit(request_for):
    first, second = train(request_for()), train(request_for())
    assert (first.final_loss, first.perplexity) == (second.final_loss, second.perplexity)


def test_the_first_loss_is_that_of_an_untrained_model(make_trainer):
    trainer = make_trainer()
    assert trainer.step(0, next(trainer.batches())) == pytest.approx(math.log(256), abs=0.1)


def test_before_training_the_perplexity_is_that_of_the_weights_in_the_file(request_for):
    request = dataclasses.replace(
        request_for(), config=TrainingConfig(micro_batch_size=1), evaluates_only=True
    )
    measurement = train(request)
    assert measurement.outcome == "ok"
    assert measurement.perplexity == pytest.approx(256, rel=0.1)  # it draws bytes at random
    assert measurement.perplexity != train(request_for()).perplexity


@pytest.mark.parametrize(("adapter", "says_nothing"), [("none", False), ("lora", True)])
def test_an_adapter_over_random_weights_has_a_perplexity_that_says_nothing(
    make_trainer, adapter, says_nothing
):
    assert make_trainer(adapter=adapter).run().perplexity_says_nothing == says_nothing


def test_all_configurations_see_the_same_batches(make_trainer):
    first, second = (
        make_trainer(**choices).batches() for choices in ({}, {"checkpointing": "block"})
    )
    assert all(torch.equal(next(first).tokens, next(second).tokens) for _ in range(5))


def test_another_seed_gives_another_order_of_the_same_text(request_for):
    first, second = (next(Trainer(request_for(seed=seed)).batches()) for seed in (0, 1))
    assert not torch.equal(first.tokens, second.tokens)


def test_labels_are_the_tokens_that_follow(make_trainer):
    """Labels are the inputs, shifted by one."""
    trainer = make_trainer()
    seen = []
    trainer.training.parts.model.register_forward_pre_hook(
        lambda _module, inputs: seen.append(inputs)
    )
    trainer.step(0, next(trainer.batches()))
    tokens, labels = seen[0]
    assert torch.equal(tokens[:, 1:], labels[:, :-1])


def test_perplexity_is_that_of_the_held_out_text(request_for, prepared):
    import numpy

    from autotune.shipped.token_loss import next_token_loss

    request = request_for()
    trainer = Trainer(request)
    measurement = trainer.run()
    tokens = torch.from_numpy(numpy.load(prepared / "held_out.npy").astype(numpy.int64))
    workload = request.workload
    count = workload.evaluation_sequences * workload.sequence_length
    inputs = tokens[:count].view(workload.evaluation_sequences, -1)
    labels = tokens[1 : count + 1].view(workload.evaluation_sequences, -1)
    model = trainer.training.parts.model
    with torch.no_grad():
        x = model.embedding(inputs)
        for block in model.blocks:
            x = block(x, model.rotary)
        loss = next_token_loss(model.head(model.norm(x)), labels) / count
    assert measurement.perplexity == pytest.approx(loss.exp().item(), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("micro_batch_size", [1, 2, 4])
def test_perplexity_does_not_depend_on_the_micro_batch(micro_batch_size, request_for):
    """Six held-out sequences: the last batch of four is not full."""
    measurement = train(request_for(choices={"micro_batch_size": micro_batch_size}))
    assert measurement.perplexity == pytest.approx(train(request_for()).perplexity, rel=1e-4)


def test_evaluation_is_without_dropout(make_trainer):
    trainer = make_trainer()
    model = trainer.training.parts.model
    model.norm = torch.nn.Sequential(model.norm, torch.nn.Dropout(0.5))
    assert trainer._evaluate() == trainer._evaluate()


def test_bits_per_byte_and_perplexity_agree(request_for):
    measurement = train(request_for())
    assert 2**measurement.bits_per_byte == pytest.approx(measurement.perplexity)


def test_over_the_cap_the_training_ends_with_its_peak_and_no_speed(request_for):
    measurement = train(request_for(cap_bytes=1000))
    assert (measurement.outcome, measurement.tokens_per_second) == ("over_cap", None)
    assert measurement.peak_memory_bytes > 1000


def test_the_baseline_is_measured_to_its_end_over_the_cap(request_for):
    measurement = train(request_for(cap_bytes=1000, enforce_cap=False))
    assert measurement.outcome == "over_cap"
    assert measurement.perplexity is not None


def test_a_nan_loss_ends_the_training(request_for):
    with pytest.raises(Diverged, match="step"):
        train(request_for(learning_rates={"adamw": 1e-3, "sgd": 1e6}, choices={"optimizer": "sgd"}))


@pytest.mark.slow
def test_reading_gradients_for_parity_does_not_count_as_training_time(request_for, monkeypatch):
    reference = trace(request_for(), dropout=True)
    take = GradientSketch._add

    def take_slowly(*args, **options):
        time.sleep(0.1)
        return take(*args, **options)

    monkeypatch.setattr(GradientSketch, "_add", take_slowly)
    began = time.monotonic()
    request = dataclasses.replace(request_for(), reference=reference, requested_at=began)
    parts = train(request).seconds_by_part
    assert parts["parity"] > 0.1 * 4  # there are more parameters than blocks
    assert sum(parts.values()) <= time.monotonic() - began


def test_eager_code_reports_no_compilation(request_for):
    measurement = train(request_for())
    assert (measurement.compile_seconds, measurement.compile_cache) == (None, None)


@pytest.fixture(scope="module")
def small_blocks(workload, tmp_path_factory):
    """A function from choices to a training of a model of small blocks."""
    folder = tmp_path_factory.mktemp("small")
    small = with_small_blocks(workload, folder)

    def train_it(**choices):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        config = TrainingConfig(micro_batch_size=small.global_batch, **choices)
        return train(
            TrainingRequest(
                workload=small,
                config=config,
                folder=folder / "prepared",
                device="cpu",
                cap_bytes=2**40,
                requested_at=0.0,
            )
        )

    return train_it


@pytest.fixture(scope="module")
def compiled_twice(small_blocks, tmp_path_factory):
    with pytest.MonkeyPatch.context() as changed:
        changed.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
        return [small_blocks(compile="block") for _ in range(2)]


@pytest.mark.slow
def test_compilation_is_timed_separately_and_cached_for_a_second_training(compiled_twice):
    assert [measurement.compile_cache for measurement in compiled_twice] == ["miss", "hit"]
    assert all(measurement.compile_seconds > 0 for measurement in compiled_twice)


def test_the_compilers_code_trains_as_eager_code_does(compiled_twice, small_blocks):
    eager = small_blocks()
    for measurement in compiled_twice:
        assert measurement.final_loss == pytest.approx(eager.final_loss, rel=1e-5)
        assert measurement.perplexity == pytest.approx(eager.perplexity, rel=1e-5)


def test_the_learning_rate_rises_then_is_constant(request_for):
    trainer = Trainer(request_for(learning_rate_warmup_steps=4, learning_rates={"adamw": 1.0}))
    assert [trainer.step.learning_rate(step) for step in range(6)] == [
        0.25,
        0.5,
        0.75,
        1.0,
        1.0,
        1.0,
    ]


def test_a_cosine_ends_near_a_tenth(request_for):
    trainer = Trainer(
        request_for(
            learning_rate_warmup_steps=2,
            learning_rates={"adamw": 1.0},
            schedule="cosine",
            steps=1000,
        )
    )
    rates = [trainer.step.learning_rate(step) for step in range(2, 1000)]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == pytest.approx(0.1, abs=0.001)


def test_the_learning_rate_reaches_every_parameter_of_a_step_in_backward(make_trainer):
    trainer = make_trainer(optimizer_fusion="backward")
    trainer.training.updater.set_learning_rate(0.125)
    assert {group["lr"] for group in trainer.training.updater.optimizer.param_groups} == {0.125}


@pytest.mark.gpu
def test_on_cuda_the_device_needs_more_than_the_allocated_peak(
    server, workload, prepared, tmp_path
):
    measurement = _on_cuda(server, workload, prepared, tmp_path, cap_bytes=8 * 2**30)
    assert measurement.outcome == "ok"
    assert measurement.context_bytes > 0
    assert measurement.device_bytes == measurement.peak_reserved_bytes + measurement.context_bytes
    assert measurement.peak_reserved_bytes >= measurement.peak_memory_bytes


@pytest.fixture
def on_cuda(request_for):
    """on_cuda(steps=..., ...) is a Trainer on the first GPU, in this process, and its batches."""

    def make(*, progress=unwatched, **settings):
        trainer = Trainer(
            dataclasses.replace(request_for(**settings), **ON_CUDA_IN_THIS_PROCESS),
            progress=progress,
        )
        return trainer, trainer.batches()

    return make


@pytest.mark.gpu
def test_nothing_waits_for_the_device_between_timed_steps(on_cuda):
    """A transfer that waits, such as that of a loss, is an error to torch here."""
    trainer, batches = on_cuda()
    trainer._warm_up(batches)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        timed = list(trainer._timed_steps(range(4, 10), batches))
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert all(step.seconds > 0 for step in timed)
    assert len(timed) == 6


@pytest.mark.gpu
def test_what_parity_keeps_of_gradients_counts_for_no_peak(on_cuda):
    """On the device each number takes a block of 512 bytes."""

    def held_after_reading(*, reads_gradients):
        gc.collect()
        before = torch.cuda.memory_allocated()
        trainer, batches = on_cuda()
        trainer.parity._reads = reads_gradients
        for step in range(UPDATE_STEPS):
            trainer.take_step(step, next(batches))
        torch.cuda.synchronize()
        assert bool(trainer.parity.trace().gradient_norms) is reads_gradients
        return torch.cuda.memory_allocated() - before

    held_after_reading(reads_gradients=True)  # the first step of a process allocates workspaces
    without = held_after_reading(reads_gradients=False)
    assert held_after_reading(reads_gradients=True) == without


@pytest.mark.gpu
def test_every_launched_step_is_reported_as_progress(on_cuda):
    stages = []
    trainer, batches = on_cuda(progress=lambda stage, *_: stages.append(stage))
    next(trainer._timed_steps(range(4, 10), batches))
    assert stages == ["step"] * 3  # two were launched, one has ended


@pytest.mark.gpu
def test_the_loss_of_a_timed_step_does_not_count_in_the_next_peak(on_cuda):
    trainer, _ = on_cuda()
    assert trainer.run().peak_phase in ("forward", "backward", "step")


@pytest.mark.gpu
def test_timed_steps_add_up_to_the_elapsed_time(on_cuda):
    trainer, batches = on_cuda()
    trainer._warm_up(batches)
    torch.cuda.synchronize()
    began = time.perf_counter()
    timed = list(trainer._timed_steps(range(4, 30), batches))
    torch.cuda.synchronize()
    taken = time.perf_counter() - began
    assert 0.7 * taken < sum(step.seconds for step in timed) <= 1.01 * taken


@pytest.mark.gpu
def test_on_cuda_a_nan_loss_ends_the_timed_steps_one_step_later(on_cuda):
    trainer, batches = on_cuda()
    launched = []

    def launch(step, batch):
        launched.append(step)
        return torch.tensor(math.nan if step == 6 else 1.0)

    trainer.step.launch = launch
    steps = trainer._timed_steps(range(4, 12), batches)
    assert [next(steps).loss, next(steps).loss] == [1.0, 1.0]
    with pytest.raises(Diverged, match="the loss became nan at step 7"):
        next(steps)
    assert launched == [4, 5, 6, 7]


@pytest.mark.gpu
@pytest.mark.parametrize("scope", ["none", pytest.param("model", marks=pytest.mark.slow)])
def test_on_cuda_the_cap_is_enforced_though_the_card_has_more(
    scope, server, workload, prepared, tmp_path
):
    """2 GiB of logits do not fit under a cap of 2 GiB on any device, eager or compiled."""
    big = dataclasses.replace(workload, vocab_size=2**22)
    folder = tmp_path / "prepared"
    task = Prepare(workload=big, folder=folder)
    server.submit(task, log_file=tmp_path / "prepare.log").result()
    measurement = _on_cuda(server, big, folder, tmp_path, cap_bytes=2 * 2**30, compile=scope)
    assert measurement.outcome == "out_of_memory"
    assert measurement.message.startswith("out of device memory: ")
    assert measurement.requested_bytes >= 2**30


def _on_cuda(server, workload, prepared, tmp_path, *, cap_bytes, **choices):
    from autotune.spec.config import TrainingConfig

    probe = Probe(device="cuda:0", choices={}, with_context=True)
    device = server.submit(probe, log_file=tmp_path / "probe.log").result().device
    training = TrainingRequest(
        workload=workload,
        config=TrainingConfig(micro_batch_size=workload.global_batch, **choices),
        folder=prepared,
        device="cuda:0",
        device_uuid=device.uuid_of_nvml,
        new_context_bytes=device.context_bytes,
        cap_bytes=cap_bytes,
    )
    task = Train(training=training)
    return server.submit(task, log_file=tmp_path / "trial.log").result().measurement


@pytest.mark.slow
@pytest.mark.parametrize(
    ("blocks", "precision"),
    [
        ("small", "fp32"),
        pytest.param("default", "fp32", marks=pytest.mark.slow),
        pytest.param("default", "bf16-true", marks=pytest.mark.slow),
    ],
)
def test_evaluation_never_sets_the_peak_of_a_compiled_training(
    blocks, precision, workload, tmp_path
):
    """Eager logits of a large vocabulary would exceed all that the compiled training holds."""
    wide = dataclasses.replace(workload, vocab_size=8192, layers=1)
    if blocks == "small":
        wide = with_small_blocks(wide, tmp_path)
    else:
        prepare(Prepare(workload=wide, folder=tmp_path / "prepared"))
    config = TrainingConfig(
        compile="model", precision=precision, micro_batch_size=wide.global_batch
    )
    request = TrainingRequest(
        workload=wide,
        config=config,
        folder=tmp_path / "prepared",
        device="cpu",
        cap_bytes=2**40,
        requested_at=time.monotonic(),
    )
    assert train(request).peak_phase != "evaluation"


@pytest.mark.gpu
@pytest.mark.parametrize("choices", [{"checkpointing": "block"}, {"loss": "chunked"}], ids=str)
def test_the_allocation_history_adds_up_to_the_measured_peak(choices, workload, prepared, tmp_path):
    request = TrainingRequest(
        workload=workload,
        config=TrainingConfig(micro_batch_size=workload.global_batch, **choices),
        folder=prepared,
        **ON_CUDA_IN_THIS_PROCESS,
        cap_bytes=2**40,
        snapshot_file=tmp_path / "snapshot.pickle",
        requested_at=time.monotonic(),
    )
    measurement = train(request)
    assert measurement.peak_bytes_by_category["gradients"] > 0
    # cuBLAS workspaces and what the first steps left behind are older than the history.
    assert sum(measurement.peak_bytes_by_category.values()) <= measurement.peak_memory_bytes
    assert (tmp_path / "snapshot.pickle").stat().st_size > 0
