"""The real peak of a user's training on this CPU, by the events of the allocator."""

from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from autotune.memory.cpu import CpuMeter
from autotune.predictor.user_training import _bound, _loss_of, named_models, optimizers_in
from autotune.shipped.tensors import held_tensors
from tests.predictor.user_forms import Form


def measured_peak(form: Form, *, calls: int = 1) -> int:
    """Returns the peak of the calls after the first, in bytes."""
    models = [*named_models(form.model).values()]
    models += [one for one in form.besides if isinstance(one, nn.Module)]
    call = _call_of(form)
    for _ in range(calls):
        result = call()

    def resident() -> list[Tensor]:
        found = [tensor for model in models for tensor in model.parameters()]
        found += [one for model in models for m in model.modules() for _, one in held_tensors(m)]
        found += [p.grad for model in models for p in model.parameters() if p.grad is not None]
        for optimizer in optimizers_in(form.optimizer):
            found += tree_leaves(list(optimizer.state.values()))
        found += tree_leaves(form.batch) + tree_leaves(list(form.besides)) + [result]
        return [one for one in found if isinstance(one, Tensor)]

    meter = CpuMeter()
    with meter.measuring(resident):
        for _ in range(calls):
            result = call()
    return meter.reading().peak_memory_bytes


def _call_of(form: Form) -> Any:
    if form.step is not None:
        call = _bound(form.step, model=form.model, batch=form.batch, optimizer=form.optimizer)

        def run() -> Any:
            result = call()
            if isinstance(result, Tensor) and result.requires_grad:
                result.backward()
                for optimizer in optimizers_in(form.optimizer):
                    optimizer.step()
                    optimizer.zero_grad()
                result = result.detach()
            return result

        return run

    def plain() -> None:
        form.optimizer.zero_grad()
        loss = _loss_of(form.model, form.batch)
        loss.backward()
        form.optimizer.step()

    return plain
