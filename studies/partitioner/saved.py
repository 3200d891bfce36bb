"""Counts the bytes that torch.compile's partitioner saves for backward, in the installed torch.

    python studies/partitioner/saved.py --layers 8 --precision bf16

Needs nothing but torch, so that any release can run it. The model of the published table is written
again here, with attention by the operator that a GPU uses. torch.compile traces it on fake tensors
up to the joint graph of forward and backward that inductor hands to the partitioner. The
partitioner is then run on copies of that graph, with one setting after the other; nothing else is
run. Prints one line of JSON for each setting.
"""

import argparse
import gc
import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch._functorch.config
import torch._inductor.compile_fx as compile_fx
import torch._inductor.config
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.checkpoint import checkpoint

GIB = 1024**3
BUDGETS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.55, 0.6, 0.65, 0.7, 0.8, 0.9, 1.0)
BATCH, LENGTH = 4, 768

# -- the model -------------------------------------------------------------------------------------


def attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, *, operator: str) -> Tensor:
    """Returns attention by the memory-efficient kernel's operator or by plain operators."""
    if operator == "math":
        return F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
    expanded = bias.expand(query.shape[0], *bias.shape)
    attended: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, expanded, True, 0.0, False, scale=query.shape[-1] ** -0.5
    )[0]
    return attended


class Block(nn.Module):
    """Attention with a trained ALiBi bias and a gated feed-forward, DeepNet's post-norm."""

    def __init__(self, *, width: int, heads: int, inner: int, operator: str) -> None:
        super().__init__()
        self.heads, self.operator = heads, operator
        self.query, self.key, self.value, self.output = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )
        self.slopes = nn.Parameter(torch.empty(heads))
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(width, eps=1e-6) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part(x).view(*x.shape[:2], self.heads, -1).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        positions = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)
        bias = (positions[None, :] - positions[:, None]) * self.slopes.view(-1, 1, 1)
        past = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        bias.masked_fill_(past.logical_not(), float("-inf"))
        attended = attention(query, key, value, bias, operator=self.operator)
        x = self.norms[0](x * 2.828 + self.output(attended.transpose(1, 2).flatten(2)))
        fed = self.down(self.up(x) * F.relu(self.gate(x)))
        normed: Tensor = self.norms[1](x * 2.828 + fed)
        return normed


class DeepOne(nn.Module):
    """The table's model: tokens [batch, sequence] -> mean token loss."""

    def __init__(self, *, layers: int, operator: str, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.embedding = nn.Embedding(8000, 2048)
        self.blocks = nn.ModuleList(
            Block(width=2048, heads=16, inner=5400, operator=operator) for _ in range(layers)
        )
        self.norm = nn.RMSNorm(2048, eps=1e-6)
        self.head = nn.Linear(2048, 8000, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        logits = self.head(self.norm(x))[:, :-1].contiguous()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


# -- the partitioner -------------------------------------------------------------------------------


class JointGraph(Exception):
    """Ends a compilation where the partitioner is called, with the partitioner's arguments."""

    def __init__(self, module: fx.GraphModule, args: Any, kwargs: Any) -> None:
        super().__init__()
        self.module, self.args_, self.kwargs = module, args, kwargs


@contextmanager
def one_fake_mode() -> Iterator[None]:
    """Makes older releases trace with the fake tensors' own mode, as newer ones do."""
    original = compile_fx.compile_fx

    def with_mode_of_inputs(module: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        context = torch._guards.TracingContext.try_get()
        modes = [tensor.fake_mode for tensor in inputs if isinstance(tensor, FakeTensor)]
        if context is not None and context.fake_mode is not None and modes:
            modes[0].shape_env = context.fake_mode.shape_env
            context.fake_mode = modes[0]
        return original(module, inputs, *args, **kwargs)

    with patch.object(compile_fx, "compile_fx", with_mode_of_inputs):
        yield


def copied(module: fx.GraphModule) -> fx.GraphModule:
    """Returns a copy, as the partitioner changes the graph that it is given."""
    graph = fx.Graph()
    old_output = next(node for node in module.graph.nodes if node.op == "output")
    graph.output(graph.graph_copy(module.graph, {}))
    new_output = next(node for node in graph.nodes if node.op == "output")
    new_output.meta = dict(old_output.meta)
    return fx.GraphModule(module, graph)


def saved(module: fx.GraphModule, forward_outputs: int) -> tuple[int, dict[str, float]]:
    """Returns the bytes that the forward graph hands to backward, and GiB by operator.

    What is an input of the graph, such as a weight, is not counted; a storage counts once.
    """
    output = next(node for node in module.graph.nodes if node.op == "output")
    by_operator: Counter[str] = Counter()
    storages = {
        node.meta["val"].untyped_storage()._cdata
        for node in module.graph.nodes
        if node.op == "placeholder" and isinstance(node.meta.get("val"), Tensor)
    }
    for node in output.args[0][forward_outputs:]:
        value = node.meta.get("val") if isinstance(node, fx.Node) else None
        if not isinstance(value, Tensor) or value.untyped_storage()._cdata in storages:
            continue
        storages.add(value.untyped_storage()._cdata)
        name = maker(node)
        by_operator[name] += value.untyped_storage().nbytes()
    total = sum(by_operator.values())
    return total, {name: round(size / GIB, 4) for name, size in by_operator.most_common()}


def maker(node: fx.Node) -> str:
    """Returns the operator that computed a tensor, through views and tuples."""
    views = ("view", "permute", "transpose", "getitem", "expand", "unsafe_view", "t.default")
    while node.op == "call_function" and any(view in str(node.target) for view in views):
        node = node.all_input_nodes[0]
    return str(node.target)


def products(module: fx.GraphModule) -> Counter[str]:
    """Counts the matrix products and attention operators of a graph."""
    names = (str(node.target) for node in module.graph.nodes if node.op == "call_function")
    return Counter(name for name in names if name == "aten.mm.default" or "efficient" in name)


# -- the study -------------------------------------------------------------------------------------


def joint_graph(
    *, layers: int, dtype: torch.dtype, device: str, operator: str, checkpointed: bool
) -> JointGraph:
    """Traces the model in training up to the partitioner; returns what that was called with."""

    def stop(module: fx.GraphModule, *args: Any, **kwargs: Any) -> None:
        raise JointGraph(copied(module), args, kwargs)

    torch.set_default_dtype(dtype)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, torch.device(device):
        model = DeepOne(layers=layers, operator=operator, checkpointed=checkpointed)
        tokens = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    with mode:
        step = torch.compile(model, dynamic=False, fullgraph=True)
        with (
            one_fake_mode(),
            patch.object(compile_fx, "min_cut_rematerialization_partition", stop),
            torch._functorch.config.patch(enable_autograd_cache=False),
            torch._inductor.config.patch(fx_graph_cache=False, fx_graph_remote_cache=False),
        ):
            try:
                step(tokens)
            except Exception as error:
                cause: BaseException | None = error
                while cause is not None and not isinstance(cause, JointGraph):
                    cause = cause.__cause__ or getattr(cause, "inner_exception", None)
                if cause is None:
                    raise
                return cause
    sys.exit("the partitioner was not called")


def partitioned(graph: JointGraph) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Returns the forward and the backward graph of the partitioner that inductor uses."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        return min_cut_rematerialization_partition(
            copied(graph.module), *graph.args_, **graph.kwargs
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--device", default="cpu", help="of the fake tensors: cpu, or cuda")
    parser.add_argument("--attention", choices=("efficient", "math"), default="efficient")
    parser.add_argument("--checkpointed", action="store_true")
    parser.add_argument("--budgets", type=float, nargs="+", default=BUDGETS)
    parser.add_argument("--solvers", nargs="+", default=["dp"])
    parser.add_argument("--estimators", nargs="+", default=["flops"])
    options = parser.parse_args()
    graph = joint_graph(
        layers=options.layers,
        dtype=torch.float32 if options.precision == "fp32" else torch.bfloat16,
        device=options.device,
        operator=options.attention,
        checkpointed=options.checkpointed,
    )
    in_both = products(graph.module)
    for solver in options.solvers:
        for estimator in options.estimators:
            for budget in options.budgets:
                settings = {
                    "activation_memory_budget": budget,
                    "activation_memory_budget_solver": solver,
                    "activation_memory_budget_runtime_estimator": estimator,
                }
                with torch._functorch.config.patch(settings):
                    forward, backward = partitioned(graph)
                size_bytes, by_operator = saved(forward, graph.kwargs["num_fwd_outputs"])
                again = products(forward) + products(backward) - in_both
                line = {
                    "torch": torch.__version__,
                    "precision": options.precision,
                    "layers": options.layers,
                    "device": options.device,
                    "attention": options.attention,
                    "checkpointed": options.checkpointed,
                    "budget": budget,
                    "solver": solver,
                    "estimator": estimator,
                    "saved_bytes": size_bytes,
                    "saved_gib": round(size_bytes / GIB, 4),
                    "gib_by_operator": by_operator,
                    "recomputed": dict(again),
                }
                print(json.dumps(line), flush=True)
                gc.collect()


if __name__ == "__main__":
    main()
