"""Whether a training fits a card, asked with the text of a trainer's file or of a config.json.

The questions cost more and more: a bound from shapes, the prediction of that training, the front of
a search space around it, the longest sequence. Nothing is trained, and no file is read.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal
from urllib.parse import quote_plus

from autotune.analysis.least_memory import least_memory_bytes
from autotune.errors import InvalidInput, suggestion
from autotune.execution.local import LocalExecutor
from autotune.importers import with_trainer_text
from autotune.reporting.trial_text import extrapolation_note, speed_text
from autotune.spec.cap import verdict_of
from autotune.spec.config import TrainingConfig, configuration_of
from autotune.spec.data_sheets import DATA_SHEETS
from autotune.spec.model_choice import with_model_config
from autotune.spec.model_file import (
    check_complete,
    check_sizes,
    largest_sequence_length,
    model_name,
)
from autotune.spec.model_shape import KINDS
from autotune.spec.search_space import SearchSpace
from autotune.spec.setting import EVERYDAY, Settings, setting, whole_number
from autotune.spec.space_file import load_space
from autotune.spec.user_files import parse_json
from autotune.spec.workload import Workload
from autotune.study.fit.fit import fit
from autotune.study.fit.request import FitRequest
from autotune.study.prediction.compared import ComparedPrediction
from autotune.study.prediction.predicted_device import predicted_device_of
from autotune.study.prediction.predicted_training import PredictedTraining
from autotune.study.prediction.predictions import Forecaster, workload_with
from autotune.study.prediction.space_answer import predict_space
from autotune.study.request import Cap
from autotune.units import format_size

Part = Literal["least", "peak", "front", "longest"]
"""A question: the bound from shapes, this training, the space around it, the longest sequence."""

Progress = Callable[[str], None]

LARGEST_ADDRESS = 24_000
"""In characters, of which a line break or a letter that is not ASCII takes several."""
FINE_TUNING = "finetune"
FULL_TRAINING = "default"
"""Names of the search spaces of trainings with and without adapters."""
_OF_A_CONFIG = "LoRA, bf16 base, checkpoint"
_LENGTH_OF_A_CONFIG = 2048
_BATCH_OF_A_CONFIG = 8


def ways_to_train() -> Mapping[str, Mapping[str, Any]]:
    """Returns the configurations that a config.json can be asked about, by name."""
    ways = {}
    for one in load_space(FINE_TUNING).configurations:
        choices = {field: value for field, value in one.items() if field != "name"}
        ways[one["name"]] = {"micro_batch_size": 1, **choices}
    return ways


@dataclass(frozen=True, kw_only=True)
class PastedTraining(Settings):
    """A training, and the card that it is to fit. Raises InvalidInput for a text that is neither.

    What is given beside the text overrides what it says.
    """

    text: str = setting(
        help="The text of a trainer's file (axolotl, LLaMA-Factory, TRL, torchtitan, Lightning, "
        "TrainingArguments), or a model's config.json.",
        group=EVERYDAY,
        over_http=True,
    )
    model_text: str = setting(
        "",
        "The config.json of the model, where the file only names it.",
        group=EVERYDAY,
        over_http=True,
    )
    card: str = setting(
        "rtx-4090",
        "The card, by its data sheet.",
        group=EVERYDAY,
        choices=tuple(DATA_SHEETS),
        over_http=True,
    )
    max_mem: Cap | None = setting(
        None, "Memory cap. [default: the memory of the card]", group=EVERYDAY, over_http=True
    )
    way: str = setting(
        _OF_A_CONFIG, "How a config.json is trained.", group=EVERYDAY, over_http=True
    )
    sequence_length: Annotated[int, whole_number(1, 2**24)] | None = setting(
        None, "Tokens of a sequence.", group=EVERYDAY, over_http=True
    )
    global_batch: Annotated[int, whole_number(1, 2**20)] | None = setting(
        None, "Sequences of a step.", group=EVERYDAY, over_http=True
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.text.strip():
            raise InvalidInput(
                "there is no text", hint="paste a trainer's file, or a model's config.json"
            )
        in_address = len(quote_plus(self.text + self.model_text))
        if in_address > LARGEST_ADDRESS:
            raise InvalidInput(
                f"the text takes {in_address:,} characters of an address, which can hold "
                f"{LARGEST_ADDRESS:,}",
                hint="leave out comments, or ask on the command line: autotune predict --from FILE",
            )
        if self.card not in DATA_SHEETS:
            raise InvalidInput(
                f"there is no data sheet of a card {self.card!r:.60}",
                hint=suggestion(
                    self.card, DATA_SHEETS, otherwise=f"use one of {', '.join(DATA_SHEETS)}"
                ),
            )
        if self.way not in ways_to_train():
            raise InvalidInput(
                f"there is no way to train {self.way!r:.60}",
                hint=f"use one of {', '.join(ways_to_train())}",
            )

    @cached_property
    def cap_bytes(self) -> int:
        if self.max_mem is not None:
            return self.max_mem
        return DATA_SHEETS[self.card].device().total_memory_bytes

    def submission(self) -> dict[str, Any]:
        """Returns the settings of a search from this training, under this cap.

        Its weights are drawn at random and its text is our own: memory and speed do not depend on
        them. Raises InvalidInput.
        """
        return {**self.read.settings, "max_mem": self.cap_bytes, "space": self.read.space}

    @cached_property
    def read(self) -> "ReadTraining":
        """What the text says. Raises InvalidInput."""
        given = {
            name: value
            for name in ("sequence_length", "global_batch")
            if (value := getattr(self, name)) is not None
        }
        if self.model_text.strip():
            content = _config_of(self.model_text)
            if content is None:
                raise InvalidInput(
                    "the second text is no config.json", hint="paste that of the model"
                )
            given |= {"model": model_name(content), "model_config": content}
        config = _config_of(self.text)
        if config is None:
            said: list[str] = []
            settings = with_trainer_text(given, PredictedTraining, self.text, told=said.extend)
            return ReadTraining(settings=settings, said=tuple(said))
        positions = largest_sequence_length(config)
        settings = {
            "model": model_name(config),
            "model_config": config,
            "sequence_length": min(_LENGTH_OF_A_CONFIG, positions or _LENGTH_OF_A_CONFIG),
            "global_batch": _BATCH_OF_A_CONFIG,
            **given,
        }
        how = f"a config.json of {config['model_type']}, trained so: {self.way}"
        settings["own_config"] = TrainingConfig(**ways_to_train()[self.way]).to_dict()
        return ReadTraining(settings=settings, said=(how,))


@dataclass(frozen=True, kw_only=True)
class ReadTraining:
    """What a text says of a training."""

    settings: Mapping[str, Any]
    """Of the workload, with the model by name or with its config, and the training's techniques."""
    said: tuple[str, ...]
    """How it was read, a sentence each."""

    @property
    def space(self) -> str:
        """The name of the search space around the training."""
        is_full = self.settings["own_config"].get("adapter", "none") == "none"
        return FULL_TRAINING if is_full else FINE_TUNING


def _config_of(text: str) -> Mapping[str, Any] | None:
    """Returns the content of a model's config.json; None for any other text.

    Raises InvalidInput for sizes that are missing or none: no class completes what is pasted.
    """
    if not text.lstrip().startswith("{"):
        return None
    source = "the text"
    content = parse_json(text.encode(errors="replace"), source=source)
    if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
        return None
    check_sizes(content, source=source)
    check_complete(content, source=source, has_heads=content["model_type"] in KINDS)
    return content


def answer_part(
    part: Part,
    pasted: PastedTraining,
    settings: Mapping[str, Any],
    *,
    storage: str,
    progress: Progress = lambda what: None,
) -> dict[str, Any]:
    """Returns the answer to one of the questions, ready for JSON.

    `settings` are those that were read, as they are allowed here. `progress` gets what is done now.
    Raises InvalidInput, and PredictionImpossible for a model that cannot run on fake tensors.
    """
    training = _Training(pasted=pasted, settings=with_model_config(settings))
    return _ANSWERS[part](training, storage, progress)


@dataclass(frozen=True, kw_only=True)
class _Training:
    pasted: PastedTraining
    settings: Mapping[str, Any]

    @cached_property
    def workload(self) -> Workload:
        return workload_with("cuda", self.settings, {}, space=self.space)

    @cached_property
    def config(self) -> TrainingConfig:
        return configuration_of({}, self.workload.legality_context)

    @cached_property
    def space(self) -> SearchSpace:
        return load_space(self.pasted.read.space)

    @contextmanager
    def forecaster(self, storage: str) -> Iterator[Forecaster]:
        with (
            TemporaryDirectory() as folder,
            LocalExecutor(Path(folder), only_predicts=True) as executor,
        ):
            device = predicted_device_of(self.pasted.card, executor=executor, storage=storage)
            yield Forecaster.for_device(
                device, executor=executor, workload=self.workload, extrapolates="any"
            )


def _least(training: _Training, storage: str, progress: Progress) -> dict[str, Any]:
    return {
        "said": list(training.pasted.read.said),
        "workload": training.workload.describe(),
        "config": training.config.describe(),
        "cap_bytes": training.pasted.cap_bytes,
        "least_bytes": least_memory_bytes(training.workload, training.config),
    }


def _peak(training: _Training, storage: str, progress: Progress) -> dict[str, Any]:
    progress("Running a step of it on tensors without data")
    with training.forecaster(storage) as forecaster:
        prediction = forecaster.predict(training.config)
        answer = ComparedPrediction(
            forecaster=forecaster,
            config=training.config,
            prediction=prediction,
            cap_bytes=training.pasted.cap_bytes,
        ).with_change(progress=progress)
    note = extrapolation_note(prediction)
    return {
        **answer.to_dict(),
        "verdict": verdict_of(prediction, cap_bytes=answer.cap_bytes),
        "sentence": f"{answer.verdict()}.",
        "change": answer.change_line(),
        "speed": speed_text(prediction),
        "notes": [*prediction.notes, *([note] if note else [])],
    }


def _front(training: _Training, storage: str, progress: Progress) -> dict[str, Any]:
    def tell(made: int, wanted: int | None) -> None:
        of = "" if wanted is None else f" of {wanted}"
        progress(f"{made}{of} configurations predicted")

    progress("Predicting the first configurations")
    with training.forecaster(storage) as forecaster:
        answer = predict_space(
            forecaster, training.space, cap_bytes=training.pasted.cap_bytes, tell=tell
        )
    return {
        **answer.to_dict(),
        "space": training.space.name,
        "own": training.config.to_dict(),
        "conclusion": answer.conclusion(),
        "lines": list(answer.lines_about_front()),
    }


def _longest(training: _Training, storage: str, progress: Progress) -> dict[str, Any]:
    request = FitRequest.of(
        {
            **training.settings,
            "max_mem": training.pasted.cap_bytes,
            "vary": "seq-len",
            "device": training.pasted.card,
            "configuration": training.config.to_dict(),
            "confirm": False,
            "storage": storage,
        }
    )
    found = fit(request, listener=lambda one: progress(one.what))
    best = found.best
    if best is None or best.prediction is None or best.value is None:
        sentence = f"No sequence fits: {found.rows[0].message}."
    else:
        peak = format_size(best.prediction.peak_memory_bytes)
        most = format_size(best.prediction.upper_bound_bytes)
        longest = found.varying.describe(best.value)
        sentence = f"{longest}: {peak}, at most {most}. One more: {best.message}."
    return {**found.to_dict(), "sentence": sentence}


_ANSWERS: Mapping[Part, Callable[[_Training, str, Progress], dict[str, Any]]] = {
    "least": _least,
    "peak": _peak,
    "front": _front,
    "longest": _longest,
}
