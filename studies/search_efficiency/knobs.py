"""What the table says of the techniques: `python studies/search_efficiency/knobs.py`.

Effects are those of matched pairs: two configurations that differ in one technique only.
Interactions are effects of one technique, told apart by the value of another. All ratios are
medians over the pairs, with their quartiles.
"""

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy

from autotune.spec.config import TrainingConfig
from autotune.study.sampler.ehvi import Point
from studies.search_efficiency.replay import CAPS, the_table

OBJECTIVES = ("memory", "speed", "perplexity")
PLAIN = {
    "precision": "fp32",
    "checkpointing": "none",
    "compile": "none",
    "memory_budget": 1.0,
    "optimizer_fusion": "foreach",
    "micro_batch_size": 8,
    "loss": "full",
}
IN_THE_README = (
    ("checkpointing block", "checkpointing", "block"),
    ("checkpointing sqrt", "checkpointing", "sqrt"),
    ("checkpointing every-2", "checkpointing", "every-2"),
    ("checkpointing selective", "checkpointing", "selective"),
    ("checkpointing attention", "checkpointing", "attention"),
    ("budget 0.5", "memory_budget", 0.5),
    ("budget 0.1", "memory_budget", 0.1),
    ("budget 0.0", "memory_budget", 0.0),
    ("bf16-mixed", "precision", "bf16-mixed"),
    ("bf16-true", "precision", "bf16-true"),
    ("bf16-stochastic", "precision", "bf16-stochastic"),
    ("compile block", "compile", "block"),
    ("micro-batch 2 of 8", "micro_batch_size", 2),
    ("step in backward", "optimizer_fusion", "backward"),
    ("fused update", "optimizer_fusion", "kernel"),
    ("loss in chunks", "loss", "chunked"),
)
"""Name, field and value of the techniques in the README's table, the first half on its left."""
Pair = tuple[TrainingConfig, TrainingConfig]


def points() -> dict[str, Point]:
    table = the_table()
    found = {name: table.point_of(config) for name, config in table.configs.items()}
    return {name: point for name, point in found.items() if point is not None}


def pairs(field: str, value: object) -> Iterator[Pair]:
    """Configurations with the technique's plain value and with `value`, all else equal."""
    known = points()
    for config in the_table().configs.values():
        if getattr(config, field) == value:
            plain = replace(config, **{field: PLAIN[field]})
            if plain.fingerprint in known and config.fingerprint in known:
                yield plain, config


def ratios(found: Sequence[Pair], objective: str) -> list[float]:
    known = points()
    return [
        getattr(known[changed.fingerprint], objective)
        / getattr(known[plain.fingerprint], objective)
        for plain, changed in found
    ]


def shown(values: Sequence[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:.3f}" if values else "-"
    lower, middle, upper = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.3f} ({lower:.3f} to {upper:.3f})"


def effects() -> None:
    print(
        "| technique | value | pairs | peak memory | speed | perplexity |\n"
        "|---|---|---|---|---|---|"
    )
    for field, plain in PLAIN.items():
        values = sorted(
            {getattr(config, field) for config in the_table().configs.values()}, key=str
        )
        for value in (value for value in values if value != plain):
            found = list(pairs(field, value))
            if found:
                cells = " | ".join(shown(ratios(found, objective)) for objective in OBJECTIVES)
                print(f"| {field} | {value} | {len(found)} | {cells} |")


def table_of_the_readme() -> None:
    """Prints only the medians, two techniques per line."""
    print(
        "| technique | peak memory | speed | | technique | peak memory | speed |\n"
        "|---|---|---|---|---|---|---|"
    )
    cells = []
    for name, field, value in IN_THE_README:
        found = list(pairs(field, value))
        memory, speed = (
            statistics.median(ratios(found, objective)) for objective in ("memory", "speed")
        )
        cells.append(f"{name} | {memory:.2f} | {speed:.2f}")
    half = len(cells) // 2
    for left, right in zip(cells[:half], cells[half:], strict=True):
        print(f"| {left} | | {right} |")


def explained() -> None:
    """How much of the variance of the logarithms techniques alone explain, and pairs of them."""
    known = points()
    configs = [config for config in the_table().configs.values() if config.fingerprint in known]
    print("| objective | techniques alone | with pairs |\n|---|---|---|")
    for objective in OBJECTIVES:
        values = numpy.log([getattr(known[config.fingerprint], objective) for config in configs])
        alone, with_pairs = (
            _share(design(configs, with_pairs=pair), values) for pair in (False, True)
        )
        print(f"| {objective} | {100 * alone:.1f} % | {100 * with_pairs:.1f} % |")


def design(configs: Sequence[TrainingConfig], *, with_pairs: bool) -> numpy.ndarray:
    columns = [numpy.ones(len(configs))]
    singles = defaultdict(list)
    for field in PLAIN:
        for value in sorted({getattr(config, field) for config in configs}, key=str)[1:]:
            singles[field].append(
                numpy.array([float(getattr(config, field) == value) for config in configs])
            )
    columns += [column for group in singles.values() for column in group]
    if with_pairs:
        for one, other in itertools.combinations(singles.values(), 2):
            columns += [a * b for a in one for b in other]
    return numpy.stack(columns, axis=1)


def _share(columns: numpy.ndarray, values: numpy.ndarray) -> float:
    fitted = columns @ numpy.linalg.lstsq(columns, values, rcond=None)[0]
    return 1 - float(((values - fitted) ** 2).sum() / ((values - values.mean()) ** 2).sum())


def interaction(
    field: str, value: object, *, by: str, only: Callable[[TrainingConfig], bool] = lambda _: True
) -> None:
    groups: dict[object, list[Pair]] = defaultdict(list)
    for plain, changed in pairs(field, value):
        if only(changed):
            groups[getattr(changed, by)].append((plain, changed))
    for other, found in groups.items():
        cells = " | ".join(shown(ratios(found, objective)) for objective in OBJECTIVES[:2])
        print(f"| {field} {value} | {by} {other} | {len(found)} | {cells} |")


def plateaus() -> None:
    table = the_table()
    groups: dict[tuple[object, ...], dict[str, list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for name, config in table.configs.items():
        is_plain = (config.checkpointing, config.loss, config.optimizer_fusion) == (
            "none",
            "full",
            "kernel",
        )
        if config.compile != "none" and is_plain:
            key = config.precision, config.compile, config.micro_batch_size
            groups[key][table.program(config) or name].append(config.memory_budget)
    for key, programs in groups.items():
        if sum(map(len, programs.values())) > 1:
            texts = [
                _range(budgets) for budgets in sorted(programs.values(), key=max, reverse=True)
            ]
            print(
                f"- {key[0]}, compile {key[1]}, micro-batch {key[2]}: "
                f"{len(texts)} programs: {'; '.join(texts)}"
            )


def _range(budgets: list[float]) -> str:
    return f"{max(budgets)} to {min(budgets)}" if len(budgets) > 1 else f"{budgets[0]}"


def recipe(length: int = 8) -> None:
    """Prints a greedy choice of configurations that together reach most under the three caps."""
    table, known = the_table(), points()
    chosen: list[TrainingConfig] = []
    for _ in range(length):
        best = max(
            (config for config in table.configs.values() if config not in chosen),
            key=lambda config: _mean_share([*chosen, config], known),
        )
        chosen.append(best)
        print(f"{len(chosen)}. {best.describe()}: {100 * _mean_share(chosen, known):.1f} %")


def _mean_share(configs: Sequence[TrainingConfig], known: dict[str, Point]) -> float:
    shares = []
    for share in CAPS.values():
        cap = the_table().cap_bytes(share)
        within = [
            known[config.fingerprint]
            for config in configs
            if known[config.fingerprint].memory <= cap
        ]
        shares.append(the_table().hypervolume_of(within, cap_bytes=cap))
    return statistics.fmean(shares)


def noise() -> None:
    """Prints, from repeats, the standard deviation of log speed and whether peaks differ."""
    table = the_table()
    alone, peaks = [], 0
    for name, repeats in table.repeats.items():
        trainings = [table.alone[name], *repeats]
        alone.append(_deviation([one.measurement.tokens_per_second or 1.0 for one in trainings]))
        peaks += len({one.measurement.peak_memory_bytes for one in trainings}) > 1
    in_turn = [_deviation(ratios) for ratios in table.ratios.values() if len(ratios) > 1]
    for what, found in (("alone", alone), ("in turn with the baseline", in_turn)):
        print(
            f"- speed measured {what}: standard deviation {100 * statistics.median(found):.1f} % "
            f"in the median, {100 * max(found):.1f} % at most, of {len(found)} configurations"
        )
    print(f"- {peaks} of {len(alone)} configurations with more than one peak memory")


def _deviation(values: Sequence[float]) -> float:
    return statistics.stdev(math.log(value) for value in values)


def main() -> None:
    print("## Noise\n")
    noise()
    print("\n## The table of the README\n")
    table_of_the_readme()
    print("\n## Effects, as ratios to the plain value\n")
    effects()
    print("\n## Variance explained\n")
    explained()
    print("\n## Interactions\n")
    print("| change | where | pairs | peak memory | speed |\n|---|---|---|---|---|")
    interaction(
        "optimizer_fusion",
        "backward",
        by="checkpointing",
        only=lambda config: config.compile == "none",
    )
    interaction("optimizer_fusion", "backward", by="compile")
    interaction("checkpointing", "block", by="compile")
    interaction(
        "micro_batch_size", 2, by="checkpointing", only=lambda config: config.compile == "none"
    )
    interaction("loss", "chunked", by="checkpointing", only=lambda config: config.compile == "none")
    print("\n## Memory budgets that are one program\n")
    plateaus()
    print("\n## The best recipe of eight\n")
    recipe()


if __name__ == "__main__":
    main()
