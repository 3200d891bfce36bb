"""Sets how a script's own optimizers update: by flags of their groups, or in the backward pass.

The optimizers stay the objects that the script has made, with their class, attributes, state, hooks
and schedulers. `foreach` and `fused` are values of parameter groups, which torch's optimizers read
at each step; only the step in backward changes what `step` does.

What an optimizer supports is found by steps of a *double*: an object of its class with copies of
its attributes and with small parameters, so that neither the optimizer nor the model changes.
"""

import contextlib
import copy
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from autotune.errors import IllegalConfiguration, InvalidInput
from autotune.shipped.step_in_backward import step_in_backward
from autotune.spec.config import OptimizerFusion

_FLAGS: Mapping[str, str] = {"foreach": "foreach", "kernel": "fused"}
_ANOTHER_FUSION = "use another optimizer_fusion"
_WITH_FUSED = (torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad)
"""torch's classes with a fused kernel. Its attributes and state must fit the flag."""


def all_optimizers(optimizers: Any) -> tuple[Optimizer, ...]:
    """Returns the optimizers that `autotune.apply` was given: one, or a list or tuple of several.

    Raises InvalidInput for anything else.
    """
    several = optimizers if isinstance(optimizers, list | tuple) else (optimizers,)
    for optimizer in several:
        if not hasattr(optimizer, "param_groups"):
            raise InvalidInput(
                "autotune.apply needs an optimizer or a list of optimizers, not "
                f"{type(optimizer).__name__}",
                hint="call apply(model, optimizer), or apply(model, [muon, adam])",
            )
    if not several:
        raise InvalidInput(
            "autotune.apply was given a list without an optimizer",
            hint="call apply(model, optimizer), or apply(model, [muon, adam])",
        )
    return tuple(several)


def held_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """Returns the optimizers that `optimizer` has as attributes, and those which these have.

    A wrapper, such as one of SAM or Lookahead, lets them update its parameters.
    """
    found: list[Optimizer] = []
    waiting = [optimizer]
    while waiting:
        for name, value in vars(waiting.pop()).items():
            if name == "_single":  # of a step in backward, which is no optimizer of the script
                continue
            for held in _values_in(value):
                if isinstance(held, Optimizer) and held is not optimizer and held not in found:
                    found.append(held)
                    waiting.append(held)
    return found


def _values_in(value: Any) -> Iterable[Any]:
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, dict):
        return value.values()
    return (value,)


def set_fusion(
    optimizers: Sequence[Optimizer],
    fusion: OptimizerFusion,
    *,
    sparse: Collection[Tensor] = frozenset(),
) -> None:
    """Lets the optimizers update in the requested way, from their next step on.

    With `as-is` nothing is changed.
    Of several, `foreach` and `kernel` are set where an optimizer has them. `sparse` are parameters
    whose gradients are sparse. Raises IllegalConfiguration as `check_fusion`, before any change.
    """
    if fusion == "as-is":
        return
    check_fusion(optimizers, fusion, sparse=sparse)
    for optimizer in optimizers:
        # A wrapper, too: some copy their settings to the optimizer that they hold.
        for changed in (optimizer, *held_optimizers(optimizer)):
            _set_flags(changed, fusion)
            _keep_flags_after_loading(changed, fusion)
        if fusion == "backward":
            step_in_backward(optimizer)


def _parts(optimizer: Optimizer) -> list[Optimizer]:
    """Returns the optimizers that compute updates: those that a wrapper holds, or itself."""
    held = held_optimizers(optimizer)
    return [part for part in held if not held_optimizers(part)] if held else [optimizer]


def _set_flags(optimizer: Optimizer, fusion: OptimizerFusion) -> None:
    flags = {name: fusion == value for value, name in _FLAGS.items()}
    for settings in (*optimizer.param_groups, optimizer.defaults):
        settings.update({name: flag for name, flag in flags.items() if name in settings})
    if not isinstance(optimizer, _WITH_FUSED):
        return
    # As the constructors of these classes do: a GradScaler leaves the scale to a fused kernel.
    if flags["fused"]:
        optimizer._step_supports_amp_scaling = True
    else:
        vars(optimizer).pop("_step_supports_amp_scaling", None)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            step = state.get("step")
            if not isinstance(step, Tensor):
                continue
            if flags["fused"]:
                state["step"] = step.to(parameter.device, torch.float32)
            elif not group.get("capturable", False):
                state["step"] = step.cpu()


def _keep_flags_after_loading(optimizer: Optimizer, fusion: OptimizerFusion) -> None:
    """Sets the flags again after `load_state_dict`, which brings those of the checkpoint."""

    def set_again(loaded: Optimizer) -> None:
        _set_flags(loaded, fusion)

    has_flags = any(flag in group for flag in _FLAGS.values() for group in optimizer.param_groups)
    if has_flags and "_optimizer_load_state_dict_post_hooks" in vars(optimizer):
        optimizer.register_load_state_dict_post_hook(set_again)


# -- what an optimizer supports --------------------------------------------------------------------


def check_fusion(
    optimizers: Sequence[Optimizer],
    fusion: OptimizerFusion,
    *,
    sparse: Collection[Tensor] = frozenset(),
) -> None:
    """Raises IllegalConfiguration if the optimizers cannot update in the requested way.

    Changes neither them nor their parameters.
    """
    if fusion == "backward":
        _check_that_no_parameter_is_shared(optimizers)
        for optimizer in optimizers:
            _check_step_in_backward(optimizer, sparse=sparse)
    elif fusion in _FLAGS:
        _check_flag(optimizers, fusion, sparse=sparse)


def _check_that_no_parameter_is_shared(optimizers: Sequence[Optimizer]) -> None:
    seen: set[Tensor] = set()
    for optimizer in optimizers:
        own = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        if not seen.isdisjoint(own):
            raise IllegalConfiguration(
                "two optimizers update the same parameter, and the first one that steps in the "
                "backward pass frees its gradient",
                hint=_ANOTHER_FUSION,
            )
        seen |= own


def _check_flag(
    optimizers: Sequence[Optimizer], fusion: OptimizerFusion, *, sparse: Collection[Tensor]
) -> None:
    flag = _FLAGS[fusion]
    parts = [part for optimizer in optimizers for part in _parts(optimizer)]
    with_flag = [part for part in parts if any(flag in group for group in part.param_groups)]
    if not with_flag:
        names = " and ".join(dict.fromkeys(type(part).__name__ for part in parts))
        raise IllegalConfiguration(f"{names} has no {flag}", hint=_ANOTHER_FUSION)
    for part in with_flag:
        with _without_side_effects(part):
            double = _Double(part, fusion=fusion, sparse=sparse)
            double.step(
                scales=(1.0,),
                otherwise=f"{type(part).__name__} cannot update with {flag}=True",
            )


def own_fusion(
    optimizers: Sequence[Optimizer], *, sparse: Collection[Tensor] = frozenset()
) -> OptimizerFusion:
    """Returns the fusion with which the optimizers update as they do without any technique.

    It is found by what a step runs, because torch's default depends on the device, the class and
    its settings. `as-is` if there is none, as of two optimizers whose flags differ. One without
    flags updates in its own way with each.
    """
    parts = [part for optimizer in optimizers for part in _parts(optimizer)]
    with_flags = [
        part
        for part in parts
        if any(flag in group for flag in _FLAGS.values() for group in part.param_groups)
    ]
    brought = [_operations(part, fusion="as-is", sparse=sparse) for part in with_flags]
    candidates: tuple[OptimizerFusion, ...] = ("none", "foreach", "kernel")
    if None not in brought:
        for fusion in candidates:
            if brought == [_operations(part, fusion=fusion, sparse=sparse) for part in with_flags]:
                return fusion
    return "as-is"


def _operations(
    optimizer: Optimizer, *, fusion: OptimizerFusion, sparse: Collection[Tensor]
) -> list[str] | None:
    """Returns the operations of a step with this fusion, in order; None if the step fails."""
    operations = _Operations()
    with _without_side_effects(optimizer):
        double = _Double(optimizer, fusion=fusion, sparse=sparse)
        try:
            with operations:
                double.step(scales=(1.0,), otherwise="")
        except IllegalConfiguration:
            return None
    return operations.names


class _Operations(TorchDispatchMode):
    """Notes the names of the operations that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


_LEARNING_RATE = 0.01
_GRADIENTS = ((3.0, 30.0), (30.0, 3.0))
"""Scales of the gradients of two equal parameters in two steps: far apart and larger than a usual
limit of a norm, so that what depends on all parameters together shows."""


def _check_step_in_backward(optimizer: Optimizer, *, sparse: Collection[Tensor]) -> None:
    """Compares steps for each parameter alone with steps for all parameters together.

    Raises IllegalConfiguration if they fail or differ, if the optimizer counts something at each
    step, and if something else runs at its steps that needs the gradients or all parameters.
    """
    name = type(optimizer).__name__
    reason = _why_not_alone(optimizer)
    if reason:
        raise IllegalConfiguration(
            f"{name} cannot step in the backward pass: {reason}", hint=_ANOTHER_FUSION
        )
    otherwise = f"{name} cannot step in the backward pass"
    with _without_side_effects(optimizer):
        together = _Double(optimizer, fusion="backward", sparse=sparse)
        attributes_after_step = []
        for scales in _GRADIENTS:
            together.step(scales=scales, otherwise=otherwise)
            attributes_after_step.append(dict(vars(together.optimizer)))
    with _without_side_effects(optimizer):
        alone = _Double(optimizer, fusion="backward", sparse=sparse)
        step_in_backward(alone.optimizer)
        for scales in _GRADIENTS:
            alone.step(scales=scales, otherwise=otherwise)
    # An attribute that is set once does no harm. One that changes at each step would change for
    # each parameter instead.
    first, second = attributes_after_step
    changed = []
    for attribute, value in second.items():
        if value is not first.get(attribute):
            changed.append(attribute)
    if changed:
        raise IllegalConfiguration(
            f"{otherwise}: it changes {', '.join(changed)} at each step, for all parameters "
            "together",
            hint=_ANOTHER_FUSION,
        )
    for one, other in zip(together.parameters(), alone.parameters(), strict=True):
        # The change from ones, in which a limit of the norm shows.
        if not torch.allclose(one - 1, other - 1, rtol=1e-2, atol=1e-6, equal_nan=True):
            raise IllegalConfiguration(
                f"{otherwise}: its update of a parameter depends on the other parameters",
                hint=_ANOTHER_FUSION,
            )


def _why_not_alone(optimizer: Optimizer) -> str:
    """Returns what runs at a step and cannot run for each parameter alone; empty if nothing."""
    held = held_optimizers(optimizer)
    if held:
        return f"it steps another optimizer, {type(held[0]).__name__}, for all parameters together"
    if getattr(optimizer, "_optimizer_step_pre_hooks", None):
        return "its step pre-hooks would run after the updates"
    if _global_optimizer_pre_hooks or _global_optimizer_post_hooks:
        return "hooks on the steps of all optimizers would run once for each parameter"
    step = vars(optimizer).get("step")
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
        return "its step was replaced by another function, which would run after the updates"
    return ""


@contextlib.contextmanager
def _without_side_effects(optimizer: Optimizer) -> Iterator[None]:
    """Keeps random numbers and the hooks on the steps of all optimizers out of what is tried."""
    hooks: list[MutableMapping[int, Any]] = [
        _global_optimizer_pre_hooks,
        _global_optimizer_post_hooks,
    ]
    kept = [dict(registered) for registered in hooks]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    devices = {parameter.device for parameter in parameters if parameter.is_cuda}
    for registered in hooks:
        registered.clear()
    try:
        with torch.random.fork_rng(devices):
            # Not `torch.manual_seed`, which also seeds devices that have no context yet.
            torch.default_generator.manual_seed(0)
            for device in devices:
                torch.cuda.default_generators[device.index].manual_seed(0)
            yield
    finally:
        for registered, before in zip(hooks, kept, strict=True):
            registered.update(before)


class _Double:
    """An optimizer like a given one, for small parameters of each kind that its groups have."""

    def __init__(
        self, like: Optimizer, *, fusion: OptimizerFusion, sparse: Collection[Tensor]
    ) -> None:
        self._sparse: set[Tensor] = set()
        kind = type(like)
        self.optimizer: Optimizer = kind.__new__(kind)
        attributes = {name: _copied(value) for name, value in vars(like).items() if name != "step"}
        for name in attributes:
            if name.startswith("_optimizer_") and name.endswith("_hooks"):
                attributes[name] = OrderedDict()
        state: defaultdict[Tensor, Any] = defaultdict(dict)
        groups = []
        for group in like.param_groups:
            small_ones = []
            for parameter in _one_of_each_kind(group["params"], sparse=sparse):
                for _ in _GRADIENTS:  # two, so that one may depend on the other
                    small = nn.Parameter(
                        parameter.detach().new_ones([min(2, size) for size in parameter.shape])
                    )
                    if parameter in sparse:
                        self._sparse.add(small)
                    if like.state.get(parameter):
                        state[small] = _small_state(like.state[parameter], parameter)
                    small_ones.append(small)
            settings = {name: _copied(value) for name, value in group.items()}
            if isinstance(settings.get("lr"), int | float):
                settings["lr"] = _LEARNING_RATE  # theirs may be 0 in a warm-up
            groups.append({**settings, "params": small_ones})
        vars(self.optimizer).update(attributes, param_groups=groups, state=state)
        if fusion != "as-is":
            _set_flags(self.optimizer, fusion)

    def parameters(self) -> Iterator[nn.Parameter]:
        for group in self.optimizer.param_groups:
            yield from group["params"]

    def step(self, *, scales: tuple[float, ...], otherwise: str) -> None:
        """Steps with gradients of these scales in turn.

        Raises IllegalConfiguration, whose message begins with `otherwise`, if the step fails.
        """
        for index, parameter in enumerate(self.parameters()):
            gradient = torch.full_like(parameter, scales[index % len(scales)])
            parameter.grad = gradient.to_sparse(1) if parameter in self._sparse else gradient
        try:
            self.optimizer.step()
        except Exception as error:  # whatever the script's optimizer raises
            reason = [*str(error).splitlines(), type(error).__name__][0]
            raise IllegalConfiguration(f"{otherwise}: {reason}", hint=_ANOTHER_FUSION) from error


def _one_of_each_kind(
    parameters: Iterable[Tensor], *, sparse: Collection[Tensor]
) -> Iterable[Tensor]:
    """Returns a trained parameter of each kind that an update may treat in another way."""
    kinds: dict[Any, Tensor] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            kind = (parameter.dtype, parameter.device, parameter.ndim, parameter in sparse)
            kinds.setdefault(kind, parameter)
    return kinds.values()


def _small_state(state: Mapping[str, Any], parameter: Tensor) -> dict[str, Any]:
    """Returns the state for the first elements of a parameter: of each part that has its shape.

    Also of one that has a row or a column for a matrix.
    """
    small: dict[str, Any] = {}
    for name, value in state.items():
        small[name] = _copied(value)
        is_tensor = isinstance(value, Tensor) and value.ndim == parameter.ndim > 0
        if is_tensor and all(
            size in (1, whole) for size, whole in zip(value.shape, parameter.shape, strict=True)
        ):
            small[name] = value[(slice(2),) * value.ndim].clone()
    return small


def _copied(value: Any) -> Any:
    """Returns a copy of what a step may change in place, else the value itself."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, torch.Generator):
        generator = torch.Generator(value.device)
        generator.set_state(value.get_state())
        return generator
    if isinstance(value, dict | list | set):
        return copy.copy(value)
    return value
