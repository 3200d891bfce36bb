"""Feed-forward parts in tiles: the same numbers in less memory, found in any model."""

import pytest
import torch
from torch import nn

from autotune.models import build_model
from autotune.models.parts import ModelParts
from autotune.predictor.predict import predict
from autotune.shipped.tiled import feed_forward_of, tile_blocks
from autotune.spec.config import TrainingConfig
from autotune.spec.model_file import model_name
from autotune.spec.prediction import PredictionRequest
from autotune.spec.workload import make_workload
from autotune.techniques.requirements import missing_parts
from autotune.techniques.user_training import missing_in_user_model

WIDTH = 32


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, hidden):
        return self.down(nn.functional.silu(self.gate(hidden)) * self.up(hidden))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.norm, self.mlp = nn.LayerNorm(WIDTH), Gated()

    def forward(self, hidden):
        return self.mlp(self.norm(hidden))


def gradients(block, hidden):
    block.zero_grad()
    hidden = hidden.clone().requires_grad_()
    output = block(hidden)
    output.square().sum().backward()
    return [output.detach(), hidden.grad, *(one.grad for one in block.mlp.parameters())]


@pytest.mark.parametrize("tokens", [1, WIDTH, WIDTH + 1, 3 * WIDTH])
def test_tiles_give_the_output_and_gradients_of_the_whole(tokens):
    torch.manual_seed(0)
    block, hidden = Block().double(), torch.randn(2, tokens, WIDTH, dtype=torch.float64)
    whole = gradients(block, hidden)
    tile_blocks([block], "attention")
    for tiled, expected in zip(gradients(block, hidden), whole, strict=True):
        torch.testing.assert_close(tiled, expected)


def test_no_more_than_a_tile_is_computed_at_once():
    block, seen = Block(), []
    tile_blocks([block], "attention")
    block.mlp.up.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[1]))
    block(torch.randn(2, 2 * WIDTH + 3, WIDTH)).sum().backward()
    assert max(seen) == WIDTH
    assert len(seen) == 6, "three tiles, each of them computed again"


def test_a_part_may_view_its_tokens_as_one_list():
    class Listed(Gated):
        def forward(self, hidden):
            return super().forward(hidden.view(-1, WIDTH)).view(hidden.shape)

    block, hidden = Block(), torch.randn(2, 3 * WIDTH, WIDTH)
    block.mlp = Listed()
    whole = gradients(block, hidden)
    tile_blocks([block], "attention")
    for tiled, expected in zip(gradients(block, hidden), whole, strict=True):
        torch.testing.assert_close(tiled, expected, rtol=1e-4, atol=1e-4)


def test_a_part_that_gives_more_than_hidden_states_is_named():
    block = Block()
    block.mlp.forward = lambda hidden: (hidden, hidden)
    tile_blocks([block], "attention")
    with pytest.raises(TypeError, match=r"tiles of hidden states .* part Gated gives a tuple"):
        block(torch.randn(2, 2 * WIDTH, WIDTH))


def test_a_part_that_gets_another_tensor_by_its_name_is_computed_as_a_whole():
    class Masked(Gated):
        def forward(self, hidden, *, mask):
            return super().forward(hidden) * mask

    block = Block()
    block.mlp = Masked()
    tile_blocks([block], "attention")
    hidden, mask = torch.randn(2, 3 * WIDTH, WIDTH), torch.rand(2, 3 * WIDTH, 1)
    expected = Gated.forward(block.mlp, hidden) * mask
    torch.testing.assert_close(block.mlp(hidden, mask=mask), expected)


def test_an_evaluation_computes_the_whole_at_once():
    block, seen = Block(), []
    tile_blocks([block], "attention")
    block.mlp.up.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[1]))
    with torch.no_grad():
        block(torch.randn(2, 3 * WIDTH, WIDTH))
    assert seen == [3 * WIDTH]


# -- in a training ---------------------------------------------------------------------------------

SIZES = {"layers": 2, "width": 64, "heads": 4, "sequence_length": 256, "global_batch": 2}


def peak_of(**choices):
    config = TrainingConfig(micro_batch_size=2, **choices)
    request = PredictionRequest(workload=make_workload("cpu", SIZES), config=config, device="cpu")
    return predict(request).peak_memory_bytes


@pytest.mark.parametrize("checkpointing", ["none", "block"])
def test_tiles_lower_the_predicted_peak(checkpointing):
    tiled = peak_of(checkpointing=checkpointing, feed_forward="tiled")
    assert tiled < 0.9 * peak_of(checkpointing=checkpointing)


# -- what is excluded ------------------------------------------------------------------------------


def reasons(settings, *, sequence_length=4096):
    workload = make_workload("cpu", settings)
    with torch.device("meta"):
        parts = build_model(workload)
    found = missing_parts(parts, {"feed_forward": ["tiled"]}, sequence_length=sequence_length)
    return found.get("feed_forward", {}).get("tiled")


def of_transformers(kind, **sizes):
    config = {"model_type": kind, "vocab_size": 300, "num_hidden_layers": 2, "hidden_size": 32}
    config |= {"num_attention_heads": 2, "pad_token_id": 0, **sizes}
    return {"model": model_name(config), "model_config": config}


@pytest.mark.parametrize(
    "settings",
    [
        {"model": "gpt"},
        of_transformers("llama", intermediate_size=64),
        of_transformers("phi3", intermediate_size=64),
        of_transformers("gemma2", intermediate_size=64, head_dim=16, num_key_value_heads=2),
        of_transformers("gpt_neox", intermediate_size=64),
        of_transformers("gpt2", n_embd=32, n_layer=2, n_head=2),
        of_transformers("mixtral", intermediate_size=64, num_key_value_heads=2),
    ],
    ids=["gpt", "llama", "phi3", "gemma2", "gpt_neox", "gpt2", "mixtral"],
)
def test_the_feed_forward_part_of_a_model_is_found(settings):
    assert reasons(settings) is None


def test_a_part_that_is_called_with_more_than_hidden_states_is_excluded():
    bloom = of_transformers("bloom", n_head=2, n_layer=2)
    assert "not a function of hidden states" in reasons(bloom)


class SparseMoE(nn.Module):
    """A mixture whose experts another module holds, beside weights of its own."""

    def __init__(self):
        super().__init__()
        self.router = nn.Parameter(torch.ones(WIDTH, 4))
        self.experts = nn.ParameterDict({"inner": nn.Parameter(torch.ones(4, WIDTH, WIDTH))})

    def forward(self, hidden):
        shares = (hidden @ self.router).softmax(-1)
        return torch.einsum("...c,eci,...e->...i", hidden, self.experts["inner"], shares)


def reason_of(part):
    block = Block()
    block.mlp = part
    model = nn.Module()
    model.blocks = nn.ModuleList([block.to("meta")])
    parts = ModelParts(
        model=model, blocks_owner=model, blocks_name="blocks", attention_name="attention"
    )
    found = missing_parts(parts, {"feed_forward": ["tiled"]}, sequence_length=4096)
    return found.get("feed_forward", {}).get("tiled")


def test_a_mixture_of_ones_own_is_a_feed_forward_part():
    assert reason_of(SparseMoE()) is None


class WithBiases(nn.Module):
    """A mixture of which the first weight is a bias of each expert."""

    def __init__(self):
        super().__init__()
        shapes = {"bias": (4, 64), "up": (4, WIDTH, 64), "down": (4, 64, WIDTH)}
        self.experts = nn.ParameterDict(
            {name: nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
        )
        self.router = nn.Linear(WIDTH, 4)

    def forward(self, hidden):
        shares = self.router(hidden).softmax(-1)
        inner = torch.einsum("...c,eci->...ei", hidden, self.experts["up"]) + self.experts["bias"]
        return torch.einsum("...ei,eic,...e->...c", inner, self.experts["down"], shares)


def test_the_first_weight_of_a_mixture_may_be_a_bias():
    assert reason_of(WithBiases()) is None


class KeepsLossMoE(SparseMoE):
    aux_loss = None

    def forward(self, hidden):
        self.aux_loss = (hidden @ self.router).softmax(-1).square().mean()
        return super().forward(hidden)


class AppendsLossMoE(SparseMoE):
    def __init__(self):
        super().__init__()
        self.losses = []

    def forward(self, hidden):
        self.losses.append((hidden @ self.router).mean())
        return super().forward(hidden)


class CountsMoE(SparseMoE):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, hidden):
        self.seen += (hidden @ self.router).softmax(-1).sum((0, 1))
        return super().forward(hidden)


@pytest.mark.parametrize("kind", [KeepsLossMoE, AppendsLossMoE, CountsMoE])
def test_trying_the_part_of_a_script_leaves_it_as_it_was(kind):
    model = nn.Module()
    model.blocks = nn.ModuleList([Block(), Block()])
    for block in model.blocks:
        block.mlp = kind().eval()
    state = torch.get_rng_state()
    optimizer = torch.optim.AdamW(model.parameters())
    found = missing_in_user_model(model, optimizer, {"feed_forward": ["whole", "tiled"]})
    assert "keeps or changes values" in found["feed_forward"]["tiled"]
    part = model.blocks[1].mlp
    kept = [getattr(part, name, None) for name in ("aux_loss", "losses")]
    assert not any(kept)
    assert not getattr(part, "seen", torch.zeros(1)).any()
    assert not part.training
    assert torch.equal(torch.get_rng_state(), state)


def test_a_mixture_whose_logits_of_routers_are_asked_for_is_excluded():
    sizes = {"intermediate_size": 64, "num_key_value_heads": 2}
    mixtral = of_transformers("mixtral", output_router_logits=True, **sizes)
    assert "output_router_logits is on" in reasons(mixtral)


def test_a_short_convolution_after_the_feed_forward_part_is_not_taken_for_it():
    class ShortConvolution(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)
            self.out = nn.Linear(WIDTH, WIDTH)

    block = Block()
    block.mixer = ShortConvolution()
    assert feed_forward_of(block, "attention") is block.mlp


def test_a_mixer_of_tokens_is_no_feed_forward_part():
    mamba = of_transformers("mamba2", num_heads=4, head_dim=16, state_size=16, n_groups=1)
    assert reasons(mamba) == (
        "Mamba2Mixer gives other numbers for a sequence in two pieces: it computes a token from "
        "others, or in few bits"
    )


def test_a_sequence_that_is_one_tile_is_excluded_with_both_numbers():
    reason = reasons({"model": "gpt", "width": 128}, sequence_length=128)
    assert reason == ("a tile has as many tokens as the model is wide, 128, and sequences have 128")


def test_the_model_of_a_script_whose_sequences_are_not_known_may_have_tiles():
    model = nn.Module()
    model.blocks = nn.ModuleList([Block(), Block()])
    before = {name: one.clone() for name, one in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters())
    assert missing_in_user_model(model, optimizer, {"feed_forward": ["whole", "tiled"]}) == {}
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())


def test_a_model_without_blocks_has_no_feed_forward_part():
    found = missing_parts(
        ModelParts(model=nn.Linear(2, 2)), {"feed_forward": ["tiled"]}, sequence_length=64
    )
    assert found["feed_forward"]["tiled"] == "no feed-forward part was found in the model's blocks"
