"""Every configuration of the default space on one card: memory, speed and perplexity.

Memory is predicted; speed is a roofline with assumptions (`assumptions.py`), whose terms add up:

    step = micro batches * norm(FLOPs / rate + bytes / bandwidth + offloaded bytes / link, host)
           + the update

It measures no GPU. It ranks searches.
"""

import hashlib
import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy

from autotune.analysis.roofline import matrix_format
from autotune.spec.config import TrainingConfig
from autotune.spec.prediction import Prediction
from autotune.spec.result import DeviceInfo
from autotune.spec.space_file import load_space
from autotune.spec.study import StudyDefinition
from autotune.spec.workload import Workload, make_workload
from studies.search_efficiency.gpu.assumptions import Assumptions, Card
from studies.search_efficiency.gpu.predicted import TECHNIQUES, Array, Predicted, Shape

GIB = 2**30
GLOBAL_BATCH, SEQUENCE = 16, 1024
TOKENS = GLOBAL_BATCH * SEQUENCE
PARAMETERS = 113_664_768
MODEL_FLOPS = 831_651_840.0
"""Of a token, forward and backward, as predicted."""
ATTENTION_FLOPS = 16 * 12 * SEQUENCE * 768.0
"""Of them those of attention's two products, without regard to the mask."""
PERPLEXITY = 23.944
RELATIVE_PERPLEXITIES = {
    "smooth": {"bf16-mixed": 0.9998, "fp8": 0.9995, "bf16-stochastic": 0.9992, "bf16-true": 1.008},
    "chance": {
        "tf32": 1.032,
        "bf16-mixed": 1.119,
        "fp16-mixed": 1.009,
        "fp8": 0.947,
        "bf16-stochastic": 1.142,
        "bf16-true": 1.077,
    },
}
"""Relative to fp32: after 9 steps of this model, and after 30 steps of 27 M parameters."""
EXPANDABLE_PEAK = 0.999
"""Of expandable segments, relative to the default allocator."""
PREDICTION_ERROR = {"none": 0.001, "block": 0.012, "model": 0.012}
PREDICTION_BOUNDS = {"none": 0.025, "block": 0.057, "model": 0.06}
"""Standard deviation of the error of a predicted peak, and the stated bounds, by compilation."""


def draw(*key: object) -> float:
    """Returns a draw from the standard normal distribution that belongs to the key."""
    return random.Random("|".join(map(str, key))).gauss(0.0, 1.0)


class DeviceTable:
    """What each configuration would measure on a card."""

    def __init__(
        self, card: Card, assumptions: Assumptions, *, perplexities: str = "smooth"
    ) -> None:
        self.card = card
        self.assumptions = assumptions
        self._perplexities = perplexities
        self._predicted = Predicted()
        self._space = load_space("default")
        self._unavailable = self._not_in_the_table()
        definition = self.definition(cap_bytes=card.memory_bytes)
        self.legal = definition.legal_space()
        self.baseline = definition.baseline_config()
        self.configs = list(dict.fromkeys(self.legal.configurations()))
        self.row = {config: row for row, config in enumerate(self.configs)}
        self._measure()

    def _not_in_the_table(self) -> dict[str, dict[str, str]]:
        """Returns what the card cannot do, and the space's values that were not predicted."""
        known = {name: self._predicted.values(name) for name in TECHNIQUES}
        known["precision"] |= {"tf32"}
        known["allocator"] = {"default", "expandable"}
        if "fp8" not in self.card.matrix_flops_per_second:
            known["precision"] -= {"fp8"}
        found = {}
        for name, values in self._space.choices().items():
            in_table = known.get(name, {getattr(TrainingConfig(), name)})
            found[name] = {
                str(value): "not in the table" for value in values if value not in in_table
            }
        return found

    def _measure(self) -> None:
        shapes = list(dict.fromkeys(map(Shape.of, self.configs)))
        index = {shape: position for position, shape in enumerate(shapes)}
        rows = numpy.array([index[Shape.of(config)] for config in self.configs])
        flops = self._predicted.work_of(self._predicted.flops, shapes)
        self.flops: Array = numpy.maximum(flops, MODEL_FLOPS)[rows]
        self.accessed_bytes: Array = self._predicted.work_of(
            self._predicted.accessed_bytes, shapes
        )[rows]
        is_expandable = numpy.array([config.allocator == "expandable" for config in self.configs])
        peaks = self._predicted.peak_of(shapes)[rows]
        self.peak_bytes: Array = peaks * numpy.where(is_expandable, EXPANDABLE_PEAK, 1.0)
        self.device_bytes: Array = self.peak_bytes + self.card.context_bytes
        self.step_seconds: Array = numpy.array([self._step_seconds(one) for one in self.configs])
        self.speed: Array = TOKENS / self.step_seconds
        self.perplexity: Array = numpy.array([self._perplexity(shape) for shape in shapes])[rows]
        self.baseline_speed = float(self.speed[self.row[self.baseline]])

    def definition(self, *, cap_bytes: int, seed: int = 0) -> StudyDefinition:
        """Returns a study of the table under a cap."""
        card = self.card
        device = DeviceInfo(
            device="cuda:0",
            name=card.name,
            total_memory_bytes=card.memory_bytes,
            versions={"python": "3.12.3", "torch": "2.11.0", "cuda": "13.0"},
            compute_capability=card.compute_capability,
            context_bytes=card.context_bytes,
            matrix_flops_per_second=card.matrix_flops_per_second,
            bandwidth_bytes_per_second=card.bandwidth_bytes_per_second,
        )
        return StudyDefinition(
            name=f"replay-{seed}",
            workload=workload(),
            space=self._space,
            device=device,
            unavailable=self._unavailable,
            cap_bytes=cap_bytes,
            seed=seed,
            sampler="ehvi",
        )

    # -- speed -------------------------------------------------------------------------------------

    def _step_seconds(self, config: TrainingConfig) -> float:
        assumed, subject = self.assumptions, config
        if not assumed.gains:
            subject = self._without_gain(config)
        device = self._device_seconds(subject)
        host = self._host_seconds(subject)
        together = (device**assumed.overlap + host**assumed.overlap) ** (1 / assumed.overlap)
        seconds = GLOBAL_BATCH // subject.micro_batch_size * together
        seconds += self._update_seconds(subject)
        return seconds * math.exp(self._residual(config))

    def _without_gain(self, config: TrainingConfig) -> TrainingConfig:
        """Returns the eager fp32 training that is as fast, where nothing else brings anything."""
        plain = replace(config, precision="fp32", compile="none", memory_budget=1.0)
        return plain if plain in self.row else replace(plain, checkpointing="none")

    def _device_seconds(self, config: TrainingConfig) -> float:
        """Returns for how long the device computes and moves a micro batch."""
        card, assumed, row = self.card, self.assumptions, self.row[config]
        kind = matrix_format(config.precision) or "fp32"
        rate = card.matrix_flops_per_second[kind] * assumed.linear_efficiency[kind]
        rate *= assumed.products_of_few_rows[config.micro_batch_size]
        of_attention = card.matrix_flops_per_second["bf16" if kind == "fp8" else kind]
        of_attention *= assumed.attention_efficiency[kind]
        # Of what is recomputed attention has its usual share, unless it is all of it or nothing.
        shares = {"attention": 1.0, "selective": 0.0}
        share = shares.get(config.checkpointing, ATTENTION_FLOPS / MODEL_FLOPS)
        recomputed = float(self.flops[row]) - MODEL_FLOPS
        attention = ATTENTION_FLOPS + share * recomputed
        linear = MODEL_FLOPS - ATTENTION_FLOPS + (1 - share) * recomputed
        bandwidth = card.bandwidth_bytes_per_second * assumed.bandwidth_efficiency[config.compile]
        seconds = linear / rate + attention / of_attention
        seconds += float(self.accessed_bytes[row]) / bandwidth
        seconds *= config.micro_batch_size * SEQUENCE
        if config.activation_offload == "cpu":
            on_device = self.row[replace(config, activation_offload="none")]
            moved = max(0.0, float(self.peak_bytes[on_device] - self.peak_bytes[row]))
            seconds += 2 * moved / card.host_link_bytes_per_second
        return seconds

    def _host_seconds(self, config: TrainingConfig) -> float:
        """Returns for how long the host launches the kernels of a micro batch."""
        assumed = self.assumptions
        if config.compile == "none":
            seconds = assumed.eager_host.get(config.precision, assumed.other_eager_host)
        else:
            seconds = assumed.compiled_host[config.compile]
            seconds *= assumed.compiled_fp8_host if config.precision == "fp8" else 1.0
        seconds *= assumed.checkpointing_host[config.checkpointing] * assumed.host_time
        seconds += assumed.chunked_loss_host if config.loss == "chunked" else 0.0
        return seconds * (assumed.offloaded_host if config.activation_offload == "cpu" else 1.0)

    def _update_seconds(self, config: TrainingConfig) -> float:
        """Returns what the host takes for the update beyond the device's time for its bytes."""
        assumed = self.assumptions
        host = assumed.update_host[config.optimizer_fusion]
        if config.precision == "bf16-stochastic":
            host += assumed.stochastic_update_host
        moved = PARAMETERS * assumed.update_bytes[config.optimizer_fusion]
        return max(0.0, host * assumed.host_time - moved / self.card.bandwidth_bytes_per_second)

    def _residual(self, config: TrainingConfig) -> float:
        """Returns the logarithm of what the roofline misses."""
        residual = self.assumptions.residual * draw("config", self.card.name, Shape.of(config).key)
        if (config.precision, config.compile) == ("fp32", "none"):  # which was measured
            return residual
        kind = config.precision, config.compile, config.checkpointing
        return residual + self.assumptions.residual_of_kind * draw("class", self.card.name, *kind)

    def _perplexity(self, shape: Shape) -> float:
        """Returns it, the same for all shapes that compute the same numbers."""
        kind = "eager"
        loss = []
        if shape.precision not in ("fp32", "tf32"):
            kind = "eager" if shape.compile == "none" else "compiled"
            loss = ["chunked"] if shape.loss == "chunked" else []
        spread = 0.0003
        if self._perplexities == "chance":
            spread = 0.0 if shape.precision in ("fp32", "tf32") else 0.015
        relative = RELATIVE_PERPLEXITIES[self._perplexities].get(shape.precision, 1.0)
        numerics = (shape.precision, "adamw", kind, *loss)
        return PERPLEXITY * relative * (1 + spread * draw("ppl", numerics))

    # -- what a search is judged by ----------------------------------------------------------------

    def objectives(self, config: TrainingConfig) -> tuple[float, float, float]:
        """Returns the bytes of the device, tokens per second and the perplexity."""
        row = self.row[config]
        return float(self.device_bytes[row]), float(self.speed[row]), float(self.perplexity[row])

    def optimum(self, cap_bytes: int) -> TrainingConfig:
        """Returns the fastest configuration under the cap."""
        within = numpy.flatnonzero(self.device_bytes <= cap_bytes)
        return self.configs[int(within[numpy.argmax(self.speed[within])])]

    def hypervolume(self, points: Sequence[tuple[float, float, float]], cap_bytes: int) -> float:
        """Returns the volume below the cap, half of the baseline's speed and the worst perplexity.

        The reference's perplexity is 1.01 times the worst.
        """
        return _hypervolume(
            numpy.array(points, dtype=float).reshape(-1, 3),
            memory=float(cap_bytes),
            speed=0.5 * self.baseline_speed,
            perplexity=1.01 * float(self.perplexity.max()),
        )

    @cache  # noqa: B019 - a table lives as long as the process
    def whole_hypervolume(self, cap_bytes: int) -> float:
        """Returns the hypervolume of all configurations."""
        columns = (self.device_bytes, self.speed, self.perplexity)
        return self.hypervolume(list(zip(*columns, strict=True)), cap_bytes)

    # -- what a search is told ---------------------------------------------------------------------

    def program(self, config: TrainingConfig) -> Shape | None:
        """Returns the same for configurations of which torch.compile makes the same code."""
        if config.compile == "none":
            return None
        shape = Shape.of(config)
        key = shape.as_counted.precision, shape.memory_budget
        return replace(
            shape,
            memory_budget=self._predicted.first_budgets.get(key, shape.memory_budget),
            loss=shape.loss if shape.compile == "model" else "full",
            optimizer_fusion="none",
        )

    def prediction(self, config: TrainingConfig) -> Prediction:
        """Returns what autotune would predict, with an error of its usual size."""
        row, program = self.row[config], self.program(config)
        error = PREDICTION_ERROR[config.compile] * draw(
            "pred", Shape.of(config).key, config.allocator
        )
        peak = float(self.peak_bytes[row]) * math.exp(error)
        bound = PREDICTION_BOUNDS[config.compile]
        narrow = config.precision in ("bf16-true", "bf16-stochastic")
        plan = hashlib.sha256(str(program).encode()).hexdigest()[:12]
        return Prediction(
            device="cuda",
            fake_device="cpu",
            peak_memory_bytes=int(peak),
            upper_bound_bytes=int(peak * (1 + bound)),
            lower_bound_bytes=int(peak * (1 - bound)),
            phase="backward",
            module="",
            operator="",
            bytes_by_category={"parameters": PARAMETERS * (2 if narrow else 4)},
            parameters=PARAMETERS,
            holders=(),
            plan=None if program is None else plan,
            flops_per_token=float(self.flops[row]),
            bytes_accessed_per_token=float(self.accessed_bytes[row]),
        )


def workload() -> Workload:
    """Returns autotune's default on a CUDA device."""
    return make_workload(
        "cuda",
        {
            "layers": 16,
            "width": 768,
            "heads": 12,
            "sequence_length": SEQUENCE,
            "global_batch": GLOBAL_BATCH,
            "steps": 60,
            "evaluation_sequences": 64,
            "text_sha256": "0" * 64,
        },
    )


def _hypervolume(points: Array, *, memory: float, speed: float, perplexity: float) -> float:
    """Returns the volume that points [bytes, speed, perplexity] dominate above a reference."""
    is_inside = (points[:, 0] < memory) & (points[:, 1] > speed) & (points[:, 2] < perplexity)
    points = points[is_inside]
    points = points[numpy.argsort(points[:, 0], kind="stable")]
    levels = [*numpy.unique(points[:, 2]).tolist(), perplexity]
    volume = 0.0
    for level, following in itertools.pairwise(levels):
        stairs = points[points[:, 2] <= level]
        widths = numpy.diff([*stairs[:, 0], memory])
        heights = numpy.maximum.accumulate(stairs[:, 1]) - speed
        volume += (following - level) * float(widths @ heights)
    return volume
