"""The definition of a study: everything that, when changed, makes it another study."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from autotune.errors import InvalidInput
from autotune.spec.config import TrainingConfig
from autotune.spec.limits import Seed, SizeBytes
from autotune.spec.result import DeviceInfo
from autotune.spec.schema import Schema
from autotune.spec.search_space import LegalSpace, SearchSpace, bind_space
from autotune.spec.setting import Format
from autotune.spec.workload import Workload
from autotune.units import format_size

Sampler = Literal["ehvi", "tpe", "gp", "nsga2", "random", "grid"]
SAMPLERS: tuple[Sampler, ...] = get_args(Sampler)
DEFAULT_SAMPLER: Sampler = "ehvi"

RESULTS_FOLDER = Path("studies")
DEFAULT_STORAGE = f"sqlite:///{RESULTS_FOLDER}/autotune.db"


@dataclass(frozen=True, kw_only=True)
class StudyDefinition(Schema):
    """What all trials of a study share; stored in the database when the study is created."""

    name: str
    workload: Workload
    space: SearchSpace
    device: DeviceInfo
    unavailable: Mapping[str, Mapping[str, str]]
    """Choices that a probe found not to work on the device: {technique: {value: reason}}."""
    cap_bytes: SizeBytes
    seed: Seed
    sampler: Sampler

    def describe_cap(self) -> str:
        """Returns `8.00 GiB on cuda:0 (NVIDIA H200)`; the cap is that of each device of a trial."""
        devices = self.workload.devices_per_trial
        each_of = "" if devices == 1 else "each of "
        cap = format_size(self.cap_bytes)
        place = self.device.describe(devices=devices, nodes=self.workload.nodes_per_trial)
        return f"{cap} on {each_of}{place}"

    def legal_space(self) -> LegalSpace:
        """Returns the part of the space that is legal for the workload and the device."""
        return self._legal_space

    @cached_property
    def _legal_space(self) -> LegalSpace:
        return bind_space(self.space, self.workload.legality_context, unavailable=self.unavailable)

    def baseline_config(self) -> TrainingConfig:
        """Returns what savings are relative to, with the first optimizer of the space."""
        return self.space.baseline_config(self.workload.legality_context)

    def first_configurations(self) -> list[tuple[str, TrainingConfig]]:
        """Returns what a study runs first, with names: the baseline and the named configurations.

        A configuration that has several names is returned once.
        """
        named = self.legal_space().named
        baseline = self.baseline_config()
        names = {config.fingerprint: name for name, config in named.items()}
        own_name = self.workload.own_name or "baseline"
        baseline_name = names.get(baseline.fingerprint, own_name)
        first = {baseline.fingerprint: (baseline_name, baseline)}
        for name, config in named.items():
            first[config.fingerprint] = (name, config)
        return list(first.values())

    def possible_trials(self, wanted: int) -> int:
        """Returns `wanted`, or fewer if the space only names configurations and has fewer."""
        legal = self.legal_space()
        if legal.values:
            return wanted
        return min(wanted, len(self.first_configurations()))

    def identity(self) -> dict[str, Any]:
        """Returns what must be equal to resume this study, by the names of the command line."""
        return {
            "workload": self.workload.identity(),
            "space": self.space.to_dict(),
            "device": (self.device.type, self.device.name),
            "torch": self.device.versions.get("torch"),
            "cap": self.cap_bytes,
            "seed": self.seed,
            "sampler": self.sampler,
        }


MOST_TRIALS_IN_TIME = 1000
"""Of a search that ends by its time: more than it will try, so that nobody is told the number."""


def counted_trials(trials: int, wanted: int, *, between: str = "/") -> str:
    """Returns `4/30`, or `4` for a search that ends by its time."""
    return str(trials) if wanted >= MOST_TRIALS_IN_TIME else f"{trials}{between}{wanted}"


def check_device(name: str | None) -> None:
    """Raise InvalidInput unless `name` has the form of a device; a probe checks that it exists."""
    if name is not None and not re.fullmatch(r"cpu|cuda(:[0-9]{1,3})?", name):
        raise InvalidInput(f"{name!r} is not a device", hint="use cpu, cuda or for example cuda:1")


def _read_study_name(name: Any) -> Any:
    check_study_name(name)
    return name


StudyName = Annotated[str, Format(wanted="a name of a study", read=_read_study_name)]


def check_study_name(name: str) -> None:
    """Raise InvalidInput unless `name` is valid as a file name on every system."""
    # A database or a server may say anything.
    allowed = isinstance(name, str) and all(
        character.isalnum() or character in "._-" for character in name
    )
    if not allowed or not name or not name.isascii() or name[0] in ".-" or len(name) > 100:
        raise InvalidInput(
            f"{name!r:.80} cannot be a study's name",
            hint="use up to 100 letters, digits, '.', '_' and '-', "
            "beginning with a letter, a digit or '_'",
        )
