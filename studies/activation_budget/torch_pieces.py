"""Tries what torch has for the same question: its estimators and its linear program, on a CPU.

    python studies/activation_budget/torch_pieces.py

Prints for each the result, or the error.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode


def estimated(estimate: Callable[[nn.Module, torch.Tensor], Any]) -> str:
    """Returns the result of an estimate for four layers on fake tensors, or its error."""
    try:
        with FakeTensorMode():
            layers = [nn.TransformerEncoderLayer(64, 4, batch_first=True) for _ in range(4)]
            return str(estimate(nn.Sequential(*layers), torch.randn(2, 16, 64)))
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"


def runtime(mode: str) -> Callable[[nn.Module, torch.Tensor], Any]:
    def estimate(model: nn.Module, batch: torch.Tensor) -> Any:
        from torch.distributed._tools.runtime_estimator import RuntimeEstimator

        with RuntimeEstimator()(mode) as estimator:
            model(batch).sum().backward()
        return f"{estimator.total_runtime} ms"

    return estimate


def selective(model: nn.Module, batch: torch.Tensor) -> Any:
    from torch.distributed._tools.sac_estimator import SACEstimator

    estimator = SACEstimator()
    with estimator(estimate_mode_type="operator-level-cost-model"):
        model(batch).sum().backward()
    return f"{len(estimator.sac_mod_stats)} modules"


def program(model: nn.Module, batch: torch.Tensor) -> Any:
    from torch.distributed._tools import sac_ilp

    return sac_ilp.__name__


def main() -> None:
    print("torch", torch.__version__, file=sys.stderr)
    for name, estimate in {
        "RuntimeEstimator, cost model": runtime("operator-level-cost-model"),
        "RuntimeEstimator, benchmark": runtime("operator-level-benchmark"),
        "SACEstimator": selective,
        "sac_ilp": program,
    }.items():
        print(f"{name}: {estimated(estimate)}")


if __name__ == "__main__":
    main()
