"""How many rows experts get on fake tensors: equal parts, or nearly all tokens to the same ones."""

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from autotune.predictor.fake_mode import StorageWatch
from autotune.predictor.generated_code import GeneratedPrograms
from autotune.predictor.whole_numbers import part_of_whole_numbers

TOKENS, EXPERTS, CHOSEN = 24, 4, 2


def chosen_experts():
    return torch.topk(torch.ones(TOKENS, EXPERTS), CHOSEN).indices


def by_comparison(chosen):
    return [torch.nonzero(chosen == expert) for expert in range(EXPERTS)]


def by_mask(chosen):
    rows = torch.ones(TOKENS, 8)
    return [rows[(chosen == expert).any(-1)] for expert in range(EXPERTS)]


def by_one_hot(chosen):
    masks = F.one_hot(chosen, EXPERTS + 1).permute(2, 1, 0)
    hit = torch.greater(masks.sum((-1, -2)), 0).nonzero()
    return [torch.where(masks[expert[0]])[0] for expert in hit if expert[0] != EXPERTS]


def by_counts(chosen):
    gates = torch.zeros(TOKENS, EXPERTS).scatter(1, chosen, 1)
    return torch.ones(TOKENS * CHOSEN, 8).split(gates.long().sum(0).tolist())


def by_weights(chosen):
    weights = torch.zeros(TOKENS, EXPERTS).scatter(1, chosen, torch.rand(TOKENS, CHOSEN))
    return [torch.where(weights[:, expert] > 0)[0] for expert in range(EXPERTS)]


def by_softmax(chosen):
    scores = torch.full((TOKENS, EXPERTS), -torch.inf)
    weights = scores.scatter(1, chosen, torch.rand(TOKENS, CHOSEN)).softmax(-1)
    return [torch.nonzero(weights[:, expert] != 0) for expert in range(EXPERTS)]


def by_a_product(chosen):
    weights = torch.rand(TOKENS, EXPERTS) * torch.zeros(TOKENS, EXPERTS).scatter(1, chosen, 1)
    return [torch.where(weights[:, expert] > 0)[0] for expert in range(EXPERTS)]


def by_weights_in_place(chosen):
    weights = torch.zeros(TOKENS, EXPERTS)
    weights.scatter_(1, chosen, torch.rand(TOKENS, CHOSEN)).mul_(2)
    return [torch.where(weights[:, expert] > 0)[0] for expert in range(EXPERTS)]


OF_WEIGHTS = [by_weights, by_softmax, by_a_product, by_weights_in_place]
WAYS = [by_comparison, by_mask, by_one_hot, by_counts, *OF_WEIGHTS]


def softmax_of_zeros(chosen):
    return torch.zeros(TOKENS, EXPERTS).scatter(1, chosen, torch.rand(TOKENS, CHOSEN)).softmax(-1)


def scattered_into_numbers(chosen):
    return torch.rand(TOKENS, EXPERTS).scatter(1, chosen, torch.rand(TOKENS, CHOSEN))


def added_to_in_place(chosen):
    weights = torch.zeros(TOKENS, EXPERTS).scatter(1, chosen, torch.rand(TOKENS, CHOSEN))
    weights += 1
    return weights


def added_to_in_a_view(chosen):
    weights = torch.zeros(TOKENS, EXPERTS).scatter(1, chosen, torch.rand(TOKENS, CHOSEN))
    weights.view(-1).add_(1)
    return weights


def zeros_that_were_written_to(chosen):
    zeros = torch.zeros(TOKENS, EXPERTS)
    zeros += 1
    return zeros.scatter(1, chosen, torch.rand(TOKENS, CHOSEN))


def rows_of_experts(way, *, parts="equal") -> list[int]:
    watch = StorageWatch()
    watch.routing.parts = parts
    with watch.mode:
        watch.enter_module("experts")
        return [len(rows) for rows in way(chosen_experts())]


@pytest.mark.parametrize("way", WAYS)
def test_experts_get_equal_parts(way):
    rows = rows_of_experts(way)
    assert [part for part in rows if part] == [TOKENS * CHOSEN // EXPERTS] * EXPERTS


WITHOUT_ZEROS = [
    *(softmax_of_zeros, scattered_into_numbers, added_to_in_place, added_to_in_a_view),
    zeros_that_were_written_to,
]


@pytest.mark.parametrize("way", WITHOUT_ZEROS)
def test_every_expert_gets_every_token_where_what_was_not_chosen_may_not_be_zero(way):
    watch = StorageWatch()
    with watch.mode:
        watch.enter_module("experts")
        weights = way(chosen_experts())
        rows = [len(torch.where(weights[:, expert] > 0)[0]) for expert in range(EXPERTS)]
    assert (rows, watch.routing.assumed_all) == ([TOKENS] * EXPERTS, True)


@pytest.mark.parametrize("parts", ["to the first", "to the last"])
@pytest.mark.parametrize("way", WAYS)
def test_in_the_extreme_as_few_experts_as_possible_get_every_token(way, parts):
    rows = rows_of_experts(way, parts=parts)
    assert sum(rows) == TOKENS * CHOSEN
    assert max(rows) == TOKENS


@pytest.mark.parametrize("way", WAYS)
def test_nearly_all_tokens_to_the_first_leave_one_for_each_other(way):
    rows = [part for part in rows_of_experts(way, parts="nearly all to the first") if part]
    assert rows == [TOKENS, TOKENS - EXPERTS + CHOSEN, *[1] * (EXPERTS - CHOSEN)]


def test_experts_of_a_compiled_function_get_equal_parts():
    watch = StorageWatch()

    @torch.compile
    def rows(scores):
        return by_one_hot(torch.topk(scores.softmax(-1), CHOSEN).indices)

    with watch.mode, GeneratedPrograms(watch, for_gpu=False).active():
        watch.enter_module("experts")
        parts = [len(part) for part in rows(torch.ones(TOKENS, EXPERTS))]
    assert parts == [TOKENS * CHOSEN // EXPERTS] * EXPERTS
    assert not watch.routing.assumed_all


def test_a_class_for_tokens_without_an_expert_is_no_expert():
    watch = StorageWatch()
    watch.routing.parts = "to the last"
    with watch.mode:
        watch.enter_module("experts")
        classes = F.one_hot(chosen_experts(), EXPERTS + 1)
        hit = torch.greater(classes.sum((0, 1)), 0).nonzero()
        assert len(hit) == EXPERTS
        assert hit[0, 0].item() == EXPERTS - 1


def test_a_mask_has_as_many_rows_each_time_it_is_used():
    watch = StorageWatch()
    with watch.mode:
        mask = (chosen_experts() == 0).any(-1)
        first, second = torch.ones(TOKENS)[mask], torch.ones(TOKENS, 3)[mask]
    assert len(first) == len(second)


@pytest.mark.parametrize(("parts", "expected"), [("equal", 0), ("to the last", EXPERTS - 1)])
def test_the_number_of_an_expert_is_that_of_the_last_one_where_those_get_all(parts, expected):
    # The last experts may be without weights, as those of longcat_flash.
    watch = StorageWatch()
    watch.routing.parts = parts
    with watch.mode:
        watch.enter_module("experts")
        assert int(chosen_experts()[0, 0].item()) == expected


def test_what_a_graph_computes_of_whole_numbers_holds_no_inputs():
    graph = make_fx(lambda scores, positions: (scores * 2, positions == 3))(
        torch.ones(4), torch.arange(4)
    )
    numbers = part_of_whole_numbers(graph)
    scores = torch.ones(4)
    held = weakref.ref(scores)
    found = numbers(scores, torch.arange(4))
    del scores
    assert held() is None
    assert {position: one.tolist() for position, one in found.items()} == {1: [0, 0, 0, 1]}
