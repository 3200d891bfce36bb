"""A machine whose speeds have noise, and the plan of a confirmation driven on it to its end."""

import math
import random
from dataclasses import replace

from autotune.analysis.pick import Preferences
from autotune.spec.config import TrainingConfig
from autotune.spec.confirmation import PairedSpeed, SeedPerplexity
from autotune.study.confirmation.plan import TimeInTurn, TrainSeed, next_step
from tests.building.results import MIB, record

MOST_STEPS = 400
"""A plan that has not ended by then does not end."""


class Machine:
    """Trials with true speeds, each measured once with an error, and what is measured later."""

    def __init__(self, trials, *, alone=0.094, in_turn=0.03, seed=1):
        """`trials` are (configuration, MiB, true speed, perplexity); the first is the baseline."""
        self._noise = random.Random(seed)
        self._alone, self._in_turn = alone, in_turn
        self.baseline = trials[0][0]
        self.true_speed = {config: speed for config, _, speed, _ in trials}
        self.records = [
            record(
                number,
                config=config,
                memory=memory * MIB,
                speed=speed * self._factor(alone),
                perplexity=perplexity,
                seconds=10.0,
            )
            for number, (config, memory, speed, perplexity) in enumerate(trials)
        ]
        self.confirmations = []
        self.failing = set()
        """Configurations that train alone, but not in turn."""
        self.steps = []

    def _factor(self, deviation):
        return math.exp(self._noise.gauss(0.0, deviation))

    def change(self, number, **changes):
        self.records[number] = replace(self.records[number], **changes)

    def do(self, step):
        """Measure what a step says."""
        self.steps.append(step)
        if isinstance(step, TrainSeed):
            self.confirmations.append(
                SeedPerplexity(
                    config=step.record.config,
                    seed=step.seed,
                    perplexity=step.record.perplexity * self._factor(0.002),
                    seconds=10.0,
                )
            )
            return
        partner = step.partner.config
        level = self.true_speed[partner] * self._factor(self._alone)
        for subject in step.subjects:
            config = subject.config
            has_failed = config in self.failing or partner in self.failing
            ratio = self.true_speed[config] / self.true_speed[partner]
            self.confirmations.append(
                PairedSpeed(
                    config=config,
                    partner=partner,
                    schedule="in turn",
                    rounds=24,
                    speed_ratio=None if has_failed else ratio * self._factor(self._in_turn),
                    partner_tokens_per_second=None if has_failed else level,
                    failure="crashed" if has_failed else "",
                    seconds=2.0,
                )
            )

    def next_step(self, *, prefer="fastest", seeds=()):
        return next_step(
            self.records,
            self.confirmations,
            baseline=self.baseline,
            preferences=Preferences(prefer=prefer),
            seeds=seeds,
        )

    def confirm(self, *, most_steps=MOST_STEPS, **options):
        """Do what the plan says until it ends; raise AssertionError if it does not."""
        for _ in range(most_steps):
            step = self.next_step(**options)
            if step is None:
                return self
            self.do(step)
        assert most_steps < MOST_STEPS, "the plan does not end"
        return self

    @property
    def runs(self):
        return [step for step in self.steps if isinstance(step, TimeInTurn)]

    def subjects(self):
        """Returns the numbers of the subjects of each run."""
        return [[subject.number for subject in run.subjects] for run in self.runs]


CONFIGS = [
    TrainingConfig(micro_batch_size=size, checkpointing=checkpointing)
    for checkpointing in ("none", "block")
    for size in (64, 32, 16, 8, 4, 2, 1)
]


def typical(*, number=10, seed=1, **options):
    """Returns a machine on which less memory costs speed, with trials that are nearly equal."""
    draw = random.Random(seed)
    trials = [(CONFIGS[0], 400, 1000.0, 10.0)]
    for index in range(1, number):
        memory = 400 - 25 * index
        trials.append((CONFIGS[index], memory, 1100.0 - 20 * index + draw.uniform(0, 60), 10.0))
    return Machine(trials, seed=seed, **options)
