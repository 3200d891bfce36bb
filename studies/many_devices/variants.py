"""Replays variants of how the next trial is chosen while others run, on 8 devices.

    OMP_NUM_THREADS=1 python studies/many_devices/variants.py           # 10 minutes
    OMP_NUM_THREADS=1 python studies/many_devices/variants.py --only "as it is;mean"

Prints for each variant the trials and seconds until 99 % of the hypervolume under each cap, mean of
the seeds, and their sums over the caps.
"""

import argparse
import statistics
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from autotune.study.sampler import ehvi_sampler
from studies.many_devices.replay import run
from studies.search_efficiency.replay import CAPS
from studies.search_efficiency.table import TABLES

DEVICES, FIRST_TRIALS = 8, 16


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What differs from the search as it is."""

    optimism: float = ehvi_sampler.OPTIMISM
    value_while_compiling: float = ehvi_sampler.VALUE_WHILE_COMPILING
    devices_at_first: int = DEVICES
    """How many devices are used until FIRST_TRIALS trials have ended."""
    devices_later: int = DEVICES

    def run(self, cap: str, *, seed: int, table_name: str) -> dict[str, Any]:
        """Searches until 99 % of the hypervolume are found."""
        with (
            patch.object(ehvi_sampler, "OPTIMISM", self.optimism),
            patch.object(ehvi_sampler, "VALUE_WHILE_COMPILING", self.value_while_compiling),
        ):
            return run(cap, devices=DEVICES, seed=seed, table_name=table_name, usable=self._usable)

    def _usable(self, ended: int) -> int:
        return self.devices_at_first if ended < FIRST_TRIALS else self.devices_later


VARIANTS = {
    "as it is": Variant(),
    "no discount": Variant(value_while_compiling=1.0),
    "half a deviation": Variant(optimism=0.5),
    "mean": Variant(optimism=0.0),
    "mean, discount 0.5": Variant(optimism=0.0, value_while_compiling=0.5),
    "mean, discount 0.01": Variant(optimism=0.0, value_while_compiling=0.01),
    "mean, no discount": Variant(optimism=0.0, value_while_compiling=1.0),
    "first 8 devices": Variant(optimism=0.0, value_while_compiling=1.0, devices_later=1),
    "first 1 device": Variant(optimism=0.0, value_while_compiling=1.0, devices_at_first=1),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", choices=TABLES, default="gpt")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--only", default=";".join(VARIANTS), help="names, with ; between them")
    arguments = parser.parse_args()
    print(f"| variant | {' | '.join(CAPS)} | together |")
    print("|---|" + "---|" * (len(CAPS) + 1))
    for name in arguments.only.split(";"):
        cells, trials, seconds = [], 0.0, 0.0
        for cap in CAPS:
            runs = [
                VARIANTS[name].run(cap, seed=seed, table_name=arguments.table)
                for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds)
            ]
            mean_trials = statistics.fmean(one["trials"] for one in runs)
            mean_seconds = statistics.fmean(one["seconds"] for one in runs)
            trials, seconds = trials + mean_trials, seconds + mean_seconds
            cells.append(f"{mean_trials:.1f}, {mean_seconds:.0f} s")
        print(f"| {name} | {' | '.join(cells)} | {trials:.0f}, {seconds:.0f} s |", flush=True)


if __name__ == "__main__":
    main()
