"""Which ranks of a training run on which node."""

from autotune.spec.node_ranks import NodeRanks, divided


def test_neighbours_are_on_one_node_and_the_first_has_the_store():
    store = ("10.0.0.1", 4000)
    parts = divided(6, nodes=["a", "b", "c"], store=store)
    assert [(part.first, part.count, part.size) for part in parts] == [
        (0, 2, 6),
        (2, 2, 6),
        (4, 2, 6),
    ]
    assert [part.has_store for part in parts] == [True, False, False]
    assert {part.store for part in parts} == {store}


def test_a_rank_of_several_nodes_is_named_with_its_node():
    _, second = divided(4, nodes=["a", "b"], store=("a", 1))
    assert [second.name_of(index) for index in range(2)] == ["rank 2 on b", "rank 3 on b"]


def test_the_ranks_of_one_node_meet_without_a_store():
    alone = NodeRanks(size=2, count=2)
    assert not alone.has_store
    assert alone.name_of(1) == "rank 1"
