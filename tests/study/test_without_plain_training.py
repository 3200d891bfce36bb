"""What is compared where the plain training fails, or has no room: real models, all techniques."""

import json
from dataclasses import replace

import pytest

from autotune.execution.local import LocalExecutor
from autotune.execution.prepared_folder import PREPARED
from autotune.execution.server.limits import time_limits
from autotune.execution.tasks import Prepare, Trace
from autotune.spec.config import CHOICES, LegalityContext, TrainingConfig, rule_violations
from autotune.spec.parity import NoTrace
from autotune.spec.user_code import sha256_of
from autotune.spec.workload import make_workload
from autotune.study.running.parity_gate import ParityGate, plain_form
from autotune.study.running.trial_runner import at_depth
from tests.building.flows import AtOnce, as_flow
from tests.building.studies import definition

MODEL = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, width), {down}

    def forward(self, x):
        {forward}


class Model(nn.Module):
    def __init__(self, layers, width, vocab_size):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(layers)])
        self.head = nn.Linear(width, vocab_size)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make(layers, width, vocab_size):
    return Model(layers, width, vocab_size)
"""
RIGHT = {"down": "nn.Linear(width, width)", "forward": "return x + self.down(self.up(x).tanh())"}
FAILING = {
    "changes an activation in place": {
        "forward": "y = self.up(x).tanh(); z = self.down(y); y += 1.0; return x + z + y",
    },
    "changes its input in place": {"forward": "y = self.up(x).exp(); x += y; y.mul_(2); return x"},
    "fails in its backward pass": {
        "forward": "y = self.up(x); y.requires_grad and y.register_hook(lambda g: 1 / 0); return y",
    },
}
SIZES = {
    "width": 32,
    "sequence_length": 32,
    "global_batch": 2,
    "steps": 9,
    "warmup_steps": 2,
    "evaluation_sequences": 2,
}
HUGGING_FACE = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "vocab_size": 256,
}
TECHNIQUES = [
    {technique: value}
    for technique in ("checkpointing", "optimizer_fusion", "loss", "compile", "precision")
    for value in CHOICES[technique]
]


def configurations():
    """Each technique alone, as far as it is legal."""
    for choice in TECHNIQUES:
        config = TrainingConfig(micro_batch_size=2, **choice)
        is_plain = config == plain_form(config, micro_batch_size=2)
        if not is_plain and not rule_violations(config.to_dict(), LegalityContext(global_batch=2)):
            yield config


@pytest.fixture(scope="module")
def gate_of(tmp_path_factory, one_trial_server):
    """gate_of(workload) is the gate of a study of it; with `why`, the plain training has no trace.

    A real lack of memory would need a large model.
    """
    folder = tmp_path_factory.mktemp("models")
    with LocalExecutor(folder) as executor:

        def make(workload, *, why=None):
            study = definition(workload=workload, cap_bytes=2**34)
            name = str(len(list(folder.iterdir())))
            study_folder = folder / name
            executor.run(Prepare(workload=workload, folder=study_folder / PREPARED))

            def trace(config, *, dropout, dequantized, layers):
                if why is not None and layers is None:
                    return why
                training = executor.training(
                    study,
                    config,
                    study_folder=study_folder,
                    enforce_cap=False,
                    workload=workload if layers is None else at_depth(workload, layers),
                )
                training = replace(training, dequantized=dequantized)
                limits = time_limits(300.0)
                return executor.run(Trace(training=training, dropout=dropout), limits=limits)

            gate = ParityGate(
                as_flow(trace),
                folder=study_folder / "parity",
                on_trace=lambda config: None,
                any_micro_batch=False,
                has_layers=True,
            )
            return AtOnce(gate)

        yield make


def small_workload(folder, **settings):
    (folder / "text.txt").write_text("Plain training is what others are compared with. " * 400)
    return make_workload("cpu", {**SIZES, "dataset": str(folder / "text.txt"), **settings})


def workload_of(folder, changes):
    file = folder / "mine.py"
    text = MODEL
    for name, code in {**RIGHT, **changes}.items():
        text = text.replace("{" + name + "}", code)
    file.write_text(text)
    return small_workload(folder, model=f"{file}:make", model_sha256=sha256_of(file), layers=3)


@pytest.mark.parametrize("changes", FAILING.values(), ids=FAILING)
def test_where_plain_training_fails_nothing_else_can_be_picked(changes, gate_of, tmp_path):
    gate = gate_of(workload_of(tmp_path, changes))
    for config in configurations():
        verdict = gate.check(config)
        assert verdict.kind == "unknowable", config.describe()
        assert "Error: " in verdict.message


NO_ROOM = NoTrace(outcome="out_of_memory", message="out of device memory")


def test_two_blocks_of_a_model_are_compared_where_the_whole_has_no_room(gate_of, tmp_path):
    gate = gate_of(workload_of(tmp_path, {}), why=NO_ROOM)
    config = TrainingConfig(checkpointing="block", micro_batch_size=2)
    assert gate.check(config).kind == "same at two blocks"


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt", "deep-one", "hugging face", "with random numbers"])
def test_every_kind_of_model_can_be_compared_at_two_blocks(model, gate_of, tmp_path):
    if model == "with random numbers":
        down = "nn.Sequential(nn.Linear(width, width), nn.Dropout(0.5))"
        workload = workload_of(tmp_path, {"down": down})
    elif model == "hugging face":
        (tmp_path / "config.json").write_text(json.dumps(HUGGING_FACE))
        workload = small_workload(tmp_path, model=str(tmp_path / "config.json"), width=None)
    else:
        workload = small_workload(tmp_path, model=model, layers=4, heads=2)
    gate = gate_of(workload, why=NO_ROOM)
    for checkpointing in ("block", "sqrt", "every-2"):
        config = TrainingConfig(checkpointing=checkpointing, micro_batch_size=2)
        verdict = gate.check(config)
        assert verdict.kind == "same at two blocks", (config.describe(), verdict)
