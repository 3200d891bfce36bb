"""What a prediction contains besides the peak, and what it rejects."""

import dataclasses
import functools

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._subclasses import fake_tensor

from autotune.errors import PredictionImpossible
from autotune.models import MODELS, gpt
from autotune.predictor import ranks
from autotune.predictor.fake_mode import StorageWatch
from autotune.predictor.predict import predict
from autotune.shipped.gpt import Attention
from autotune.spec.config import TrainingConfig
from autotune.spec.model_file import model_name, sizes_of
from autotune.spec.prediction import Prediction, PredictionRequest
from autotune.spec.reading import parse
from autotune.spec.workload import make_workload
from tests.building.small_blocks import with_small_blocks

GLOBAL_BATCH = 4
MIB = 1024**2


MIXTURE_OF_EXPERTS = {
    "model_type": "mixtral",
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def workload(workload):
    return dataclasses.replace(workload, layers=2)


@pytest.fixture(scope="module")
def predict_anew(workload):
    """predict_anew(checkpointing="block", device="cuda") predicts the small workload."""

    def prediction(*, device="cpu", with_timeline=False, gpu=None, torch_version=None, **choices):
        torch._dynamo.reset()
        config = TrainingConfig(**{"micro_batch_size": GLOBAL_BATCH, **choices})
        return predict(
            PredictionRequest(
                workload=workload,
                config=config,
                device=device,
                compute_capability=gpu,
                torch_version=torch_version,
                with_timeline=with_timeline,
            )
        )

    return prediction


@pytest.fixture(scope="module")
def prediction_of(predict_anew):
    """Each configuration is predicted once, for a model that no test has changed."""
    return functools.cache(predict_anew)


def test_a_gpu_holds_tokens_and_labels_of_all_micro_batches(prediction_of, workload):
    inputs = prediction_of(device="cuda", micro_batch_size=1).bytes_by_category["inputs"]
    assert inputs >= 2 * 8 * GLOBAL_BATCH * workload.sequence_length


@pytest.mark.slow
def test_only_a_fused_update_counts_its_steps_on_a_gpu(prediction_of):
    """Adam has two averages for each parameter, and a fused one its count of steps as well."""
    tensors = {
        fusion: next(h.count for h in prediction.holders if h.category == "optimizer_state")
        for fusion in ("none", "kernel")
        for prediction in [prediction_of(device="cuda", gpu="9.0", optimizer_fusion=fusion)]
    }
    assert tensors["kernel"] / tensors["none"] == 3 / 2


def test_the_categories_add_up_to_the_peak(prediction_of):
    prediction = prediction_of(checkpointing="block")
    assert sum(prediction.bytes_by_category.values()) == prediction.peak_memory_bytes


def test_the_peak_of_plain_training_comes_before_any_gradient(prediction_of):
    prediction = prediction_of()
    assert (prediction.phase, prediction.bytes_by_category["gradients"]) == ("backward", 0)


def test_with_checkpointing_the_peak_holds_gradients(prediction_of):
    assert prediction_of(checkpointing="block").bytes_by_category["gradients"] > 0


def test_a_step_in_backward_leaves_no_gradients_at_the_peak(prediction_of):
    assert (
        prediction_of(checkpointing="block", optimizer_fusion="backward").bytes_by_category[
            "gradients"
        ]
        == 0
    )


def test_what_an_optimizer_reads_during_backward_is_no_unknown_value_of_the_model(prediction_of):
    found = prediction_of(optimizer="adafactor", optimizer_fusion="backward")
    assert [note for note in found.notes if "is not known" in note] == []


def test_parameters_and_their_adam_state_are_all_counted(prediction_of, workload):
    with torch.device("meta"):
        model = gpt.build(workload)
    sizes = prediction_of().bytes_by_category
    weights = sum(4 * parameter.numel() for parameter in model.parameters())
    steps = 4 * len(list(model.parameters()))
    assert (sizes["parameters"], sizes["optimizer_state"]) == (weights, 2 * weights + steps)


def test_the_number_of_parameters_is_that_of_the_untouched_model(prediction_of, workload):
    with torch.device("meta"):
        model = gpt.build(workload)
    assert prediction_of(precision="bf16-true").parameters == sum(
        p.numel() for p in model.parameters()
    )


def test_the_module_at_the_peak_is_named_as_in_the_untouched_model(prediction_of):
    assert prediction_of(checkpointing="block").module.startswith("blocks.0.feed_forward")


def test_the_bounds_enclose_the_peak(prediction_of):
    prediction = prediction_of()
    assert (
        prediction.lower_bound_bytes <= prediction.peak_memory_bytes <= prediction.upper_bound_bytes
    )


def test_a_prediction_survives_being_stored_as_json(prediction_of):
    import json

    prediction = prediction_of(with_timeline=True)
    assert parse(Prediction, json.loads(json.dumps(prediction.to_dict()))) == prediction


@pytest.mark.slow
def test_budgets_with_the_same_plan_are_recognised_and_others_told_apart(workload, tmp_path):
    small = with_small_blocks(workload, tmp_path)
    plans = []
    for budget in (0.9, 0.7, 0.0):
        torch._dynamo.reset()
        config = TrainingConfig(
            micro_batch_size=GLOBAL_BATCH, compile="block", memory_budget=budget
        )
        request = PredictionRequest(workload=small, config=config, device="cpu")
        plans.append(predict(request).plan)
    assert (plans[0] == plans[1], plans[0] == plans[2]) == (True, False)


@pytest.mark.parametrize("precision", ["fp32", "bf16-true"])
def test_a_mixture_of_experts_can_be_predicted_in_every_precision(workload, precision):
    settings = {
        "model": model_name(MIXTURE_OF_EXPERTS),
        "model_config": MIXTURE_OF_EXPERTS,
        **sizes_of(MIXTURE_OF_EXPERTS),
    }
    experts = make_workload("cpu", workload.to_dict(), settings)
    config = TrainingConfig(precision=precision, micro_batch_size=GLOBAL_BATCH)
    prediction = predict(PredictionRequest(workload=experts, config=config, device="cpu"))
    assert "aten._grouped_mm" in {holder.operator for holder in prediction.holders}


def test_a_model_of_another_kind_is_rejected_by_its_kind(workload):
    t5 = {"model_type": "t5", "num_layers": 2, "d_model": 32, "num_heads": 2, "vocab_size": 300}
    named = {"model": model_name(t5), "model_config": t5, **sizes_of(t5)}
    encoder_decoder = make_workload("cpu", workload.to_dict(), named)
    with pytest.raises(PredictionImpossible, match=r"^config\.json is of a t5 model") as raised:
        predict(PredictionRequest(workload=encoder_decoder, config=TrainingConfig(), device="cpu"))
    assert "--script" in raised.value.hint


def test_an_eager_configuration_has_no_plan(prediction_of):
    assert prediction_of().plan is None


def test_on_cuda_workspaces_are_counted_and_assumptions_noted(prediction_of):
    prediction = prediction_of(device="cuda", torch_version="2.11")
    assert prediction.bytes_by_category["workspace"] > 0
    assert any("context" in note for note in prediction.notes)


def test_on_cuda_every_block_is_a_multiple_of_512_bytes(prediction_of):
    assert prediction_of(device="cuda").peak_memory_bytes % 512 == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gpu", "workspace_bytes"), [("8.0", 8519680), ("9.0", 32 * MIB), ("10.0", 8519680)]
)
def test_on_cuda_the_workspaces_are_those_of_the_specified_gpu(prediction_of, gpu, workspace_bytes):
    prediction = prediction_of(device="cuda", gpu=gpu, torch_version="2.11", allocator="expandable")
    assert prediction.bytes_by_category["workspace"] == 2 * workspace_bytes


def test_from_torch_2_15_on_workspaces_are_temporaries(prediction_of):
    prediction = prediction_of(device="cuda", gpu="9.0", torch_version="2.15")
    assert prediction.bytes_by_category["workspace"] == 0
    assert prediction.bytes_by_category["temporaries"] >= 32 * MIB


def test_an_assumed_gpu_is_noted(prediction_of):
    notes = prediction_of(device="cuda").notes
    assert any(
        "compute capability 8.0" in note and "--compute-capability" in note for note in notes
    )


def test_the_gpu_and_its_kernels_are_noted(prediction_of):
    notes = prediction_of(
        device="cuda", gpu="9.0", torch_version="2.11", precision="bf16-mixed"
    ).notes
    assert "for a GPU of compute capability 9.0 with torch 2.11" in notes
    assert "attention by cudnn kernels, RMSNorm by CUDA's" in notes
    assert "workspaces of cuBLAS of 32.00 MiB + 32.00 MiB, one a thread and library" in notes


@pytest.mark.slow
@pytest.mark.parametrize(
    "choices",
    [
        {"precision": "bf16-mixed"},
        pytest.param({"precision": "bf16-true", "compile": "block"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_where_attention_is_cudnns_the_bounds_allow_for_its_workspace(
    prediction_of, workload, choices
):
    on_ampere, on_blackwell = (
        prediction_of(device="cuda", gpu=gpu, torch_version="2.11", **choices)
        for gpu in ("8.0", "10.0")
    )
    rows = GLOBAL_BATCH * workload.heads * workload.sequence_length
    estimated_bytes = 4 * rows * (workload.width // workload.heads) + 4 * rows
    assert any("cuDNN's workspace" in note for note in on_blackwell.notes)
    assert not any("cuDNN" in note for note in on_ampere.notes)
    margins = [
        p.upper_bound_bytes - round(1.1 * p.peak_memory_bytes) for p in (on_ampere, on_blackwell)
    ]
    assert margins[1] - margins[0] == pytest.approx(estimated_bytes, abs=2)


def test_attention_that_the_specified_backend_does_not_support_is_rejected(
    predict_anew, monkeypatch
):
    def bias_attention(model):
        for block in model.blocks:
            block.attention = BiasedAttention(block.attention)

    changed_model(monkeypatch, bias_attention)
    with pytest.raises(
        PredictionImpossible, match="attention flash does not support this model's calls"
    ):
        predict_anew(device="cuda", precision="bf16-true", attention="flash")


class BiasedAttention(nn.Module):
    """Attention with a trainable additive bias, replacing that of a block."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.attention = attention
        self.slope = nn.Parameter(torch.zeros(attention.heads, 1, 1))

    def forward(self, x, rotary):
        batch, length, width = x.shape
        heads = self.attention.heads
        q, k, v = (
            self.attention.query_key_value(x)
            .view(batch, length, 3, heads, -1)
            .permute(2, 0, 3, 1, 4)
        )
        bias = self.slope * torch.ones(heads, length, length, dtype=x.dtype, device=x.device)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.attention.output(attended.transpose(1, 2).reshape(batch, length, width))


def changed_model(monkeypatch, change):
    """Makes the built-in model be built with `change(model)` applied."""
    family = MODELS["gpt"]

    def build(workload):
        model = family.build(workload)
        change(model)
        return model

    monkeypatch.setitem(MODELS, "gpt", type(family)(**{**vars(family), "build": build}))


@pytest.mark.slow
def test_attention_with_a_bias_is_predicted_with_the_kernel_of_a_gpu(predict_anew, monkeypatch):
    def bias_attention(model):
        for block in model.blocks:
            block.attention = BiasedAttention(block.attention)

    changed_model(monkeypatch, bias_attention)
    on_cpu, on_cuda = predict_anew(), predict_anew(device="cuda")
    of = {
        name: {holder.operator for holder in p.holders}
        for name, p in (("cpu", on_cpu), ("cuda", on_cuda))
    }
    assert "aten._softmax" in of["cpu"] or "aten._safe_softmax" in of["cpu"]
    assert not {"aten._softmax", "aten._safe_softmax"} & of["cuda"]


def test_on_cuda_queries_for_the_gpus_autocast_are_answered_for_the_cpus(predict_anew, monkeypatch):
    """torchao's fp8 layers query it, and save their inputs in fp32 where it is off."""
    asked = []

    def ask(model):
        forward = model.norm.forward

        def asking(x):
            asked.append((torch.is_autocast_enabled(), torch.get_autocast_gpu_dtype()))
            return forward(x)

        model.norm.forward = asking

    changed_model(monkeypatch, ask)
    predict_anew(device="cuda", precision="bf16-mixed")
    assert set(asked) == {(True, torch.bfloat16)}


def test_no_real_kernel_runs_for_a_product_in_fp8_of_compiled_code(monkeypatch):
    """torch runs one where an operator has no fake kernel, at full size: on a CPU for minutes."""
    monkeypatch.setattr(fake_tensor, "run_fallback_kernel", lambda *_: pytest.fail("it ran"))
    with StorageWatch().mode:
        rows = torch.empty(64, 64, dtype=torch.float8_e4m3fn)
        scale, result = torch.ones(()), torch.empty(64, 64, dtype=torch.bfloat16)
        torch.ops.aten._scaled_mm.out(
            rows, rows.t(), scale, scale, out_dtype=torch.bfloat16, out=result
        )


def test_a_model_that_branches_on_values_is_rejected_with_the_operation(predict_anew, monkeypatch):
    def branch(model):
        forward = model.norm.forward
        model.norm.forward = lambda x: forward(x) if x.sum().item() > 0 else x

    changed_model(monkeypatch, branch)
    with pytest.raises(PredictionImpossible, match="_local_scalar_dense"):
        predict_anew()


def test_a_mask_of_unknown_values_is_predicted_as_all_true(
    prediction_of, predict_anew, monkeypatch
):
    def select(model):
        forward = model.norm.forward
        model.norm.forward = lambda x: forward(x) + x[x > 0].sum()

    plain = prediction_of()
    changed_model(monkeypatch, select)
    prediction = predict_anew()
    assert prediction.peak_memory_bytes > plain.peak_memory_bytes
    assert prediction.lower_bound_bytes <= plain.peak_memory_bytes
    assert any("all true" in note for note in prediction.notes)


def test_a_model_that_knows_how_much_a_mask_selects_is_rejected_with_the_line(
    predict_anew, monkeypatch
):
    def select(model):
        forward = model.norm.forward

        def half(x):
            return forward(torch.cat([x, x])[torch.cat([x > 0, x <= 0])].view(x.shape))

        model.norm.forward = half

    changed_model(monkeypatch, select)
    with pytest.raises(PredictionImpossible, match=r"test_predict\.py.* selects by a mask"):
        predict_anew()


def test_a_model_that_counts_distinct_values_is_rejected_with_the_operation(
    predict_anew, monkeypatch
):
    def count(model):
        forward = model.norm.forward
        model.norm.forward = lambda x: forward(x) + torch.unique(x).sum()

    changed_model(monkeypatch, count)
    with pytest.raises(PredictionImpossible, match="unique"):
        predict_anew()


@pytest.mark.slow
def test_a_value_that_is_only_logged_changes_no_prediction(
    prediction_of, predict_anew, monkeypatch
):
    logged = []

    def log(model):
        forward = model.norm.forward

        def logging(x):
            logged.append(f"{x.mean().item():.3f}")
            return forward(x)

        model.norm.forward = logging

    plain = prediction_of()
    changed_model(monkeypatch, log)
    prediction = predict_anew()
    assert prediction.peak_memory_bytes == plain.peak_memory_bytes
    assert any("test_predict.py" in note for note in prediction.notes)


def test_the_buckets_of_gradients_are_as_large_as_those_of_torch():
    with ranks.as_rank(0, of=2):
        replicated = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    assert replicated.bucket_bytes_cap == ranks.BUCKET_BYTES
    assert vars(torch.distributed)["_DEFAULT_FIRST_BUCKET_BYTES"] == ranks.FIRST_BUCKET_BYTES
