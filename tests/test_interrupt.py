"""Ctrl-C, and the stop button of a notebook, which interrupts the whole group of processes."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from autotune.system.interrupt import noted_interrupt

ROOT = Path(__file__).resolve().parents[1]
SEARCH = """
import os, signal
import autotune
from autotune.study.events import TrialBegan, TrialEnded

open("small.toml", "w").write('''
[techniques]
checkpointing = ["none", "block"]
micro_batch_size = "divisors"
[workload]
layers = 2
width = 32
heads = 2
sequence_length = 32
global_batch = 4
steps = 9
warmup_steps = 2
evaluation_sequences = 4
''')
ended = []

def listener(event):
    if isinstance(event, TrialEnded):
        ended.append(event.record.number)
    if isinstance(event, TrialBegan) and event.number == 2:
        os.killpg(0, signal.SIGINT)

settings = dict(name="small", space="small.toml", max_mem="64MiB", trials=4, sampler="random")
settings["confirm"] = False
try:
    autotune.search(**settings, listener=listener)
except KeyboardInterrupt as error:
    print("interrupted:", error)
finished = {trial.number for trial in autotune.show("small").trials if trial.is_finished}
print(finished == set(ended) == {0, 1})
print(len(autotune.search(**settings).front) > 0, len(autotune.show("small").trials))
print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
"""


@pytest.mark.slow
def test_an_interrupted_search_loses_no_trial_and_the_same_call_goes_on(tmp_path):
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SEARCH)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        start_new_session=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == [
        "interrupted: the search was stopped; every finished trial is stored, "
        "and the same call continues",
        "True",
        "True 4",
        "True",
    ]


def test_the_second_interrupt_is_raised_at_once():
    # A shell has a program in the background ignore the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with noted_interrupt() as is_interrupted:
            signal.raise_signal(signal.SIGINT)
            assert is_interrupted()
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_program_that_handles_the_signal_itself_keeps_its_handler():
    received = []
    before = signal.signal(signal.SIGINT, lambda *_: received.append(1))
    try:
        with noted_interrupt() as is_interrupted:
            signal.raise_signal(signal.SIGINT)
            assert (received, is_interrupted()) == ([1], False)
    finally:
        signal.signal(signal.SIGINT, before)


def test_another_thread_than_the_main_one_sets_no_handler():
    seen = []

    def in_thread():
        with noted_interrupt() as is_interrupted:
            seen.append((signal.getsignal(signal.SIGINT), is_interrupted()))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=in_thread)
    thread.start()
    thread.join()
    assert seen == [(before, False)]
