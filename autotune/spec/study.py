"""What a study is: everything that, when changed, makes it another study."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from autotune.errors import InvalidInput
from autotune.spec.config import CHOICES, TrainingConfig, baseline_of
from autotune.spec.result import DeviceInfo
from autotune.spec.search_space import LegalSpace, SearchSpace, bind_space
from autotune.spec.workload import Workload

Sampler = Literal["ehvi", "tpe", "gp", "nsga2", "random", "grid"]
SAMPLERS: tuple[Sampler, ...] = get_args(Sampler)
DEFAULT_SAMPLER: Sampler = "ehvi"

RESULTS_FOLDER = Path("studies")
DEFAULT_STORAGE = f"sqlite:///{RESULTS_FOLDER}/autotune.db"


@dataclass(frozen=True, kw_only=True)
class StudyDefinition:
    """All trials of a study share this. Kept in the database when the study begins."""

    name: str
    workload: Workload
    space: SearchSpace
    device: DeviceInfo
    unavailable: Mapping[str, Mapping[str, str]]
    """What a probe found not to work on the device: {technique: {value: reason}}."""
    cap_bytes: int
    seed: int
    sampler: Sampler

    def legal_space(self) -> LegalSpace:
        return bind_space(self.space, self.workload.circumstances, unavailable=self.unavailable)

    def baseline_config(self) -> TrainingConfig:
        """The study's denominator, with the first optimizer its space trains with."""
        optimizers = self.space.techniques.get(
            "optimizer", (self.space.defaults.get("optimizer", CHOICES["optimizer"][0]),)
        )
        return baseline_of(optimizer=optimizers[0], global_batch=self.workload.global_batch)  # type: ignore[arg-type]

    def first_configurations(self) -> list[tuple[str, TrainingConfig]]:
        """What a study begins with: the baseline and the space's named configurations, each once, with its name."""
        named, baseline = self.legal_space().named, self.baseline_config()
        names = {config.fingerprint: name for name, config in named.items()}
        first = [(names.get(baseline.fingerprint, "baseline"), baseline), *named.items()]
        return list({config.fingerprint: (name, config) for name, config in first}.values())

    def possible_trials(self, wanted: int) -> int:
        """`wanted`, or as many as there are in a space that only names configurations."""
        legal = self.legal_space()
        if legal.values:
            return wanted
        return min(wanted, len(self.first_configurations()))

    def identity(self) -> dict[str, Any]:
        """What must be equal for a search to continue this study, in the words of the command line."""
        return {
            "workload": self.workload.identity(),
            "space": self.space.to_dict(),
            "device": (self.device.type, self.device.name),
            "torch": self.device.versions.get("torch"),
            "cap": self.cap_bytes,
            "seed": self.seed,
            "sampler": self.sampler,
        }


def check_study_name(name: str) -> None:
    """Raises InvalidInput unless `name` can be a file's name everywhere."""
    allowed = all(character.isalnum() or character in "._-" for character in name)
    if not name or not allowed or not name.isascii() or name[0] in ".-" or len(name) > 100:
        raise InvalidInput(
            f"{name!r} cannot be a study's name",
            hint="use up to 100 letters, digits, '.', '_' and '-', beginning with a letter, a digit or '_'",
        )
