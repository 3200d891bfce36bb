"""A study with every kind of result, predictions, attempts in every state, and confirmations."""

import sys

from autotune.cli import main
from autotune.spec.confirmation import (
    InitialPerplexity,
    PairedSpeed,
    RepeatedSpeed,
    SeedPerplexity,
    VariantMeasurement,
    new_confirmation_id,
)
from autotune.spec.prediction import Forecast
from tests.building.studies import config, definition, keep, measured, open_store
from tests.building.views import predicted

TRIALS = 6

CONFIRMATIONS = (
    PairedSpeed(
        config=config(1),
        partner=config(0),
        schedule="in turn",
        rounds=8,
        speed_ratio=1.02,
        partner_tokens_per_second=990.0,
        seconds=12.5,
    ),
    PairedSpeed(
        config=config(2),
        partner=config(0),
        schedule="in blocks",
        rounds=0,
        speed_ratio=None,
        partner_tokens_per_second=None,
        failure="out_of_memory: not enough",
        seconds=2.0,
    ),
    RepeatedSpeed(config=config(0), tokens_per_second=980.0, seconds=5.0),
    SeedPerplexity(config=config(2), seed=8, perplexity=21.5, seconds=30.0),
    InitialPerplexity(config=config(0), perplexity=250.0, seconds=4.0),
    VariantMeasurement(config=config(6), measurement=measured(parity="same"), seconds=6.0),
)
"""One of each kind, and one without a speed."""


def write_whole_study(url, *, name="by-hand", running=True):
    """Trial 0 has a result, 1 after a retry, 2 and a late one; 3 stopped, 4 failed, 5 running."""
    with open_store(url) as store:
        store.create_study(definition(name), trials_wanted=TRIALS)
        for number in range(3):
            store.store_forecast(
                name, Forecast(config=config(number), prediction=predicted(peak=10**7 + number))
            )
        store.store_forecast(name, Forecast(config=config(3), error="no fake kernel"))
        keep(store, config(0), measured(), study=name, name="baseline")
        for number, state in ((1, "lost"), (2, "given_up"), (4, "given_back")):
            attempt = keep(store, config(number), study=name)
            store.attempts.end(attempt.id, state, cause="because")
            if number == 2:
                store.attempts.finish(attempt.id, measured(perplexity=99.0), seconds=9.0)
        for number in (1, 2):
            keep(
                store,
                config(number),
                measured(perplexity=20.0 + number),
                study=name,
                seconds=number + 0.25,
            )
        keep(
            store,
            config(3),
            measured(outcome="crashed", message="it ended", perplexity=None),
            study=name,
        )
        for confirmation in CONFIRMATIONS:
            store.add_confirmation(name, confirmation, confirmation_id=new_confirmation_id())
        if running:
            keep(store, config(5), study=name)


def run_command(monkeypatch, capsys, *arguments):
    """Run the command in this process; return its exit code, stdout and stderr."""
    monkeypatch.setattr(sys, "argv", ["autotune", *arguments])
    capsys.readouterr()
    try:
        main()
    except SystemExit as ended:
        return ended.code, *capsys.readouterr()
    raise AssertionError("a command ends the process")
