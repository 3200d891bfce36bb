"""Deep models predicted by shallower ones: which depths, how exact, and when not."""

import textwrap
from dataclasses import replace

import pytest

from autotune.errors import PredictionImpossible
from autotune.execution.server.forked import run_in_forks
from autotune.memory.recording import Block, Recording
from autotune.predictor.depths import (
    Depths,
    Pattern,
    choose_depths,
    deeper_than,
    extrapolate,
    find_pattern,
    spread_depths,
    structure_of,
)
from autotune.predictor.predict import predict
from autotune.spec.config import TrainingConfig
from autotune.spec.model_file import model_name, sizes_of
from autotune.spec.prediction import Prediction, PredictionRequest
from autotune.spec.reading import parse
from autotune.spec.workload import make_workload

LAYERS = 16
DEPTHS = Depths(first=2, second=3, check=4, whole=24)

ONE_BLOCK = """
    import torch

    class Block(torch.nn.Module):
        def __init__(self, width=16):
            super().__init__()
            self.linear = torch.nn.Linear(width, width)

        def forward(self, x):
            return x + torch.sin(self.linear(x))

    class Model(torch.nn.Module):
        def __init__(self, layers):
            super().__init__()
            self.embedding = torch.nn.Embedding(256, 16)
            self.blocks = torch.nn.ModuleList(Block() for _ in range(layers))
            self.head = torch.nn.Linear(16, 256)
            self.prepare(layers)

        def prepare(self, layers):
            pass

        def forward(self, tokens):
            return self.head(self.run(self.embedding(tokens)))

        def run(self, x):
            for block in self.blocks:
                x = block(x)
            return x
"""


def workload_of(**settings):
    sizes = {"layers": LAYERS, "width": 32, "heads": 2, "sequence_length": 16, "global_batch": 2}
    return make_workload("cpu", {**sizes, **settings})


def both(workload, *, device="cpu", **choices):
    """The prediction of the whole model, and the one that may be extrapolated."""
    config = TrainingConfig(**{"micro_batch_size": workload.global_batch, **choices})
    predictions = []
    for extrapolates in ("nothing", "any"):
        request = PredictionRequest(
            workload=workload, config=config, device=device, extrapolates=extrapolates
        )
        predictions.append(predict(request))
    return predictions


@pytest.fixture
def user_model(tmp_path):
    """user_model(code) is the workload of a model of the user, `ONE_BLOCK` with changes."""

    def make(code):
        file = tmp_path / f"{tmp_path.name}.py"  # modules of one name are imported once
        source = textwrap.dedent(ONE_BLOCK) + textwrap.dedent(code)
        source += "\n\ndef make(layers):\n    return Own(layers)\n"
        file.write_text(source)
        return workload_of(model=f"{file}:make", width=None, heads=None)

    return make


# -- which depths ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kinds", "pattern"),
    [
        ("aaaaaaaa", Pattern(irregular=0, period=1)),
        ("abababab", Pattern(irregular=0, period=2)),
        ("aaabaaab", Pattern(irregular=0, period=4)),
        ("xxaaaaaa", Pattern(irregular=2, period=1)),
        ("xababab", Pattern(irregular=1, period=2)),
        ("aabaabaabaa", Pattern(irregular=0, period=3)),
        ("abcdefgh", None),
        ("a", None),
    ],
)
def test_the_pattern_of_the_layers_is_the_one_that_the_fewest_show(kinds, pattern):
    assert find_pattern(kinds) == pattern


def test_different_last_layers_leave_nothing_to_extrapolate():
    pattern = find_pattern("a" * 28 + "b" * 4)
    assert spread_depths(32, period=pattern.period, irregular=pattern.irregular) is None


@pytest.mark.parametrize(("whole", "period"), [(32, 1), (42, 2), (61, 4), (62, 6)])
def test_depths_differ_from_the_whole_by_whole_periods(whole, period):
    depths = spread_depths(whole, period=period)
    assert {(whole - depth) % period for depth in depths.predicted} == {0}


def test_the_shallowest_depth_has_the_irregular_layers_and_a_whole_period():
    depths = spread_depths(60, period=4, irregular=3)
    assert depths.first >= 7


@pytest.mark.parametrize(
    ("whole", "period", "fewest", "predicted"),
    [(32, 1, 2, (2, 3, 6)), (32, 1, 4, (4, 5, 6)), (32, 2, 2, (2, 4, 6)), (62, 6, 2, (8, 14, 20))],
)
def test_the_check_of_a_compiled_model_has_six_layers_or_more(whole, period, fewest, predicted):
    depths = spread_depths(whole, period=period, fewest=fewest, least_check=6)
    assert depths.predicted == predicted


@pytest.mark.parametrize(
    ("predicted", "whole", "deeper"),
    [
        ((2, 3, 6), 32, (4, 6, 8)),
        ((2, 3, 6), 33, (5, 7, 9)),
        ((2, 3, 6), 16, None),
        ((4, 5, 6), 32, (6, 8, 10)),
        ((2, 4, 6), 42, (6, 10, 14)),
        ((8, 14, 20), 62, None),
    ],
)
def test_deeper_depths_are_two_periods_apart_and_from_the_whole(predicted, whole, deeper):
    first, second, check = predicted
    found = deeper_than(Depths(first=first, second=second, check=check, whole=whole))
    assert (found and found.predicted) == deeper


def test_a_shallow_model_is_predicted_whole():
    assert spread_depths(12, period=1) is None


@pytest.mark.parametrize(
    ("checkpointing", "depths"), [("every-4", (4, 8, 12)), ("block", (2, 3, 4)), ("sqrt", None)]
)
def test_depths_follow_the_blocks_that_are_recomputed(checkpointing, depths):
    config = TrainingConfig(micro_batch_size=2, checkpointing=checkpointing)
    chosen = choose_depths(workload_of(layers=40), config)
    assert (chosen and chosen.predicted) == depths


@pytest.mark.parametrize(("budget", "depths"), [(1.0, (2, 3, 6)), (0.5, None)])
def test_a_compiled_model_is_predicted_whole_below_the_full_memory_budget(budget, depths):
    config = TrainingConfig(micro_batch_size=2, compile="model", memory_budget=budget)
    chosen = choose_depths(workload_of(layers=40), config)
    assert (chosen and chosen.predicted) == depths


@pytest.mark.parametrize(
    ("extrapolates", "choices", "may_be"),
    [
        ("nothing", {"compile": "model"}, False),
        ("compiled", {"compile": "model"}, True),
        ("compiled", {"compile": "block"}, False),
        ("compiled", {}, False),
        ("any", {}, True),
    ],
)
def test_a_request_says_which_models_may_be_extrapolated(extrapolates, choices, may_be):
    request = PredictionRequest(
        workload=workload_of(),
        config=TrainingConfig(micro_batch_size=2, **choices),
        device="cpu",
        extrapolates=extrapolates,
    )
    assert request.may_be_extrapolated == may_be
    assert not replace(request, with_timeline=True).may_be_extrapolated


def test_blocks_that_differ_in_a_plain_attribute_are_of_different_kinds(user_model):
    workload = user_model("""
        class Own(Model):
            def prepare(self, layers):
                for index, block in enumerate(self.blocks):
                    block.is_local = index % 2 == 0
    """)
    assert find_pattern(structure_of(workload).blocks) == Pattern(irregular=0, period=2)


def test_the_number_of_a_block_makes_no_kind_of_its_own(user_model):
    workload = user_model("""
        class Own(Model):
            def prepare(self, layers):
                for index, block in enumerate(self.blocks):
                    block.layer_index = index
    """)
    assert find_pattern(structure_of(workload).blocks) == Pattern(irregular=0, period=1)


def test_a_model_whose_blocks_depend_on_the_depth_is_predicted_whole(user_model):
    workload = user_model("""
        class Own(Model):
            def prepare(self, layers):
                for block in self.blocks:
                    block.scale = 1 / layers
    """)
    assert choose_depths(workload, TrainingConfig(micro_batch_size=2)) is None


# -- extrapolation ---------------------------------------------------------------------------------


def test_the_peak_of_a_deep_model_follows_from_shallow_ones_to_the_byte(user_model):
    workload = user_model("class Own(Model): pass")
    whole, extrapolated = both(workload, optimizer_fusion="foreach")
    assert (extrapolated.extrapolated_from, extrapolated.checked_at) == ((2, 3), 4)
    for field in ("peak_memory_bytes", "phase", "parameters", "bytes_by_category", "holders"):
        assert getattr(extrapolated, field) == getattr(whole, field)


@pytest.mark.slow
@pytest.mark.parametrize(
    "choices",
    [
        {"optimizer_fusion": "foreach"},
        {"checkpointing": "every-2", "precision": "bf16-true", "optimizer_fusion": "backward"},
    ],
)
def test_the_peak_of_a_deep_gpt_follows_from_shallow_ones_to_the_byte(choices):
    whole, extrapolated = both(workload_of(layers=24), **choices)
    assert extrapolated.extrapolated_from
    for field in ("peak_memory_bytes", "phase", "parameters", "bytes_by_category", "holders"):
        assert getattr(extrapolated, field) == getattr(whole, field)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "choices", "depths"),
    [
        (16, {"precision": "bf16-true"}, (2, 3)),
        (22, {"checkpointing": "block", "optimizer_fusion": "kernel"}, (4, 5)),
    ],
)
def test_the_peak_of_a_compiled_model_follows_from_shallow_ones_to_the_byte(
    layers, choices, depths
):
    whole, extrapolated = both(workload_of(layers=layers), compile="model", **choices)
    assert extrapolated.extrapolated_from == depths
    for field in ("peak_memory_bytes", "phase", "parameters", "bytes_by_category"):
        assert getattr(extrapolated, field) == getattr(whole, field)


@pytest.mark.slow
def test_depths_that_are_compiled_in_forks_predict_as_in_one_process():
    request = PredictionRequest(
        workload=workload_of(),
        config=TrainingConfig(micro_batch_size=2, compile="model"),
        device="cpu",
        extrapolates="compiled",
    )
    in_forks = predict(request, run_jobs=run_in_forks)
    assert in_forks.extrapolated_from == (2, 3)
    assert replace(in_forks, seconds=0) == replace(predict(request), seconds=0)


@pytest.mark.slow
def test_a_depth_that_cannot_be_compiled_in_a_fork_is_an_impossible_prediction(user_model):
    workload = user_model("""
        class Own(Model):
            def run(self, x):
                for block in self.blocks:
                    for _ in range(1 if x.sum().item() > 0 else 9):
                        x = x + block(x)
                return x
    """)
    request = PredictionRequest(
        workload=workload,
        config=TrainingConfig(micro_batch_size=2, compile="model"),
        device="cpu",
        extrapolates="compiled",
    )
    with pytest.raises(PredictionImpossible, match="decides how much memory is needed"):
        predict(request, run_jobs=run_in_forks)


@pytest.mark.slow
def test_layers_of_alternating_attention_are_counted_in_whole_periods():
    pytest.importorskip("transformers")
    content = {
        "model_type": "gemma3_text",
        "vocab_size": 256,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 24,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 64,
    }
    settings = {"model": model_name(content), "model_config": content, **sizes_of(content)}
    whole, extrapolated = both(workload_of(**settings), checkpointing="block")
    assert extrapolated.extrapolated_from == (2, 4)
    assert extrapolated.peak_memory_bytes == whole.peak_memory_bytes
    for field in ("peak_memory_bytes", "phase", "parameters", "bytes_by_category", "holders"):
        assert getattr(extrapolated, field) == getattr(whole, field)


@pytest.mark.slow
def test_memory_that_is_not_linear_in_the_depth_is_predicted_whole(user_model):
    workload = user_model("""
        class Own(Model):
            def run(self, x):
                earlier = []
                for block in self.blocks:
                    x = block(x + sum(torch.sin(2 * one) for one in earlier))
                    earlier.append(x)
                return x
    """)
    whole, checked = both(workload)
    assert checked.extrapolated_from == ()
    assert checked.peak_memory_bytes == whole.peak_memory_bytes
    assert any("predicted at its whole depth of 16 layers" in note for note in checked.notes)


def allocating(*sizes):
    """A recording of blocks that are each alive alone, at places of their own, of sizes in KiB."""
    recording = Recording()
    for number, size in enumerate(sizes):
        block = Block(
            size_bytes=1024 * size,
            module="",
            operator=f"aten.operator_{number}",
            born=2 * number,
            died=2 * number + 1,
        )
        recording.events += [(1, block), (-1, block)]
    return recording


def recordings(*sizes):
    return [allocating(size) for size in sizes]


def test_the_highest_line_through_two_depths_is_the_peak():
    assert extrapolate(DEPTHS, *recordings(100, 110, 120)).peak_bytes == 320 * 1024


def test_without_an_error_at_the_check_none_is_allowed_for():
    assert extrapolate(DEPTHS, *recordings(100, 110, 120)).allowance_bytes == 0


def test_the_allowance_grows_with_the_distance_from_the_check():
    found = extrapolate(DEPTHS, *recordings(100, 110, 121))
    assert found.check_error_bytes == 1024
    assert found.allowance_bytes >= 21 * 1024


def test_a_large_error_at_the_check_is_not_trusted():
    assert not extrapolate(DEPTHS, *recordings(100, 110, 121)).is_trusted


def test_another_place_that_grows_faster_than_a_line_is_allowed_for():
    found = extrapolate(DEPTHS, allocating(100, 1), allocating(110, 2), allocating(120, 20))
    assert found.allowance_bytes > 0


def test_the_peak_may_be_at_another_place_than_at_the_shallow_depths():
    found = extrapolate(DEPTHS, allocating(102, 40), allocating(103, 50), allocating(104, 60))
    assert (found.place.operator, found.peak_bytes) == ("aten.operator_1", 260 * 1024)


@pytest.mark.slow
def test_a_prediction_from_before_extrapolation_can_be_read(user_model):
    whole, extrapolated = both(user_model("class Own(Model): pass"))
    stored = whole.to_dict()
    for field in ("extrapolated_from", "checked_at", "check_error_bytes"):
        del stored[field]
    assert parse(Prediction, stored) == whole
    assert parse(Prediction, extrapolated.to_dict()) == extrapolated
