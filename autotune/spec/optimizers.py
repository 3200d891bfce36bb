"""The optimizers: each is declared once, with all that is asked of it elsewhere.

Trials and exported scripts make it by its class and its settings; rules, default learning rates,
expectations of memory and the pages that list packages read the rest. An exporter whose trainer has
a key for it names the key in a table; in the others it is listed as not expressed.

torch's own are described in https://docs.pytorch.org/docs/stable/optim.html. torchao
(https://github.com/pytorch/ao/tree/main/torchao/optim) compiles its update for every shape of a
parameter, which makes the first step slow. There parameters with fewer than 4,096 elements, or with
a number of elements that is not a multiple of 256, have the same state as in adamw.

The paged optimizers, of bitsandbytes, have the state of parameters with 100,000 elements or more in
CUDA's managed memory, which the driver moves to the host page by page when the device is full
(arXiv:2305.14314). It does not count as memory of the device. On a CPU it is ordinary memory. In 8
bits, parameters with fewer than 4,096 elements have the same state as in adamw.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Optimizer = Literal[
    "adamw",
    "adafactor",
    "sgd",
    "adafactor-fixed-rate",
    "adamw-8bit",
    "paged-adamw",
    "paged-adamw-8bit",
    "adamw-fp8",
    "adamw-4bit",
    "adamw-bf16",
    "muon",
    "apollo",
    "apollo-mini",
]


_SHIPPED = "autotune.shipped."


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The default learning rates of full training."""

    from_scratch: float
    from_scratch_on_cuda: float
    fine_tuning: float
    """For pretrained weights."""


@dataclass(frozen=True, kw_only=True)
class OptimizerFacts:
    """What is known of an optimizer."""

    class_path: str
    settings: Mapping[str, Any]
    """What it updates with in trials: the arguments of the class, without the learning rate."""
    of_matrices: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the group of parameters that has the matrices of the blocks, for an optimizer
    that treats them apart."""
    has_settings_in_code: bool = False
    """Whether the class has these settings without an argument for them."""
    rates: Rates | str
    """Its learning rates, or the optimizer that it shares them with: the same algorithm, whose
    state is stored otherwise."""
    state: float
    """Size of its state relative to fp32 weights."""
    state_form: str = ""
    """How its state is stored, if not in tensors of the number format of the weights."""
    fusions: tuple[str, ...] = ()
    """Which of `foreach` and `kernel` its class has flags for. Others are updated one parameter
    after the other, or in the backward pass."""
    way_of_updating: str = ""
    """Why it lacks a fusion, to be read after its name."""
    updates_parts: bool = False
    """Whether it updates the parts of weights that devices share out, and needs no whole ones."""
    updates_fsdp2: bool = True
    """Whether it works on the tensors of FSDP2, be they whole."""
    compiles_update: bool = False
    """Whether it compiles its update, for which a compiler must be installed."""
    is_paged: bool = False
    """Whether the driver moves its state to the host: then it takes no memory of a CUDA device."""

    @property
    def class_name(self) -> str:
        return self.class_path.rpartition(".")[2]

    @property
    def module(self) -> str:
        return self.class_path.rpartition(".")[0]

    @property
    def package(self) -> str | None:
        """The package of its class, if autotune does not install it by itself."""
        package = self.class_path.partition(".")[0]
        return None if package in ("torch", "autotune") else package

    @property
    def is_ours(self) -> bool:
        """Whether its class is in `autotune.shipped`, and in no package."""
        return self.module.startswith(_SHIPPED)

    @property
    def shipped_modules(self) -> tuple[str, ...]:
        """The modules of `autotune.shipped` that an export needs to make it."""
        own = (self.module.removeprefix(_SHIPPED),) if self.is_ours else ()
        return (*own, "matrices") if self.of_matrices else own

    @property
    def arguments(self) -> Mapping[str, Any]:
        """The settings that must be passed to the class."""
        return {} if self.has_settings_in_code else self.settings

    def flags(self, fusion: str) -> dict[str, bool]:
        """Returns `foreach` and `fused`, as far as the class takes them.

        They are always specified, because torch's defaults differ between devices.
        """
        names = {"foreach": "foreach", "kernel": "fused"}
        return {names[own]: own == fusion for own in self.fusions}

    def has_fusion(self, fusion: str) -> bool:
        return fusion in self.fusions or fusion not in ("foreach", "kernel")


_APOLLO: Mapping[str, Any] = {"weight_decay": 0.0, "betas": (0.9, 0.999), "eps": 1e-6}
_ADAMW: Mapping[str, Any] = {"weight_decay": 0.01, "betas": (0.9, 0.999), "eps": 1e-8}

OPTIMIZERS: Mapping[str, OptimizerFacts] = {
    # arXiv:1711.05101. On CUDA the rate of GPT-3 with 125 M parameters (arXiv:2005.14165, table
    # 2.1), else the usual one of a GPT of a few million; for pretrained weights the default of
    # TRL's SFTConfig.
    "adamw": OptimizerFacts(
        class_path="torch.optim.AdamW",
        settings=_ADAMW,
        rates=Rates(from_scratch=2e-3, from_scratch_on_cuda=6e-4, fine_tuning=2e-5),
        state=2.0,
        fusions=("foreach", "kernel"),
        updates_parts=True,
    ),
    # arXiv:1804.04235: its state is a row and a column. The rate is relative to the size of each
    # weight, three times torch's default; for pretrained weights a hundredth, as for AdamW. torch's
    # default for the first eps depends on the dtype of the weights, which would make bf16-true a
    # different algorithm, so it is that of float32. (The paper's 1e-30 is squared in torch's code
    # and becomes 0, which gives NaN for rows that never have a gradient.)
    "adafactor": OptimizerFacts(
        class_path="torch.optim.Adafactor",
        settings={"weight_decay": 0.0, "eps": (1.1920928955078125e-07, 1e-3)},
        rates=Rates(from_scratch=3e-2, from_scratch_on_cuda=3e-2, fine_tuning=3e-4),
        state=0.05,
        fusions=("foreach",),
        way_of_updating="updates in a loop or in batches",
        updates_fsdp2=False,
    ),
    # The usual rate with momentum 0.9; for pretrained weights a hundredth, as for AdamW.
    "sgd": OptimizerFacts(
        class_path="torch.optim.SGD",
        settings={"weight_decay": 0.0, "momentum": 0.9},
        rates=Rates(from_scratch=0.1, from_scratch_on_cuda=0.1, fine_tuning=1e-3),
        state=1.0,
        fusions=("foreach", "kernel"),
        updates_parts=True,
    ),
    # The rate published with the model of `autotune/models/deep_one.py`, not scaled by the size of
    # a weight; for pretrained weights that of AdamW, whose updates have the same size.
    "adafactor-fixed-rate": OptimizerFacts(
        class_path="autotune.shipped.adafactor_fixed_rate.AdafactorFixedRate",
        settings={"weight_decay": 0.01},
        has_settings_in_code=True,
        rates=Rates(from_scratch=2e-4, from_scratch_on_cuda=2e-4, fine_tuning=2e-5),
        state=0.05,
        way_of_updating="updates one parameter after the other",
    ),
    # arXiv:2110.02861: one byte for each number, and a scale for 256.
    "adamw-8bit": OptimizerFacts(
        class_path="torchao.optim.AdamW8bit",
        settings=_ADAMW,
        rates="adamw",
        state=0.5,
        state_form="in 8 bits",
        way_of_updating="compiles its own kernel for each parameter",
        compiles_update=True,
    ),
    "paged-adamw": OptimizerFacts(
        class_path="bitsandbytes.optim.PagedAdamW",
        settings=_ADAMW,
        rates="adamw",
        state=2.0,
        state_form="in memory of its own",
        way_of_updating="has a kernel of its own for each parameter",
        is_paged=True,
    ),
    "paged-adamw-8bit": OptimizerFacts(
        class_path="bitsandbytes.optim.PagedAdamW8bit",
        settings=_ADAMW,
        rates="adamw",
        state=0.5,
        state_form="in memory of its own",
        way_of_updating="has a kernel of its own for each parameter",
        is_paged=True,
    ),
    # e4m3 instead of adamw-8bit's table of 256 values, and a scale for 256 numbers as well.
    "adamw-fp8": OptimizerFacts(
        class_path="torchao.optim.AdamWFp8",
        settings=_ADAMW,
        rates="adamw",
        state=0.5,
        state_form="in fp8",
        way_of_updating="compiles its own kernel for each parameter",
        compiles_update=True,
    ),
    # arXiv:2309.01507: two numbers in a byte, and a scale for 128.
    "adamw-4bit": OptimizerFacts(
        class_path="torchao.optim.AdamW4bit",
        settings=_ADAMW,
        rates="adamw",
        state=0.25,
        state_form="in 4 bits",
        way_of_updating="compiles its own kernel for each parameter",
        compiles_update=True,
    ),
    "adamw-bf16": OptimizerFacts(
        class_path="autotune.shipped.adamw_bf16.AdamWBf16",
        settings=_ADAMW,
        rates="adamw",
        state=1.0,
        state_form="in bf16",
        way_of_updating="updates one parameter after the other",
        updates_parts=True,
    ),
    # arXiv:2502.16982 scales an update to the size of AdamW's, so that it has AdamW's rate.
    "muon": OptimizerFacts(
        class_path="autotune.shipped.muon.MuonWithAdamW",
        settings={"weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8},
        of_matrices={"momentum": 0.95},
        rates=Rates(from_scratch=2e-3, from_scratch_on_cuda=6e-4, fine_tuning=2e-5),
        state=1.0,
        way_of_updating="updates one parameter after the other",
    ),
    # The rates of the authors: 1e-2 for trainings from scratch of 60 M to 7 B parameters, and 1e-5
    # in LLaMA-Factory's example. 256 is their rank for 1 B and 7 B; the state is that
    # of matrices with a side of 2,048.
    "apollo": OptimizerFacts(
        class_path="autotune.shipped.apollo.Apollo",
        settings=_APOLLO,
        of_matrices={"rank": 256, "scale": 1.0, "scales_channels": True},
        rates=Rates(from_scratch=1e-2, from_scratch_on_cuda=1e-2, fine_tuning=1e-5),
        state=0.25,
        way_of_updating="updates one parameter after the other",
    ),
    "apollo-mini": OptimizerFacts(
        class_path="autotune.shipped.apollo.ApolloMini",
        settings=_APOLLO,
        of_matrices={"rank": 1, "scale": 128.0, "scales_channels": False},
        rates="apollo",
        state=0.05,
        way_of_updating="updates one parameter after the other",
    ),
}


def algorithm_of(optimizer: str) -> str:
    """Returns `adamw` for `paged-adamw-8bit`: only how its state is stored differs."""
    rates = OPTIMIZERS[optimizer].rates
    return rates if isinstance(rates, str) else optimizer
