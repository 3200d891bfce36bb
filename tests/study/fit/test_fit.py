"""The size that varies, its values and the ablation of `fit`; nothing here starts a process."""

import json
from dataclasses import replace
from itertools import pairwise
from typing import get_args

import pytest

from autotune.errors import InvalidInput
from autotune.spec.config import CHOICES, LegalityContext, TrainingConfig, rule_violations
from autotune.spec.model_file import model_name
from autotune.spec.workload import make_workload
from autotune.study.fit.ablation import ablation_steps
from autotune.study.fit.fit import FitRequest, need_text
from autotune.study.fit.result import FitResult, FitRow
from autotune.study.fit.varying import Vary, Varying

CONFIG = TrainingConfig(micro_batch_size=8)
WITH_ADAPTER = TrainingConfig(micro_batch_size=8, adapter="lora")
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 200,
}


@pytest.fixture
def llama(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return make_workload("cpu", {"model": str(tmp_path), "sequence_length": 64})


def varying(vary, workload=None, **options):
    return Varying(vary=vary, workload=workload or make_workload("cpu"), **options)


# -- values ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("vary", get_args(Vary))
def test_the_values_are_ascending_and_hold_the_one_given(vary):
    config = WITH_ADAPTER if vary == "rank" else CONFIG
    values, _ = varying(vary).legal_values(config)
    assert list(values[:1000]) == sorted(set(values[:1000]))
    assert varying(vary).start(config) in values


@pytest.mark.parametrize("vary", get_args(Vary))
def test_the_value_given_stands_for_the_workload_given(vary):
    one = varying(vary)
    assert one.at(one.start(CONFIG), CONFIG) == (one.workload, CONFIG)


def test_the_size_of_a_head_stays_while_the_width_grows():
    workload, _ = varying("width").at(320, CONFIG)
    assert (workload.width, workload.heads) == (320, 10)


def test_a_rank_that_varies_is_that_of_the_adapter():
    _, config = varying("rank").at(64, WITH_ADAPTER)
    assert config == replace(WITH_ADAPTER, adapter_rank=64)


def test_without_an_adapter_no_rank_varies():
    with pytest.raises(InvalidInput, match="without an adapter there is no rank to vary"):
        varying("rank").legal_values(CONFIG)


def test_a_micro_batch_that_varies_takes_the_global_batch_with_it():
    workload, config = varying("micro-batch").at(24, CONFIG)
    assert (workload.global_batch, config.micro_batch_size) == (24, 24)


def test_a_global_batch_that_stays_has_its_divisors_as_micro_batches():
    values, end = varying("micro-batch", keeps_global_batch=True).legal_values(CONFIG)
    assert (list(values), end) == ([1, 2, 4, 8], "the whole global batch")


def test_a_step_in_backward_leaves_only_the_whole_global_batch():
    config = replace(CONFIG, optimizer_fusion="backward")
    assert list(varying("micro-batch", keeps_global_batch=True).legal_values(config)[0]) == [8]


def test_fp8_is_tried_only_with_micro_batches_whose_tokens_it_can_multiply():
    config = TrainingConfig(precision="fp8", micro_batch_size=1)
    assert varying("seq-len").legal_values(config)[0][:3] == [16, 32, 48]
    short = make_workload("cpu", {"sequence_length": 24})
    assert varying("micro-batch", short).legal_values(config)[0][:3] == [2, 4, 6]
    assert varying("micro-batch", short, keeps_global_batch=True).legal_values(config)[0] == [
        2,
        4,
        8,
    ]


def test_fp8_with_no_micro_batch_that_it_can_multiply_gets_the_reason():
    odd = make_workload("cpu", {"sequence_length": 15, "global_batch": 8})
    with pytest.raises(InvalidInput, match="number of tokens is a multiple of 16"):
        varying("micro-batch", odd, keeps_global_batch=True).legal_values(
            TrainingConfig(precision="fp8")
        )


def test_sequences_end_with_the_positions_of_the_model(llama):
    values, end = varying("seq-len", llama).legal_values(CONFIG)
    assert values[-1] == 200
    assert "200 positions" in end


def test_the_layers_of_a_model_from_a_file_vary(llama):
    assert varying("layers", llama).at(5, CONFIG)[0].layers == 5


def test_the_layers_of_a_model_that_lists_its_blocks_do_not(tmp_path):
    content = {"model_type": "nemotron_h", "layers_block_type": ["mamba", "moe"], "vocab_size": 256}
    listed = make_workload("cpu", {"model": model_name(content), "model_config": content})
    with pytest.raises(InvalidInput, match="not specify one number of layers") as raised:
        varying("layers", listed)
    assert "seq-len" in raised.value.hint
    assert varying("seq-len", listed).start(CONFIG) == listed.sequence_length


def test_the_width_of_a_model_from_a_file_does_not(llama):
    with pytest.raises(InvalidInput, match="cannot vary"):
        varying("width", llama)


# -- the ablation ---------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", CHOICES["optimizer"])
@pytest.mark.parametrize("micro_batch_size", [8, 2])
def test_every_step_is_legal(optimizer, micro_batch_size):
    base = TrainingConfig(optimizer=optimizer, micro_batch_size=micro_batch_size)
    for step in ablation_steps(base, accumulates=micro_batch_size != 8):
        assert rule_violations(step.config.to_dict(), LegalityContext(global_batch=8)) == [], (
            step.name
        )


@pytest.mark.parametrize("optimizer", CHOICES["optimizer"])
def test_a_step_changes_one_technique(optimizer):
    configs = [
        step.config.to_dict()
        for step in ablation_steps(TrainingConfig(optimizer=optimizer), accumulates=False)
    ]
    for before, after in pairwise(configs):
        assert sum(before[field] != after[field] for field in before) == 1


def test_accumulation_leaves_the_step_in_backward_out():
    fusions = {
        step.config.optimizer_fusion for step in ablation_steps(TrainingConfig(), accumulates=True)
    }
    assert fusions == {"none"}


# -- the request -----------------------------------------------------------------------------------


def steps_of(**configuration):
    request = FitRequest(max_mem=2**30, device="cpu", configuration=configuration)
    return request.steps(request.varying("cpu"))


def test_the_ablation_begins_with_the_given_optimizer_and_micro_batch():
    first, *others = steps_of(optimizer="sgd", micro_batch_size=4)
    assert others
    assert (first.config.optimizer, first.config.micro_batch_size) == ("sgd", 4)


def test_any_other_technique_requests_a_single_configuration():
    (only,) = steps_of(checkpointing="block", optimizer="sgd")
    assert (only.config.checkpointing, only.config.optimizer) == ("block", "sgd")


# -- devices ---------------------------------------------------------------------------------------


def fewest_devices(**changes):
    settings = {"max_mem": 2**30, "vary": "devices", "device": "cuda", **changes}
    return FitRequest(**{"workload": {"global_batch": 12}, **settings})


def test_the_devices_that_vary_divide_the_global_batch_and_one_of_them_shards_nothing():
    request = fewest_devices(configuration={"sharding": "zero3"})
    one = request.varying("cuda")
    config = request.base(one)
    values, _ = one.legal_values(config)
    assert list(values) == [1, 2, 3, 4, 6, 12]
    assert one.at(1, config)[1].sharding == "none"
    assert one.at(6, config)[0].devices_per_trial == 6


def test_micro_batches_leave_out_the_devices_that_they_would_not_divide_evenly():
    request = fewest_devices(configuration={"sharding": "zero3", "micro_batch_size": 3})
    values, _ = request.varying("cuda").legal_values(request.base(request.varying("cuda")))
    assert list(values) == [1, 2, 4]


def test_without_a_sharding_each_is_tried():
    request = fewest_devices()
    names = [step.name for step in request.steps(request.varying("cuda"))]
    assert names[:4] == ["ddp", "zero1", "zero2", "zero3"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"workload": {"global_batch": 8, "devices_per_trial": 2}}, "leave one of them out"),
        ({"workload": {"global_batch": 1}}, "use a larger --global-batch"),
    ],
)
def test_a_number_of_devices_that_cannot_vary_is_rejected_with_a_remedy(changes, words):
    with pytest.raises(InvalidInput) as caught:
        fewest_devices(**changes)
    assert words in caught.value.hint


@pytest.mark.parametrize(
    ("needed", "context", "text"),
    [
        (9 * 2**30, 0, "43 layers would need up to 9.00 GiB"),
        (8 * 2**30 + 1, 0, "43 layers would need up to a little more than 8.00 GiB"),
        (8 * 2**30, 2**29, "43 layers would need up to 8.00 GiB, 512.0 MiB of it for the context"),
    ],
)
def test_what_does_not_fit_is_not_said_to_need_the_cap_itself(needed, context, text):
    assert need_text("43 layers", needed, cap_bytes=8 * 2**30, context_bytes=context) == text


def test_a_result_says_that_nothing_fits_or_whether_the_best_was_confirmed():
    row = FitRow(technique="none", config=CONFIG, predictions_made=1, message="too large")
    result = FitResult(
        varying=varying("layers"),
        cap_bytes=2**20,
        context_bytes=0,
        device_type="cpu",
        compute_capability=None,
        torch_version=None,
        rows=(row,),
        not_confirmed="no device",
    )
    assert str(result).endswith("Nothing fits under 1.00 MiB.")
    fits = replace(result, rows=(replace(row, value=3),))
    assert str(fits).endswith("Not confirmed by a trial: no device.")
