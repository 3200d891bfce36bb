"""Verdicts of the parity gate, for given traces."""

import json
from dataclasses import asdict, replace

import pytest

from autotune.errors import StudyMismatch
from autotune.spec.config import (
    BF16_WEIGHTS,
    LegalityContext,
    TrainingConfig,
    rule_violations,
)
from autotune.spec.parity import PROJECTIONS, TOLERANCES, NoTrace, ParityTrace
from autotune.study.running.parity_gate import ParityGate, plain_form
from tests.building.flows import AtOnce, as_flow

SAME = ParityTrace(
    losses=(5.5, 5.4, 5.3),
    gradient_norms={"block 0": 1.0},
    gradient_projections={"block 0": (1.0, -1.0)},
    draws_random_numbers=False,
)
RANDOM = replace(SAME, draws_random_numbers=True)
OTHER_MASKS = replace(RANDOM, losses=(5.6, 5.5, 5.4))
WRONG = replace(RANDOM, gradient_projections={"block 0": (0.3, -0.3)})
NO_ROOM = NoTrace(outcome="out_of_memory", message="out of device memory")
CRASH = NoTrace(outcome="crashed", message="RuntimeError: modified by an inplace operation")
BUDGET = TrainingConfig(compile="model", memory_budget=0.5, micro_batch_size=4)


class Traces:
    """A tracer that answers from a table and records its calls."""

    def __init__(self, otherwise=SAME):
        self.otherwise, self.answers, self.calls = otherwise, {}, []
        self.dequantized = []
        self.shallow, self.at_two_blocks = [], SAME

    def answer(self, config, trace, *, dropout=True):
        self.answers[config, dropout] = trace
        return self

    def __call__(self, config, *, dropout, dequantized, layers):
        self.calls.append((config, dropout))
        if dequantized:
            self.dequantized.append(config)
        if layers is not None:
            self.shallow.append((config, layers))
            return self.at_two_blocks
        return self.answers.get((config, dropout), self.otherwise)


@pytest.fixture
def gate(tmp_path):
    def make(traces, *, name="parity", **options):
        return AtOnce(
            ParityGate(
                as_flow(traces), folder=tmp_path / name, on_trace=lambda config: None, **options
            )
        )

    return make


def test_without_random_numbers_the_trial_itself_is_compared_with_a_plain_training(gate):
    verdict = gate(Traces(SAME)).check(BUDGET)
    assert (verdict.kind, verdict.reference) == ("compare", SAME)


def test_quantized_weights_are_compared_with_what_they_stand_for(gate):
    traces = Traces(SAME)
    qlora = TrainingConfig(precision="bf16-mixed", adapter="lora", base_weights="nf4")
    verdict = gate(traces).check(qlora)
    assert (verdict.kind, traces.dequantized) == ("compare", [qlora])


def test_one_plain_training_serves_a_whole_class(gate):
    traces = Traces(SAME)
    the_gate = gate(traces)
    for size in (4, 2, 1):
        the_gate.check(replace(BUDGET, micro_batch_size=size))
    assert traces.calls == [(plain_form(BUDGET, micro_batch_size=1), True)]


def test_a_plain_training_is_stored_for_the_next_run_of_the_study(gate):
    gate(Traces(SAME)).check(BUDGET)
    again = Traces(CRASH)
    assert gate(again).check(BUDGET).reference == SAME
    assert again.calls == []


def test_precision_and_optimizer_are_what_a_plain_training_keeps():
    config = TrainingConfig(
        precision="bf16-mixed", optimizer="sgd", checkpointing="block", micro_batch_size=4
    )
    assert plain_form(config, micro_batch_size=2) == TrainingConfig(
        precision="bf16-mixed", optimizer="sgd", micro_batch_size=2
    )


@pytest.mark.parametrize("precision", BF16_WEIGHTS)
def test_a_plain_training_adds_up_gradients_of_weights_in_bf16_in_fp32(precision, gate):
    traces, config = Traces(SAME), replace(BUDGET, precision=precision)
    gate(traces, sums_in_fp32=True, global_batch=8).check(config)
    exact = replace(plain_form(config, micro_batch_size=1), gradient_accumulation_dtype="fp32")
    assert traces.calls == [(exact, True)]


@pytest.mark.parametrize("precision", BF16_WEIGHTS)
def test_a_plain_training_with_nothing_to_add_up_is_legal(precision, gate):
    """Where random numbers need its own micro batch, which may be the global batch."""
    traces, config = Traces(RANDOM), replace(BUDGET, precision=precision)
    at = LegalityContext(global_batch=config.micro_batch_size)
    gate(traces, sums_in_fp32=True, global_batch=at.global_batch).check(config)
    whole = [called for called, _ in traces.calls if called.micro_batch_size == at.global_batch]
    assert plain_form(config, micro_batch_size=at.global_batch) in whole
    assert not [violation for one in whole for violation in _of_sums(one, at)]


def _of_sums(config, at):
    violations = rule_violations(asdict(config), at)
    return [one for one in violations if "gradient_accumulation_dtype" in str(one)]


def test_with_the_same_masks_it_is_compared_at_its_own_micro_batch(gate):
    traces, config = Traces(RANDOM), replace(BUDGET, memory_budget=1.0)
    assert gate(traces).check(config).kind == "same"
    assert (plain_form(BUDGET, micro_batch_size=4), True) in traces.calls


def test_wrong_gradients_with_dropout_fail_though_they_are_right_without(gate):
    verdict = gate(Traces(RANDOM).answer(BUDGET, WRONG)).check(BUDGET)
    assert verdict.kind == "failed"
    assert "with dropout" in verdict.message
    assert "70 % off" in verdict.message


def test_other_masks_are_no_other_training(gate):
    whole = replace(BUDGET, memory_budget=1.0)
    traces = Traces(RANDOM).answer(BUDGET, OTHER_MASKS).answer(whole, OTHER_MASKS)
    assert gate(traces).check(BUDGET).kind == "same"


def test_what_is_wrong_without_dropout_fails_whatever_the_masks(gate):
    whole = replace(BUDGET, memory_budget=1.0)
    traces = Traces(RANDOM).answer(BUDGET, OTHER_MASKS).answer(whole, OTHER_MASKS)
    verdict = gate(traces.answer(BUDGET, WRONG, dropout=False)).check(BUDGET)
    assert verdict.kind == "failed"
    assert verdict.message.startswith("without dropout")


def test_a_plain_training_that_does_not_fit_is_checkpointed(gate):
    plain = plain_form(BUDGET, micro_batch_size=1)
    verdict = gate(Traces(SAME).answer(plain, NO_ROOM)).check(BUDGET)
    assert verdict.kind == "compare"


class OneDeviceIsTooSmall(Traces):
    """No single device holds the model; one process does, with its weights on the host, or none."""

    def __init__(self, *, host_is_large):
        super().__init__(SAME)
        self.host_is_large = host_is_large

    def __call__(self, config, *, dropout, dequantized, layers):
        trace = super().__call__(config, dropout=dropout, dequantized=dequantized, layers=layers)
        fits = config.sharding != "none" or (config.offload == "all" and self.host_is_large)
        return trace if fits else NO_ROOM


CHECKPOINTED = TrainingConfig(checkpointing="block", micro_batch_size=2)
DDP = TrainingConfig(sharding="ddp", micro_batch_size=2)


def test_what_no_device_holds_is_compared_with_one_process_that_has_it_on_the_host(gate):
    traces = OneDeviceIsTooSmall(host_is_large=True)
    verdict = gate(traces, devices=4, device_type="cuda").check(DDP)
    assert verdict.reference.compared_with.startswith("one process with the weights on the host")
    assert [config.sharding for config, _ in traces.calls] == ["none"] * 3


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_what_no_process_holds_is_compared_with_zero3_and_the_record_says_so(gate, device_type):
    traces = OneDeviceIsTooSmall(host_is_large=False)
    the_gate = gate(traces, devices=4, device_type=device_type)
    assert the_gate.check(DDP).kind == "compare"
    again = the_gate.check(DDP).reference  # it is not run again, and has its name all the same
    assert again.compared_with.startswith("zero3 on the same 4 devices")
    assert again.described("1 % off").startswith("1 % off, compared with zero3")
    assert sum(config.sharding == "zero3" for config, _ in traces.calls) == 1


def test_on_one_device_nothing_else_is_compared_with(gate):
    traces = OneDeviceIsTooSmall(host_is_large=True)
    verdict = gate(traces, device_type="cuda").check(CHECKPOINTED)
    assert (verdict.kind, len(traces.calls)) == ("not compared", 2)


def test_a_missing_reference_is_reported(gate):
    verdict = gate(Traces(NO_ROOM)).check(BUDGET)
    assert (verdict.kind, verdict.message) == (
        "not compared",
        "the plain training to compare with: out of device memory",
    )


# -- without the plain training of the whole model -------------------------------------------------


def plain_forms(config, *, micro_batch_size):
    """The plain training, and the one that recomputes where that has no room."""
    plain = plain_form(config, micro_batch_size=micro_batch_size)
    return plain, replace(plain, checkpointing="block")


def without_plain_training(config, why, *, otherwise=SAME):
    """Traces of which those of the plain training of the whole model are missing."""
    traces = Traces(otherwise)
    for size in (1, config.micro_batch_size):
        plain, recomputing = plain_forms(config, micro_batch_size=size)
        traces.answer(plain, why)
        if why is NO_ROOM:
            traces.answer(recomputing, why)
    return traces


@pytest.mark.parametrize("config", [CHECKPOINTED, BUDGET, replace(CHECKPOINTED, optimizer="sgd")])
def test_a_plain_training_that_fails_makes_every_other_one_impossible_to_pick(config, gate):
    """Though checkpointing runs where plain training fails, and would compare as the same."""
    traces = without_plain_training(config, CRASH)
    verdict = gate(traces, has_layers=True).check(config)
    assert (verdict.kind, traces.shallow) == ("unknowable", [])
    ended = verdict.ends_trial
    assert (ended.outcome, ended.parity) == ("parity_failed", "not compared")
    assert "RuntimeError: modified by an inplace operation" in ended.message


def test_the_plain_training_is_tried_whatever_its_first_steps_did(gate):
    plain = plain_form(CHECKPOINTED, micro_batch_size=2)
    verdict = gate(without_plain_training(CHECKPOINTED, CRASH)).check(plain)
    assert (verdict.kind, verdict.ends_trial) == ("same", None)


def test_without_room_for_the_whole_model_two_blocks_are_compared(gate):
    traces = without_plain_training(CHECKPOINTED, NO_ROOM)
    verdict = gate(traces, has_layers=True).check(CHECKPOINTED)
    assert verdict.kind == "same at two blocks"
    assert verdict.message.startswith("at two blocks, at most, the ")
    assert verdict.message.endswith("(the plain training to compare with: out of device memory)")
    assert traces.shallow == [(CHECKPOINTED, 2), (plain_form(CHECKPOINTED, micro_batch_size=2), 2)]


def test_two_blocks_that_differ_are_another_training(gate):
    traces = without_plain_training(CHECKPOINTED, NO_ROOM)
    traces.at_two_blocks = SAME
    the_gate = gate(traces, has_layers=True)
    the_gate.check(CHECKPOINTED)  # stores the plain training of two blocks
    traces.at_two_blocks = replace(WRONG, draws_random_numbers=False)
    verdict = the_gate.check(CHECKPOINTED)
    assert verdict.kind == "failed"
    assert verdict.message.startswith("at two blocks, the gradient of block 0 is 70 % off")


def test_a_plain_training_of_two_blocks_that_fails_is_no_comparison(gate):
    traces = without_plain_training(CHECKPOINTED, NO_ROOM)
    traces.at_two_blocks = CRASH
    verdict = gate(traces, has_layers=True).check(CHECKPOINTED)
    assert (verdict.kind, verdict.ends_trial) == ("not compared", None)  # its own steps fail, too


def test_masks_that_have_no_plain_training_are_compared_at_two_blocks(gate):
    whole = replace(BUDGET, memory_budget=1.0)
    traces = without_plain_training(BUDGET, NO_ROOM, otherwise=RANDOM).answer(whole, NO_ROOM)
    traces.answer(plain_form(BUDGET, micro_batch_size=1), RANDOM)  # fits, but not at this size
    assert gate(traces, has_layers=True).check(BUDGET).kind == "same at two blocks"


def test_a_stored_trace_of_an_earlier_version_is_made_again(gate, tmp_path):
    gate(Traces(SAME)).check(BUDGET)
    (file,) = (tmp_path / "parity").iterdir()
    earlier = json.loads(file.read_text())
    del earlier["update_projections"]
    file.write_text(json.dumps(earlier))
    traces = Traces(SAME)
    assert gate(traces).check(BUDGET).reference == SAME
    assert len(traces.calls) == 1


def test_a_stored_trace_is_readable_json(gate, tmp_path):
    gate(Traces(SAME)).check(BUDGET)
    (file,) = (tmp_path / "parity").iterdir()
    assert json.loads(file.read_text())["losses"] == [5.5, 5.4, 5.3]


def test_a_budget_is_compared_more_strictly_with_the_same_code_without_it(
    gate,
):
    allowed = TOLERANCES["fp32"].gradient
    a_little_off = replace(
        RANDOM, gradient_projections={"block 0": (1.0 + 0.7 * allowed, -1.0 - 0.7 * allowed)}
    )
    assert gate(Traces(RANDOM).answer(BUDGET, a_little_off)).check(BUDGET).kind == "failed"
    without_budget = replace(BUDGET, memory_budget=1.0)
    assert (
        gate(Traces(RANDOM).answer(without_budget, a_little_off)).check(without_budget).kind
        == "same"
    )


WHOLE, HALF = (TrainingConfig(micro_batch_size=size) for size in (4, 2))


@pytest.mark.parametrize(
    "change",
    [
        {"gradient_projections": {"block 0": (1.1, -1.1)}},
        {"backward_norms": {"block 0": 2.0}},
        {"group_settings": {"lr of group 0": (0.1, 0.1, 0.08)}},
        {"group_settings": {"lr of group 0": (0.1,) * 6}},
        {"schedule_steps": 6},
        {"update_projections": {"block 0": (2.0,) * PROJECTIONS}},
        {"corrections": {"block 0": -2e-5}},
        {"buffer_projections": {"mean": (1.0,) * PROJECTIONS}},
        {"average_projections": (1.0,) * PROJECTIONS},
        {"tokens": 64},
    ],
    ids=lambda change: next(iter(change)),
)
def test_micro_batches_are_one_training_if_all_that_was_read_agrees(change, gate):
    whole = replace(
        SAME,
        backward_norms={"block 0": 1.0},
        group_settings={"lr of group 0": (0.1, 0.1, 0.1)},
        schedule_steps=3,
        update_projections={"block 0": (1.0,) * PROJECTIONS},
        tokens=128,
    )
    traces = Traces(whole)
    assert gate(traces).updates_alike(WHOLE, HALF)
    other = Traces(whole).answer(HALF, replace(whole, **change))
    assert not gate(other, name="other").updates_alike(WHOLE, HALF)
    assert not gate(other, name="other").updates_alike(HALF, WHOLE)


def test_a_model_that_changes_buffers_is_compared_at_its_own_micro_batch(gate):
    changing = replace(SAME, buffer_projections={"mean": (1.0,) * PROJECTIONS})
    traces = Traces(changing)
    the_gate = gate(traces)
    assert the_gate.check(BUDGET).kind == "compare"
    assert (plain_form(BUDGET, micro_batch_size=4), True) in traces.calls
    assert not the_gate.any_micro_batch_serves(BUDGET)
    assert gate(Traces(SAME), name="other").any_micro_batch_serves(BUDGET)


def test_losses_of_a_part_of_the_batch_are_no_other_training(gate):
    traces = Traces(SAME).answer(HALF, replace(SAME, losses=(2.7, 2.6, 2.5)))
    assert gate(traces).updates_alike(WHOLE, HALF)


@pytest.mark.parametrize(
    ("factor", "alike"), [(0.75, True), (1.36, True), (0.5, False), (4.0, False)]
)
def test_with_dropout_gradients_must_be_of_one_size_and_without_it_the_same(factor, alike, gate):
    """Gradients are larger by the number of micro batches if the loss is not divided by it."""
    random = replace(RANDOM, backward_norms={"block 0": 3.0, "rest": 4.0})
    scaled = {"block 0": 0.0, "rest": 5.0 * factor}  # of all blocks together
    traces = Traces(random).answer(HALF, replace(random, backward_norms=scaled))
    assert gate(traces).updates_alike(WHOLE, HALF) == alike
    wrong = traces.answer(HALF, WRONG, dropout=False)
    assert not gate(wrong, name="wrong").updates_alike(WHOLE, HALF)


def test_a_micro_batch_whose_plain_training_fails_is_alike_to_none(gate):
    traces = Traces(SAME)
    for plain in (HALF, replace(HALF, checkpointing="block")):
        traces.answer(plain, NO_ROOM)
    assert not gate(traces).updates_alike(WHOLE, HALF)


# -- a study that goes on ------------------------------------------------------------------------


OTHER_DATA = replace(SAME, losses=(5.5, 5.9, 5.3))


def test_a_plain_training_that_another_search_stored_and_that_changed_ends_the_study(gate):
    gate(Traces(SAME)).check(BUDGET)
    with pytest.raises(StudyMismatch, match=r"no longer what the study was begun with.*step 2"):
        gate(Traces(OTHER_DATA)).check_unchanged(BUDGET)


def test_a_plain_training_that_is_as_stored_is_run_again_once_in_a_search(gate):
    gate(Traces(SAME)).check(BUDGET)
    traces = Traces(SAME)
    the_gate = gate(traces)
    for _ in range(2):
        the_gate.check_unchanged(BUDGET)
    assert traces.calls == [(plain_form(BUDGET, micro_batch_size=1), True)]


def test_within_one_search_and_for_a_training_that_never_repeats_itself_nothing_is_said(gate):
    first = gate(Traces(SAME))
    first.check(BUDGET)
    first.check_unchanged(BUDGET)
    losses = iter(((5.5, 5.9, 5.3), (5.5, 6.5, 5.3)))

    def never_the_same(config, *, dropout, dequantized, layers=None):
        return replace(SAME, losses=next(losses))

    gate(never_the_same).check_unchanged(BUDGET)
