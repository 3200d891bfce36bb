"""How a training that ran on several nodes is started on them, in the words of launchers.

Somebody starts the same command on each node; the processes meet on the first one.
"""

from autotune.exporters.recipe import Recipe

FIRST_NODE = "FIRST_NODE"
"""Stands for the address of the first node, which a study does not know."""
PORT = 29500
"""That of torchrun and accelerate."""


def torchrun(recipe: Recipe, alone: str) -> str:
    """Returns the options of torchrun; `alone` are those of a training on one node.

    Source: "torchrun (Elastic Launch)" in the documentation of torch.
    """
    if recipe.nodes == 1:
        return alone
    return (
        f"--nnodes {recipe.nodes} --nproc-per-node {recipe.devices_on_each_node} "
        f"--rdzv-backend c10d --rdzv-endpoint {FIRST_NODE}:{PORT}"
    )


def note(recipe: Recipe, also: str = "") -> tuple[str, ...]:
    """Returns the note on how the command is used on several nodes; none for one."""
    if recipe.nodes == 1:
        return ()
    return (
        f"the trial ran on {recipe.nodes} nodes with {recipe.devices_on_each_node} devices each: "
        f"run the command on each of them, with the address of the first for {FIRST_NODE}{also}",
    )
