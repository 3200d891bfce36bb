"""Explanations of hand-made predictions, with the sizes of the model of the `peak_memory` table."""

from dataclasses import replace

import pytest

from autotune.analysis.explanation import explain
from autotune.analysis.peak import describe_module, moment_of, peak_sentences
from autotune.analysis.variants import (
    Explained,
    Pair,
    Variant,
    best_partner,
    techniques_without_effect,
)
from autotune.spec.config import LegalityContext, TrainingConfig
from autotune.spec.prediction import CATEGORIES, Holder, Prediction, Timeline
from tests.building.results import record

GIB = 1024**3
BATCH = 4
PLAIN = TrainingConfig(micro_batch_size=BATCH)
CHECKPOINTED = replace(PLAIN, checkpointing="block")
FUSED = replace(PLAIN, optimizer_fusion="backward")
BOTH = replace(CHECKPOINTED, optimizer_fusion="backward")
COMPILED = replace(PLAIN, compile="model")
COMPILED_FUSED = replace(COMPILED, optimizer_fusion="backward")


def prediction(
    *, phase="backward", module="blocks.0.feed_forward", operator="aten.mul", plan=None, **gibibytes
):
    """Sizes in GiB by category; parameters are 6 GiB unless given."""
    sizes = dict.fromkeys(CATEGORIES, 0) | {"parameters": 6 * GIB}
    sizes |= {name: int(size * GIB) for name, size in gibibytes.items()}
    holders = tuple(
        Holder(
            category=name,
            module="blocks.*.feed_forward.up",
            operator="aten.mm",
            count=32,
            size_bytes=size // 2,
        )
        for name, size in sizes.items()
        if size
    )
    peak = sum(sizes.values())
    return Prediction(
        device="cuda",
        fake_device="cpu",
        parameters=1000,
        peak_memory_bytes=peak,
        upper_bound_bytes=peak,
        lower_bound_bytes=peak,
        phase=phase,
        module=module,
        operator=operator,
        bytes_by_category=sizes,
        holders=holders,
        plan=plan,
    )


def at(share, given):
    """`given` with a timeline in which the peak is so far into a backward phase of 1,000 events."""
    timeline = Timeline(
        events=(0,),
        bytes_by_category={},
        phases=(("forward", 0, 500), ("backward", 500, 1500)),
        peak_event=500 + int(share * 1000),
    )
    return replace(given, timeline=timeline)


BEFORE_GRADIENTS = prediction(
    module="Deep", operator="aten._log_softmax_backward_data", activations=15
)
"""Eager, nothing recomputed: the peak is at the start of backward."""
WITH_GRADIENTS = prediction(gradients=5.8, activations=0.4)
"""Every block checkpointed: the peak is at the end of backward."""
AFTER_FUSION = at(0.03, prediction(activations=1, gradients=0.04))
WHOLE_MODEL = prediction(
    module="Deep", operator="triton_poi_fused_mul_0", gradients=2, activations=4, plan="a plan"
)


def variant(technique, value, config, predicted=None, **fields):
    return Variant(technique=technique, value=value, config=config, prediction=predicted, **fields)


CHECKPOINTING = variant("checkpointing", "block", CHECKPOINTED, WITH_GRADIENTS)
FUSION = variant("optimizer_fusion", "backward", FUSED, BEFORE_GRADIENTS)
FUSION_WITH_CHECKPOINTING = Pair(
    technique="optimizer_fusion",
    value="backward",
    partner=CHECKPOINTING,
    alone=CHECKPOINTED,
    together=BOTH,
    alone_peak_bytes=WITH_GRADIENTS.peak_memory_bytes,
    together_peak_bytes=AFTER_FUSION.peak_memory_bytes,
)


def explained(config=PLAIN, predicted=BEFORE_GRADIENTS, **fields):
    return Explained(
        config=config, prediction=predicted, at=LegalityContext(global_batch=BATCH), **fields
    )


def explanation(given, variants, pairs=(), impossible=None):
    return explain(given, variants, pairs, impossible=impossible or {})


def no_help(given, variants, pairs=(), *, technique, **fields):
    remarks = explanation(given, variants, pairs, **fields).no_help
    return " ".join(remark.sentence for remark in remarks if remark.technique == technique)


# -- where the peak is -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("predicted", "config", "moment"),
    [
        (BEFORE_GRADIENTS, PLAIN, "start of backward"),
        (prediction(activations=10, gradients=0.2), PLAIN, "start of backward"),
        (prediction(activations=10, gradients=1.5), PLAIN, "middle of backward"),
        (WITH_GRADIENTS, CHECKPOINTED, "end of backward"),
        (WHOLE_MODEL, COMPILED_FUSED, "middle of backward"),
        (prediction(phase="forward", activations=9), PLAIN, "forward"),
        (prediction(phase="step", gradients=6, temporaries=6), PLAIN, "step"),
        (prediction(phase="between"), PLAIN, "elsewhere"),
    ],
)
def test_gradients_divide_backward(predicted, config, moment):
    assert moment_of(predicted, config, sequences_per_step=BATCH) == moment


@pytest.mark.parametrize(
    ("share", "moment"),
    [(0.02, "start of backward"), (0.5, "middle of backward"), (0.97, "end of backward")],
)
@pytest.mark.parametrize(
    "config", [BOTH, replace(PLAIN, micro_batch_size=1)], ids=["fused", "accumulated"]
)
def test_where_gradients_tell_nothing_the_timeline_divides_backward(share, moment, config):
    assert moment_of(at(share, AFTER_FUSION), config, sequences_per_step=BATCH) == moment


def test_without_a_timeline_such_a_peak_is_somewhere_in_backward():
    assert (
        moment_of(replace(AFTER_FUSION, timeline=None), BOTH, sequences_per_step=BATCH)
        == "backward"
    )


def sentences(predicted, config, **fields):
    return " ".join(peak_sentences(predicted, config, sequences_per_step=BATCH, **fields))


def test_a_peak_before_gradients_says_so_with_place_and_sizes():
    text = sentences(BEFORE_GRADIENTS, PLAIN)
    assert "The peak, 21.00 GiB, is at the start of backward" in text
    assert "log_softmax_backward_data allocates in Deep:" in text
    assert "15.00 GiB of activations, and no gradient exists yet" in text
    assert "activations 15.00 GiB (71 %), parameters 6.00 GiB (29 %)" in text
    assert (
        "Of the 15.00 GiB of activations: feed_forward 7.50 GiB, in smaller pieces 7.50 GiB" in text
    )


def test_a_peak_at_the_end_says_how_many_gradients_there_are():
    text = sentences(WITH_GRADIENTS, CHECKPOINTED)
    assert (
        "at the end of backward, where mul allocates in feed_forward of block 0: 97 % of all "
        "gradients exist" in text
    )


def test_a_step_in_backward_explains_why_gradients_are_few():
    text = sentences(AFTER_FUSION, BOTH)
    assert "only 40.96 MiB of gradients exist, each freed once its parameter is updated" in text


def test_gradients_of_earlier_micro_batches_are_no_riddle():
    text = sentences(
        at(0.01, prediction(gradients=6, activations=4)), replace(PLAIN, micro_batch_size=1)
    )
    assert "6.00 GiB of gradients of the micro batches before are kept" in text


def test_a_compiled_model_is_one_program_and_names_its_kernel():
    text = sentences(WHOLE_MODEL, COMPILED_FUSED)
    assert "in the one program that inductor made of the whole model" in text
    assert "the kernel triton_poi_fused_mul_0" in text
    assert "each freed" not in text


def test_the_measured_peak_is_compared_with_the_predicted():
    assert "Measured: 21.00 GiB; the prediction is 0 % off." in sentences(
        BEFORE_GRADIENTS, PLAIN, measured_bytes=21 * GIB
    )


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("blocks.3.feed_forward.up", "feed_forward.up of block 3"),
        ("model.layers.0", "block 0"),
        ("head", "head"),
        ("Deep", "Deep"),
    ],
)
def test_modules_in_words(module, words):
    assert describe_module(module) == words


# -- what helps ------------------------------------------------------------------------------------


def test_what_saves_comes_first_with_its_size_and_the_peak_it_leads_to():
    halved = variant(
        "precision", "bf16-true", replace(PLAIN, precision="bf16-true"), prediction(activations=8)
    )
    found = explanation(explained(), [halved, FUSION, CHECKPOINTING]).alternatives
    assert [one.sentence for one in found] == [
        "checkpointing block: 8.80 GiB less, 12.20 GiB",
        "precision bf16-true: 7.00 GiB less, 14.00 GiB; it trains other numbers",
    ]


def test_a_predicted_speed_stands_in_where_none_was_measured():
    own = replace(BEFORE_GRADIENTS, predicted_tokens_per_second=1000.0)
    slower = replace(WITH_GRADIENTS, predicted_tokens_per_second=760.0)
    change = variant("checkpointing", "block", CHECKPOINTED, slower)
    (found,) = explanation(explained(predicted=own), [change]).alternatives
    assert found.predicted_speed_ratio == pytest.approx(0.76)
    assert found.sentence.endswith("; predicted 24 % slower")
    measured = record(7, config=CHECKPOINTED, memory=12 * GIB, speed=900.0)
    (found,) = explanation(explained(predicted=own, records=[measured]), [change]).alternatives
    assert "predicted 24 % slower" not in found.sentence


def test_on_a_cpu_no_speed_of_16_bit_is_predicted_against_fp32():
    """They were 0.44 to 0.68 times the predicted ones."""
    own = replace(BEFORE_GRADIENTS, predicted_tokens_per_second=1000.0)
    narrow = replace(PLAIN, precision="bf16-true")
    faster = replace(WITH_GRADIENTS, predicted_tokens_per_second=1690.0)
    change = variant("precision", "bf16-true", narrow, faster)
    for device, ratio in (("cpu", None), ("cuda", pytest.approx(1.69))):
        given = explained(predicted=replace(own, device=device))
        found = [*explanation(given, [change]).alternatives, *explanation(given, [change]).others]
        assert [one.predicted_speed_ratio for one in found] == [ratio]


def test_the_cost_is_given_where_trials_measured_it():
    mine = record(3, config=PLAIN, speed=1000.0, perplexity=20.0)
    other = record(7, config=CHECKPOINTED, memory=12 * GIB, speed=760.0, perplexity=20.01)
    (found,) = explanation(
        explained(record=mine, records=[mine, other]), [CHECKPOINTING]
    ).alternatives
    assert (
        found.cost == "measured in #7: 12.00 GiB, 760 tokens/s (24 % slower), the same perplexity"
    )
    assert found.cost in found.sentence


def test_a_trial_that_did_not_fit_is_told_the_speed_of_the_one_that_did():
    mine = record(
        3, config=PLAIN, outcome="out_of_memory", memory=None, speed=None, perplexity=None
    )
    other = record(7, config=CHECKPOINTED, memory=12 * GIB, speed=760.0, perplexity=20.0)
    (found,) = explanation(
        explained(record=mine, records=[mine, other]), [CHECKPOINTING]
    ).alternatives
    assert found.cost == "measured in #7: 12.00 GiB, 760 tokens/s, perplexity 20.00"


def test_a_suggestion_that_was_tried_without_a_result_says_so_and_has_no_cost():
    failed = record(7, config=CHECKPOINTED, outcome="out_of_memory", speed=None)
    (found,) = explanation(explained(records=[failed]), [CHECKPOINTING]).alternatives
    assert found.cost == ""
    assert found.sentence.endswith("12.20 GiB; tried in #7: out of memory")


def test_a_suggestion_that_the_study_has_not_measured_says_so():
    (found,) = explanation(
        explained(records=[record(3, config=PLAIN)]), [CHECKPOINTING]
    ).alternatives
    assert found.cost == ""
    assert found.sentence.endswith("12.20 GiB; not measured in this study")


def test_a_trial_that_ended_early_has_a_speed():
    early = record(7, config=CHECKPOINTED, outcome="dominated", memory=12 * GIB, speed=760.0)
    early = replace(early, perplexity=None)
    mine = record(3, config=PLAIN, speed=1000.0)
    (found,) = explanation(
        explained(record=mine, records=[mine, early]), [CHECKPOINTING]
    ).alternatives
    assert found.cost == "measured in #7: 12.00 GiB, 760 tokens/s (24 % slower)"


# -- what cannot help ------------------------------------------------------------------------------


def test_fusion_saves_nothing_before_any_gradient_exists_and_with_checkpointing_it_does():
    text = no_help(
        explained(),
        [CHECKPOINTING, FUSION],
        [FUSION_WITH_CHECKPOINTING],
        technique="optimizer_fusion",
    )
    assert text == (
        "optimizer-fusion backward saves nothing here: the peak is at the start of backward, 15.00 "
        "GiB of activations, before any gradient exists; with checkpointing block it would save "
        "5.16 GiB more (7.04 GiB for 12.20 GiB)"
    )


def test_fusion_that_is_in_use_and_saves_nothing_is_explained_by_the_peak_without_it():
    without = variant("optimizer_fusion", "none", PLAIN, BEFORE_GRADIENTS, is_removal=True)
    given = explained(FUSED, at(0.0, BEFORE_GRADIENTS))
    (found,) = explanation(given, [without], [FUSION_WITH_CHECKPOINTING]).in_use
    assert found.saved_bytes == 0
    assert (
        "before any gradient exists; with checkpointing block it would save 5.16 GiB more"
        in found.sentence
    )


def test_fusion_that_is_in_use_at_a_peak_with_gradients_says_what_it_saves():
    without = variant("optimizer_fusion", "none", CHECKPOINTED, WITH_GRADIENTS, is_removal=True)
    (found,) = explanation(explained(BOTH, AFTER_FUSION), [without]).in_use
    assert (
        found.sentence
        == "optimizer-fusion backward saves 5.16 GiB: without it the peak would be 12.20 GiB"
    )


def test_fusion_with_a_compiled_model_saves_nothing_for_its_gradients_come_together():
    fusion = variant("optimizer_fusion", "backward", COMPILED_FUSED, WHOLE_MODEL)
    text = no_help(explained(COMPILED, WHOLE_MODEL), [fusion], technique="optimizer_fusion")
    assert (
        "the whole model is one compiled graph, which returns all gradients together when it ends"
        in text
    )


def test_fusion_with_a_compiled_model_that_peaks_before_gradients_has_two_reasons():
    early = prediction(
        module="Deep",
        operator="triton_poi_fused_mul_0",
        gradients=0.2,
        temporaries=6.5,
        plan="a plan",
    )
    fusion = variant("optimizer_fusion", "backward", COMPILED_FUSED, early)
    text = no_help(explained(COMPILED, early), [fusion], technique="optimizer_fusion")
    assert (
        "start of backward, 6.50 GiB of temporaries, when only 204.8 MiB of gradients exist" in text
    )
    assert text.endswith("returns all gradients together")


def test_checkpointing_saves_nothing_where_activations_are_few():
    few = prediction(gradients=6, activations=0.1)
    same = variant("checkpointing", "block", CHECKPOINTED, few)
    text = no_help(explained(PLAIN, few), [same], technique="checkpointing")
    assert "checkpointing block saves nothing here" in text
    assert "only 102.4 MiB of the peak are activations" in text


def test_values_that_save_nothing_either_and_those_that_need_more_are_named():
    kernel = variant(
        "optimizer_fusion", "kernel", replace(PLAIN, optimizer_fusion="kernel"), BEFORE_GRADIENTS
    )
    batched = variant(
        "optimizer_fusion",
        "foreach",
        replace(PLAIN, optimizer_fusion="foreach"),
        prediction(activations=17),
    )
    text = no_help(explained(), [batched, kernel, FUSION], technique="optimizer_fusion")
    assert text.startswith("optimizer-fusion backward saves nothing here, nor do kernel:")
    assert text.endswith("; 2.00 GiB more with foreach")


def test_an_equal_plan_of_the_compiler_is_the_reason():
    config = replace(COMPILED, memory_budget=0.5)
    budget = variant("memory_budget", 0.5, config, WHOLE_MODEL)
    text = no_help(explained(COMPILED, WHOLE_MODEL), [budget], technique="memory_budget")
    assert (
        text
        == "memory-budget 0.5 saves nothing here: the compiler makes the same plan of what to keep"
    )


def test_what_is_not_possible_is_given_with_its_reason():
    text = no_help(
        explained(),
        [],
        technique="memory_budget",
        impossible={"memory_budget": "it needs torch.compile"},
    )
    assert text == "it needs torch.compile"


def test_what_is_not_possible_alone_is_named_with_what_makes_it_possible():
    possible = replace(FUSION_WITH_CHECKPOINTING, technique="memory_budget", value=0.5)
    text = no_help(
        explained(),
        [],
        [FUSION_WITH_CHECKPOINTING, possible],
        technique="memory_budget",
        impossible={"memory_budget": "it needs torch.compile"},
    )
    assert text.startswith("it needs torch.compile; with checkpointing block memory-budget 0.5 ")


def test_what_could_not_be_predicted_is_reported():
    refused = variant("compile", "model", COMPILED, error="there is no fake form")
    text = no_help(explained(), [refused], technique="compile")
    assert text == "compile model could not be predicted: there is no fake form"


# -- which go together -----------------------------------------------------------------------------


def test_the_partner_is_what_saves_most_and_trains_the_same_numbers():
    other_numbers = variant(
        "precision", "bf16-true", replace(PLAIN, precision="bf16-true"), prediction(activations=1)
    )
    found = best_partner(
        explained(), [other_numbers, CHECKPOINTING, FUSION], other_than="optimizer_fusion"
    )
    assert found is CHECKPOINTING


def test_a_technique_is_no_partner_of_itself():
    assert best_partner(explained(), [CHECKPOINTING], other_than="checkpointing") is None


def test_only_what_saves_nothing_is_looked_at_again():
    assert list(techniques_without_effect(explained(), [CHECKPOINTING, FUSION])) == [FUSION]


def test_a_pair_that_helps_is_listed_by_itself():
    (found,) = explanation(explained(), [CHECKPOINTING, FUSION], [FUSION_WITH_CHECKPOINTING]).pairs
    assert (found.technique, found.partner_technique, found.config) == (
        "optimizer_fusion",
        "checkpointing",
        BOTH,
    )


def test_a_pair_that_does_not_help_is_mentioned_and_not_listed():
    useless = replace(
        FUSION_WITH_CHECKPOINTING, together_peak_bytes=WITH_GRADIENTS.peak_memory_bytes
    )
    found = explanation(explained(), [CHECKPOINTING, FUSION], [useless])
    assert found.pairs == ()
    assert "with checkpointing block it would not either" in " ".join(
        one.sentence for one in found.no_help
    )


def test_a_device_that_trains_its_part_of_a_batch_at_once_keeps_no_gradients():
    at = LegalityContext(global_batch=2 * BATCH, devices=2)
    asked = Explained(config=PLAIN, prediction=BEFORE_GRADIENTS, at=at)
    assert "micro batches before" not in " ".join(explain(asked, [], [], impossible={}).peak)


def test_a_technique_that_saves_little_is_not_said_to_save_nothing():
    less = variant("checkpointing", "block", CHECKPOINTED, prediction(activations=14.99))
    text = no_help(explained(), [less], technique="checkpointing")
    assert "checkpointing block saves only 10.24 MiB here" in text
