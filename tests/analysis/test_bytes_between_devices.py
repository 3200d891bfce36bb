"""The least time of collectives, on one node and over several."""

import pytest

from autotune.analysis.communication import Exchange, Links
from autotune.spec.config import TrainingConfig

LINKS = Links(inside_node=400e9, between_nodes=50e9)
TRAINED = 10**9


def seconds(*, devices, nodes=1, links=LINKS, tokens=2**16, **techniques):
    exchange = Exchange(
        devices=devices,
        nodes=nodes,
        trained=TRAINED,
        blocks=10,
        width=1024,
        tokens_of_a_step=tokens,
    )
    return exchange.seconds(TrainingConfig(**techniques), links)


def test_one_device_sends_nothing():
    assert seconds(devices=1) == 0.0


def test_gradients_of_data_parallel_training_go_around_the_ring_twice():
    expected = 2 * 7 / 8 * 4 * TRAINED / LINKS.inside_node
    assert seconds(devices=8, sharding="ddp") == pytest.approx(expected)
    halved = seconds(devices=8, sharding="ddp", gradient_reduction="bf16")
    assert halved == pytest.approx(expected / 2)


def test_zero3_sends_half_as_much_again_as_data_parallel_training():
    # ZeRO, arXiv:1910.02054, section 7.2.2: three times the parameters instead of twice.
    ratio = seconds(devices=8, sharding="zero3") / seconds(devices=8, sharding="ddp")
    assert ratio == pytest.approx(1.5)


def test_a_ring_over_nodes_uses_the_link_of_each_device_of_a_node():
    slow = Links(inside_node=400e9, between_nodes=10e9)
    expected = 2 * 15 / 16 * 4 * TRAINED / (8 * slow.between_nodes)
    assert seconds(devices=16, nodes=2, links=slow, sharding="ddp") == pytest.approx(expected)


def test_a_network_as_fast_as_the_links_of_a_node_costs_nothing_more():
    assert seconds(devices=16, nodes=2, sharding="ddp") == seconds(devices=16, sharding="ddp")


def test_split_matrices_add_up_four_activations_a_block():
    activations = 2**16 // 4 * 1024 * 4
    expected = 10 * 4 * 2 * 1 / 2 * activations / LINKS.inside_node
    alone = seconds(devices=8, tensor_parallel=2, sharding="none")
    assert alone == pytest.approx(expected)


def test_matrices_that_are_split_among_nodes_are_slower_than_within_one():
    within = seconds(devices=16, nodes=2, tensor_parallel=8, sharding="none")
    across = seconds(devices=16, nodes=2, tensor_parallel=16, sharding="none")
    assert within < across


def test_groups_of_hsdp_on_a_node_send_less_between_nodes_than_zero3():
    slow = Links(inside_node=400e9, between_nodes=2e9)
    zero3 = seconds(devices=16, nodes=2, links=slow, sharding="zero3")
    hsdp = seconds(devices=16, nodes=2, links=slow, sharding="hsdp", sharding_group=8)
    assert hsdp < zero3


def test_the_links_of_a_gpu_are_those_of_its_data_sheet():
    assert Links.of("NVIDIA H100 80GB HBM3") == Links(inside_node=450e9, between_nodes=50e9)
    assert Links.of("another GPU") == Links(inside_node=32e9, between_nodes=12.5e9)
