"""Runs a script in a process of its own, with or without what makes its trainer searched."""

import multiprocessing
import os
import runpy
import sys
import traceback
from dataclasses import dataclass, field, replace

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from autotune.errors import InvalidInput
from autotune.spec.config import TrainingConfig
from autotune.spec.workload import make_workload
from autotune.techniques.user_training import apply_to_user_training
from autotune.training.script import interface
from autotune.training.script.run import ScriptEnd, run_script, seed_everything


@dataclass
class Trained:
    weights: list = field(default_factory=list)
    """Sum of the absolute weights after each update."""
    losses: list = field(default_factory=list)
    tokens: list = field(default_factory=list)
    global_batch: int | None = None
    injected: str = ""
    whole_batches: str = ""
    own_choices: dict = field(default_factory=dict)
    error: str = ""


class _Run:
    """A trial that records what is reported, and learns of the script."""

    def __init__(self, script, trained, *, micro_batch, steps, config):
        self.workload = make_workload("cpu", {"script": script, "steps": 12, "global_batch": 8})
        self.config = TrainingConfig(micro_batch_size=micro_batch or 8, **config)
        self._micro_batch, self._trained, self._steps = micro_batch, trained, steps

    def apply(self, model, optimizer):
        return apply_to_user_training(self.config, model, optimizer)

    def report(self, *, tokens, rows, loss, evaluation_loss):
        self._trained.losses.append(float(loss))
        self._trained.tokens.append(rows if tokens is None else tokens)
        if len(self._trained.losses) == self._steps:
            raise ScriptEnd

    def learn_global_batch(self, sequences):
        self._trained.global_batch = sequences
        self.workload = replace(self.workload, global_batch=sequences)
        self.config = replace(self.config, micro_batch_size=self._micro_batch or sequences)

    def note_injected(self, what, *, is_checked_until_update=False):
        self._trained.injected = what

    def note_own_choices(self, **choices):
        self._trained.own_choices.update(choices)

    def note_unknown_global_batch(self, reason):
        raise InvalidInput(reason)

    def note_whole_batches(self, reason):
        self._trained.whole_batches = reason


def trained(folder, script, *, micro_batch, steps=8, **config):
    """Returns how the text of a script trains; with `micro_batch` 0 as without autotune."""
    file = folder / "train.py"
    file.write_text(script)
    ours, theirs = multiprocessing.get_context("fork").Pipe()
    process = multiprocessing.get_context("fork").Process(
        target=_train, args=(theirs, str(file), micro_batch, steps, config)
    )
    process.start()
    theirs.close()
    result = ours.recv()
    process.join()
    return result


def _train(pipe, file, micro_batch, steps, config):
    os.chdir(os.path.dirname(file))
    torch.set_num_threads(1)
    result = Trained()

    def note(optimizer, *_):
        groups = [one for group in optimizer.param_groups for one in group["params"]]
        result.weights.append(sum(float(one.detach().double().abs().sum()) for one in groups))
        if micro_batch == 0 and len(result.weights) == steps:
            raise ScriptEnd

    register_optimizer_step_post_hook(note)
    seed_everything(0)
    try:
        if micro_batch == 0:
            sys.path.insert(0, os.path.dirname(file))
            runpy.run_path(file, run_name="__main__")
        else:
            run = _Run(file, result, micro_batch=micro_batch, steps=steps, config=config)
            interface.begin(run, learner=run)
            run_script(run.workload, expected_sha256="")
    except ScriptEnd:
        pass
    except InvalidInput as error:
        result.error = f"{error.message} ({error.hint})"
    except BaseException:
        result.error = traceback.format_exc()
    pipe.send(result)
    pipe.close()
    os._exit(0)
