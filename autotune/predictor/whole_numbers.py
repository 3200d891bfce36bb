"""The part of a compiled graph that computes whole numbers and booleans.

The kernels that inductor generates do nothing in a prediction, so nothing would be known of the
masks and indices that a compiled block computes: which experts its tokens are sent to, or that a
mask has only ones. So the operators that lead to those results are cut out of the graph, and run
operator by operator before the generated program.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from autotune.predictor.routing import CHOOSE, PASSED_ON

_NOT_RUN = (
    torch.Tag.dynamic_output_shape,
    torch.Tag.data_dependent_output,
    torch.Tag.nondeterministic_seeded,
)
_EMPTY = torch.ops.aten.empty.memory_format


def part_of_whole_numbers(module: GraphModule) -> Callable[..., Mapping[int, Tensor]] | None:
    """Returns a function of the graph's inputs that returns its whole numbers, by output.

    None where nothing can be known of any of them.
    """
    nodes = list(module.graph.nodes)
    may_be_known: dict[Node, bool] = {}
    for node in nodes:
        may_be_known[node] = _may_be_known(node, may_be_known)
    found: dict[int, Node] = {}
    for position, output in enumerate(nodes[-1].args[0]):
        is_computed = isinstance(output, Node) and output.op == "call_function"
        if is_computed and may_be_known[output] and _is_of_whole_numbers(output):
            found[position] = output
    if not found:
        return None
    # Not an Interpreter, which would hold inputs beyond its run.
    part = GraphModule(module, _part_of(nodes, set(found.values()), found))

    def run(*inputs: Any) -> Mapping[int, Tensor]:
        return dict(zip(found, part(*inputs), strict=True))

    return run


def _part_of(nodes: Sequence[Node], needed: set[Node], outputs: Mapping[int, Node]) -> Graph:
    """Returns the part of a graph that computes `outputs`. Extends `needed`, which has them."""
    for node in reversed(nodes):
        if node in needed and not _needs_no_scores(node):
            needed.update(node.all_input_nodes)
    part = Graph()
    copies: dict[Node, Node] = {}
    for node in nodes:
        if node.op == "placeholder":
            copies[node] = part.node_copy(node)
        elif node in needed and _needs_no_scores(node):
            value = node.args[0].meta["val"]  # type: ignore[union-attr]
            scores = part.call_function(_EMPTY, (list(value.shape),), {"dtype": value.dtype})
            args = (scores, *node.args[1:])
            copies[node] = part.call_function(node.target, args, node.kwargs)  # type: ignore[arg-type]
        elif node in needed:
            copies[node] = part.node_copy(node, copies.__getitem__)
    part.output(tuple(copies[node] for node in outputs.values()))
    return part


def _may_be_known(node: Node, known: Mapping[Node, bool]) -> bool:
    """Returns whether something may be known of a node, where `known` tells of those before it."""
    if node.op == "placeholder":
        return _is_of_whole_numbers(node) or not isinstance(node.meta.get("val"), Tensor)
    if not _can_run(node):
        return False
    if _is_choice(node):
        return _needs_no_scores(node)
    if not all(known[one] for one in node.all_input_nodes):
        return False
    packet = getattr(node.target, "overloadpacket", None)
    return _is_of_whole_numbers(node) or not node.all_input_nodes or packet in PASSED_ON


def _can_run(node: Node) -> bool:
    """Returns whether a node can be run once more: it writes nothing, and is not random."""
    if node.op != "call_function":
        return False
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.target is operator.getitem or not isinstance(node.meta.get("val"), Tensor)
    if node.target._schema.is_mutable:
        return False
    return not any(tag in node.target.tags for tag in _NOT_RUN)


def _needs_no_scores(node: Node) -> bool:
    """Returns whether a node is a choice by scores whose shape, which is enough, is known."""
    if not _is_choice(node) or len(node.all_input_nodes) != 1:
        return False
    value = node.all_input_nodes[0].meta.get("val")
    return isinstance(value, Tensor) and all(isinstance(size, int) for size in value.shape)


def _is_choice(node: Node) -> bool:
    return getattr(node.target, "overloadpacket", None) in CHOOSE


def _is_of_whole_numbers(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex())
