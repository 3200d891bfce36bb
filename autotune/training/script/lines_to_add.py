"""Writes the lines that a user's own training loop lacks to be searched, for their places in it.

The places and the names are those that `LoopWatch` has seen while the script ran. What the script
has not come to is looked for in its text: an optimizer that is made of `model.parameters()`, a
DataLoader, and the calls of backward and `optimizer.step()`.
"""

import ast
import os
import textwrap
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from autotune.errors import InvalidInput
from autotune.spec.user_code import read_python
from autotune.training.script.loop_watch import LoopWatch, Made, Place, Steps

_UNKNOWN = "..."
"""Stands where the script's own name of something was not found."""
_LONGEST_QUOTE = 70
_WIDTH = 96
_WRAPPED_AS = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "OptimizedModule": "_orig_mod",
}
"""Classes that wrap a model, and the attribute by which they have it."""


@dataclass(frozen=True, kw_only=True)
class _Statement:
    """A statement in a file of the user's."""

    file: str
    source: Sequence[str]
    tree: ast.Module
    node: ast.stmt

    def after(self) -> str:
        loop = "the loop " if isinstance(self.node, ast.For | ast.While) else ""
        return f"{_shown(self.file)}:{self.node.end_lineno} after {loop}`{self._quote()}`"

    def before(self) -> str:
        return f"{_shown(self.file)}:{self.node.lineno} before `{self._quote()}`"

    def _quote(self) -> str:
        line = self.source[self.node.lineno - 1].strip()
        return line if len(line) <= _LONGEST_QUOTE else f"{line[:_LONGEST_QUOTE]} ..."

    def loops(self) -> list["_Statement"]:
        """Returns the loops around it in its function, innermost first."""
        around = [
            node
            for node in ast.walk(self.tree)
            if isinstance(node, ast.stmt)
            and node is not self.node
            and node.lineno <= self.node.lineno
            and (node.end_lineno or 0) >= (self.node.end_lineno or 0)
        ]
        found = []
        for node in sorted(around, key=_length):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                break
            if isinstance(node, ast.For | ast.AsyncFor | ast.While):
                found.append(replace(self, node=node))
        return found

    def calls(self, *names: str) -> Iterator[ast.Call]:
        """Yields the calls in it of functions or methods of these names; of all without names."""
        for node in ast.walk(self.node):
            if isinstance(node, ast.Call) and (not names or _last_name(node.func) in names):
                yield node


@dataclass(frozen=True, kw_only=True)
class _Loop:
    """A training loop as the user has written it. Names are expressions of its code."""

    made: _Statement | None = None
    """Makes the last optimizer."""
    model: str = "model"
    optimizers: tuple[str, ...] = ("optimizer",)
    """One, or several; the list that has them all is one."""
    others: str = ""
    """Optimizers that update other models."""
    data: _Statement | None = None
    """Makes the DataLoader, or is the loop around all steps."""
    global_batch: str = _UNKNOWN
    parts: int = 1
    """How many passes a step accumulates."""
    step: _Statement | None = None
    """The last update of a step."""
    count: str = f"tokens={_UNKNOWN}"
    loss: str = _UNKNOWN


def lines_to_add(watch: LoopWatch, files: Sequence[str], *, called: Collection[str]) -> str:
    """Returns what to write where, in several lines; empty where no such loop is found.

    `files` are the script and the modules of the user's that it has run, and `called` the functions
    of ours that it calls already.
    """
    sources = _Sources(files)
    loop = _read(sources, _seen(sources, watch))
    if loop.made is None:
        return ""
    lines = [(loop.made.after(), _apply(loop))]
    if "current_config" not in called:
        where = loop.data.before() if loop.data else "before the loop"
        code = f"autotune.current_config(global_batch={loop.global_batch}).micro_batch_size"
        lines.append((where, f"micro_batch = {code}"))
    if "report" not in called:
        where = loop.step.after() if loop.step else "after each step of the optimizer"
        lines.append((where, f"autotune.report({loop.count}, loss={loop.loss})"))
    text = ["add these lines, and `import autotune`; outside of a search they change nothing"]
    for where, code in lines:
        text += [where, f"    {code}"]
    for remark in _remarks(loop):
        text += textwrap.wrap(remark, width=_WIDTH)
    return "\n".join(text)


def _apply(loop: _Loop) -> str:
    names = ", ".join(loop.optimizers)
    given, returned = names, names
    if len(loop.optimizers) > 1:
        given, returned = f"[{names}]", f"({names})"
    return f"{loop.model}, {returned} = autotune.apply({loop.model}, {given})"


def _remarks(loop: _Loop) -> Iterator[str]:
    instead = f" instead of {loop.parts}" if loop.parts > 1 else ""
    yield (
        "micro_batch is the number of rows of one pass: a step accumulates "
        f"{loop.global_batch} // micro_batch of them{instead}, and reports the mean of their "
        "losses; where micro_batch is not used, the whole batch is searched"
    )
    if loop.others:
        yield (
            f"a search changes one model: {loop.others} and its model stay as they are, unless "
            "both models are parts of one nn.Module"
        )


def trainer_place(files: Sequence[str]) -> str:
    """Returns where these files make a Trainer, as `train.py:12`; empty where they make none."""
    for statement in _Sources(files).statements():
        for call in statement.calls():
            if _last_name(call.func).endswith("Trainer"):
                return f"{_shown(statement.file)}:{call.lineno}"
    return ""


# -- as it ran -------------------------------------------------------------------------------------


def _seen(sources: "_Sources", watch: LoopWatch) -> _Loop:
    """Returns what the script has shown while it ran."""
    made = watch.optimizers()
    loop = _Loop()
    own: Sequence[Made] = made
    if made:
        loop, own = _with_model(loop, sources, made)
    if watch.loader is not None and watch.loader.places:
        loop = replace(loop, data=sources.statement(watch.loader.places[0]))
    stepped = [watch.steps[each.value] for each in own if each.value in watch.steps]
    lasts = [steps for steps in watch.steps.values() if steps.places]
    if not stepped or not lasts:
        return loop
    last = lasts[-1].places
    step = sources.statement(last[0])
    if step is not None and sum(each.places[0].line == last[0].line for each in lasts) > 1:
        step = [*step.loops(), step][0]  # for optimizer in optimizers: optimizer.step()
    if loop.data is None:
        around = [each.loops() for each in map(sources.statement, last) if each is not None]
        loop = replace(loop, data=next((loops[-1] for loops in reversed(around) if loops), None))
    parts = max(1, stepped[-1].backwards_in_step) if len(lasts) == 1 else 1
    loop = replace(loop, step=step, parts=parts, loss=_loss(sources, stepped[-1], last[0]))
    return _with_batch(sources, watch, loop, last[0])


def _with_model(
    loop: _Loop, sources: "_Sources", made: Sequence[Made]
) -> tuple[_Loop, Sequence[Made]]:
    """Returns the loop with the model that most of what is trained is of, and its optimizers.

    The line that makes the last optimizer is the innermost one that can refer to all of these.
    """
    trained = {id(each): each.numel() for one in made for each in _parameters(one)}
    for place in made[-1].places:
        statement = sources.statement(place)
        names = place.local_names()
        expressions = {id(one): _expression(names, one.value) for one in made}
        if statement is None or not all(expressions.values()):
            continue
        written = {ast.unparse(node) for node in ast.walk(statement.node)}

        def rank(choice: tuple[str, nn.Module], written: set[str] = written) -> tuple[Any, ...]:
            name, module = choice
            covered = sum(trained.get(id(each), 0) for each in module.parameters())
            is_wrapper = type(module).__name__ in _WRAPPED_AS
            size = sum(1 for _ in module.modules())
            return -covered, is_wrapper, size, name not in written

        choices = sorted(place.modules.items(), key=rank)
        if not choices or rank(choices[0])[0] == 0:
            continue
        name, module = choices[0]
        weights = {id(each) for each in module.parameters()}
        own = [one for one in made if any(id(each) in weights for each in _parameters(one))]
        wrapped = _WRAPPED_AS.get(type(module).__name__)
        if len({one.places[0].line for one in made if one.places}) < len(made):
            statement = [statement, *statement.loops()][-1]  # several are made by one line
        loop = replace(
            loop,
            made=statement,
            model=f"{name}.{wrapped}" if wrapped else name,
            optimizers=_optimizers(names, own),
            others=", ".join(expressions[id(one)] for one in made if one not in own),
        )
        return loop, own
    places = made[-1].places
    return replace(loop, made=sources.statement(places[0]) if places else None), made


def _parameters(made: Made) -> Iterator[Tensor]:
    for group in made.value.param_groups:
        yield from group["params"]


def _expression(names: dict[str, Any], value: Any) -> str:
    """Returns the first name of an object; empty if it has none."""
    return next((name for name, each in names.items() if each is value), "")


def _optimizers(names: dict[str, Any], optimizers: Sequence[Made]) -> tuple[str, ...]:
    """Returns the names of the optimizers, or that of a list of them."""
    values = [one.value for one in optimizers]
    for name, each in names.items():
        if isinstance(each, list | tuple) and list(map(id, each)) == list(map(id, values)):
            return (name,)
    return tuple(_expression(names, value) for value in values)


def _with_batch(sources: "_Sources", watch: LoopWatch, loop: _Loop, place: Place) -> _Loop:
    """Returns the loop with its global batch, and the tokens or rows of a step."""
    if watch.batch is None or watch.call is None:
        return loop
    loader = None if watch.loader is None else watch.loader.value.batch_size
    rows = loader or (len(watch.batch) if watch.batch.dim() else 1)
    times = f" * {loop.parts}" if loop.parts > 1 else ""
    size = sources.batch_size(loop.data) if loop.data else ""
    called, model = watch.call
    statement = sources.statement(called)
    names = place.names()
    name = _expression(names, watch.batch)
    if not name and statement is not None and called.frame is place.frame:
        for call in statement.calls():  # model(batch[:, :-1])
            if names.get(ast.unparse(call.func)) is model and call.args:
                name = ast.unparse(call.args[0])
    if watch.batch.is_floating_point():
        count = f"rows={f'len({name}){times}' if name else rows * loop.parts}"
    else:
        tokens = watch.batch.numel() * loop.parts
        count = f"tokens={f'{name}.numel(){times}' if name else tokens}"
    is_named = bool(size) and not size.isdigit()
    global_batch = f"{size}{times}" if is_named else str(rows * loop.parts)
    return replace(loop, global_batch=global_batch, count=count)


def _loss(sources: "_Sources", steps: Steps, place: Place) -> str:
    """Returns the name of the loss in the code that steps."""
    names = place.names()
    name = _expression(names, steps.loss)
    statement = steps.backward and sources.statement(steps.backward)
    if name or not statement:
        return name or _UNKNOWN
    for node in ast.walk(statement.node):  # as of (loss / 4).backward()
        if isinstance(node, ast.Name | ast.Attribute):
            value = names.get(ast.unparse(node))
            if isinstance(value, Tensor) and value.dim() == 0:
                return ast.unparse(node)
    return _UNKNOWN


# -- as it is written ------------------------------------------------------------------------------


def _read(sources: "_Sources", loop: _Loop) -> _Loop:
    """Returns the loop with what its text says where nothing was seen."""
    for statement in sources.statements():
        made = isinstance(statement.node, ast.Assign) and list(statement.calls("parameters"))
        if loop.made is None and made and isinstance(made[0].func, ast.Attribute):
            assert isinstance(statement.node, ast.Assign)
            loop = replace(
                loop,
                made=statement,
                model=ast.unparse(made[0].func.value),
                optimizers=(ast.unparse(statement.node.targets[0]),),
            )
        if loop.step is not None:
            continue
        if loop.data is None and (size := sources.batch_size(statement)):
            loop = replace(loop, data=statement, global_batch=size)
        for call in statement.calls("backward"):
            losses = [node.id for node in ast.walk(call) if isinstance(node, ast.Name)]
            loop = replace(loop, loss=losses[-1] if losses else _UNKNOWN)
    for statement in sources.statements() if loop.step is None else ():
        for call in statement.calls("step"):
            values = [*call.args, getattr(call.func, "value", call)]
            if loop.optimizers[0] in map(ast.unparse, values):
                loop = replace(loop, step=statement)
    return loop


class _Sources:
    """The user's files, parsed."""

    def __init__(self, files: Sequence[str]) -> None:
        self._trees: dict[str, tuple[ast.Module, Sequence[str]]] = {}
        for file in files:
            try:
                source = Path(file).read_text(errors="replace").splitlines()
                self._trees[file] = read_python(Path(file)), source
            except (InvalidInput, OSError):  # not Python, or no longer there
                continue

    def statement(self, place: Place) -> _Statement | None:
        """Returns the innermost statement of a line that runs; None for code without a file."""
        found = [
            each
            for each in self.statements(place.file)
            if each.node.lineno <= place.line <= (each.node.end_lineno or 0)
        ]
        shortest = min((_length(each.node) for each in found), default=0)
        # Of several on one line, the last one.
        return next((each for each in reversed(found) if _length(each.node) == shortest), None)

    def statements(self, file: str | None = None) -> Iterator[_Statement]:
        """Yields the statements of a file, or of all, in the order of their lines."""
        for path in self._trees if file is None else self._trees.keys() & {file}:
            tree, source = self._trees[path]
            nodes = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
            for node in sorted(nodes, key=lambda each: (each.lineno, each.col_offset)):
                yield _Statement(file=path, source=source, tree=tree, node=node)

    def batch_size(self, statement: _Statement) -> str:
        """Returns what a DataLoader gets as its batch size on the first line of a statement."""
        for call in statement.calls("DataLoader"):
            for keyword in call.keywords:
                if keyword.arg == "batch_size" and call.lineno <= statement.node.lineno:
                    return ast.unparse(keyword.value)
        return ""


def _length(node: ast.stmt) -> int:
    return (node.end_lineno or 0) - node.lineno


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _shown(file: str) -> str:
    """Returns the path as people type it: relative where it is in the current folder."""
    relative = os.path.relpath(file)
    return file if relative.startswith(os.pardir) else relative
