"""Learning rates: one for each optimizer and kind of training, with their defaults.

A rate is named by its optimizer, `adamw`, or by adapter and optimizer, `lora/adamw`. A rate that
nobody specified follows from others: AdamW in 8 bits and with paged state uses that of AdamW, DoRA
that of LoRA, and an adapter `ADAPTER_FACTOR` times that of full training. The defaults are declared
with the optimizers (`spec/optimizers.py`).
"""

from collections.abc import Iterator, Mapping

from autotune.spec.config import CHOICES
from autotune.spec.optimizers import OPTIMIZERS, Rates, algorithm_of

_RATES = {name: facts.rates for name, facts in OPTIMIZERS.items() if isinstance(facts.rates, Rates)}
FROM_SCRATCH = {name: rates.from_scratch for name, rates in _RATES.items()}
FROM_SCRATCH_ON_CUDA = {name: rates.from_scratch_on_cuda for name, rates in _RATES.items()}
FINE_TUNING = {name: rates.fine_tuning for name, rates in _RATES.items()}

ADAPTER_FACTOR = 10.0
"""The best rate of LoRA is about ten times that of full training, at any rank: Schulman et al.,
"LoRA Without Regret", https://thinkingmachines.ai/blog/lora (2025). With AdamW it is then the 2e-4
of QLoRA (arXiv:2305.14314, appendix B)."""

LEARNING_RATE_NAMES = (
    *CHOICES["optimizer"],
    *(
        f"{adapter}/{optimizer}"
        for adapter in CHOICES["adapter"]
        if adapter != "none"
        for optimizer in CHOICES["optimizer"]
    ),
)


def default_learning_rates(device_type: str, *, pretrained: bool) -> Mapping[str, float]:
    """Returns the rates of full training by optimizer, for what nobody specified."""
    if pretrained:
        return FINE_TUNING
    return FROM_SCRATCH_ON_CUDA if device_type == "cuda" else FROM_SCRATCH


def rate_name(optimizer: str, adapter: str) -> str:
    """Returns the name of a rate: `adamw`, or `lora/adamw`."""
    return optimizer if adapter == "none" else f"{adapter}/{optimizer}"


def learning_rate_of(rates: Mapping[str, float], optimizer: str, adapter: str) -> float:
    """Returns the rate of an optimizer for a kind of training.

    `rates` are those of a workload; a study from before an optimizer existed lacks its rate.
    """
    for name in _names(optimizer, adapter):
        if name in rates:
            return rates[name]
    if adapter != "none":
        return ADAPTER_FACTOR * learning_rate_of(rates, optimizer, "none")
    defaults = OPTIMIZERS[algorithm_of(optimizer)].rates
    assert isinstance(defaults, Rates), "an algorithm has rates of its own"
    return defaults.from_scratch


def _names(optimizer: str, adapter: str) -> Iterator[str]:
    """Yield the names under which the rate may be, the closest first."""
    adapters = (adapter, "lora") if adapter == "dora" else (adapter,)
    for kind in adapters:
        for one in (optimizer, algorithm_of(optimizer)):
            yield rate_name(one, kind)
