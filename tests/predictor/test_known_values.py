"""Values of fake tensors that a program has made itself, by which models choose what to compute."""

import pytest
import torch

from autotune.models import MODELS, gpt
from autotune.predictor.fake_mode import StorageWatch
from autotune.predictor.known_values import taken_for_real
from autotune.predictor.predict import predict
from autotune.spec.config import TrainingConfig
from autotune.spec.prediction import PredictionRequest


@pytest.fixture
def watch():
    watch = StorageWatch()
    with watch.mode:
        watch.enter_module("model")
        yield watch


@pytest.fixture
def tokens(watch):
    return torch.empty(4, 8, dtype=torch.long)


def is_only_ones(mask) -> bool:
    return bool(torch.all(mask == 1))


def test_a_mask_of_ones_is_known(watch, tokens):
    assert is_only_ones(torch.ones_like(tokens))
    assert not is_only_ones(torch.zeros_like(tokens))
    assert watch.reads == []


def test_what_is_computed_of_positions_is_known(watch):
    positions = torch.arange(8).expand(4, -1)
    starts = (torch.diff(positions, dim=-1) != 1).cumsum(-1)
    assert (starts[:, -1] == 0).all()
    assert watch.reads == []


def test_a_literal_is_known(watch):
    assert torch.tensor([3, 4])[1].item() == 4


def test_a_known_mask_has_as_many_rows_as_it_has(watch):
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    assert len(torch.nonzero(mask)) == 10
    assert not watch.routing.assumed_all


def test_values_that_depend_on_tokens_are_not_known(watch, tokens):
    is_only_ones(tokens * torch.ones_like(tokens))
    assert len(watch.reads) == 1


def test_a_tensor_that_is_written_through_a_view_is_not_known_any_more(watch, tokens):
    mask = torch.ones_like(tokens)
    mask[0].copy_(tokens[0])
    is_only_ones(mask)
    assert len(watch.reads) == 1


def test_transformers_leaves_out_a_mask_of_ones_as_in_a_training(watch, tokens):
    masking_utils = pytest.importorskip("transformers.masking_utils")
    if not hasattr(masking_utils, "create_recurrent_attention_mask"):
        pytest.skip("this transformers has no such function")
    embedded = torch.empty(*tokens.shape, 16)
    with taken_for_real():
        mask = masking_utils.create_recurrent_attention_mask(
            config=None, inputs_embeds=embedded, attention_mask=torch.ones_like(tokens)
        )
    assert mask is None


@pytest.mark.slow
def test_a_model_that_masks_nothing_is_predicted_without_masking(workload, monkeypatch):
    def peak_bytes(choose) -> int:
        def build(*args, **kwargs):
            model = gpt.build(*args, **kwargs)
            forward = model.norm.forward

            def masking(x):
                mask = torch.ones(x.shape[:2], dtype=torch.long)
                return forward(x) if choose(mask) else forward(x) * mask[..., None].exp()

            model.norm.forward = masking
            return model

        monkeypatch.setitem(MODELS, "gpt", type(family)(**{**vars(family), "build": build}))
        config = TrainingConfig(micro_batch_size=4)
        request = PredictionRequest(workload=workload, config=config, device="cpu")
        return predict(request).peak_memory_bytes

    family = MODELS["gpt"]
    assert peak_bytes(is_only_ones) == peak_bytes(lambda mask: True)
    assert peak_bytes(is_only_ones) < peak_bytes(lambda mask: False)
