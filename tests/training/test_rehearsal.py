"""The first steps of a script show, before any trial, what its training loop does not support."""

import dataclasses

import pytest

from autotune.execution.local import LocalExecutor
from autotune.spec.search_space import DIVISORS
from autotune.spec.space_file import load_space
from autotune.spec.workload import make_workload
from autotune.study.opening.new_study import new_definition
from autotune.study.request import SearchRequest
from tests.training.test_script import SCRIPT

CLIPS = "the script clips gradients"
CHANGES = "the script changes gradients between backward and the optimizer's step"
ADDS = "the script calls backward more than once before its optimizer steps"
HOOKS = "the script registers a hook that runs before the optimizer's step"
NEEDS = "the script fails where gradients are freed during backward: AttributeError: 'NoneType'"
SCALED = "for p in model.parameters(): p.grad"


@pytest.fixture(scope="module")
def executor(tmp_path_factory, one_trial_server):
    with LocalExecutor(tmp_path_factory.mktemp("work")) as executor:
        yield executor


@pytest.fixture
def rehearse(executor, tmp_path):
    """rehearse("line") is the reason for a script with that line before its optimizer steps."""

    def run(line, *, micro_batch_size=4):
        file = tmp_path / "train.py"
        text = SCRIPT.replace("STEPS", "5").replace("AFTER", "")
        file.write_text(text.replace("    optimizer.step()", f"    {line}\n    optimizer.step()"))
        workload = make_workload("cpu", {"script": str(file), "global_batch": 4})
        return executor.rehearse(workload, micro_batch_size=micro_batch_size, device="cpu")

    return run


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)", CLIPS),
        (f"{SCALED}.mul_(0.5)", CHANGES),
        (f"{SCALED} = p.grad / 2", CHANGES),
        (f"{SCALED}.data.clamp_(-1e-6, 1e-6)", CHANGES),
        (f"{SCALED}.mul_((1.0 / p.grad.norm()).clamp(max=1.0))", CHANGES),
        ("F.cross_entropy(model(tokens)[0], tokens[0]).backward()", ADDS),
        ("print(sum(p.grad.norm() for p in model.parameters()))", NEEDS),
        ("optimizer.register_step_pre_hook(lambda *_: None)", HOOKS),
        ("optimizer.grad_scale = torch.tensor(2.0)", CHANGES),
    ],
    ids=[
        "torch",
        "scale",
        "another",
        "data",
        "own clipping",
        "two backwards",
        "norm by itself",
        "hook",
        "scale of a fused update",
    ],
)
def test_what_a_step_in_backward_would_break_is_named(line, reason, rehearse):
    assert rehearse(line).startswith(reason)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("", "the script calls its model once in a step, where 4 sequences in micro batches of 1"),
        ("part = autotune.current_config().micro_batch_size", "the script calls its model once"),
        ("for part in tokens.split(autotune.current_config().micro_batch_size): model(part)", ""),
        ("raise ValueError('its own fault')", ""),
    ],
    ids=["never asks", "asks only", "uses it", "fails"],
)
def test_a_micro_batch_that_the_script_ignores_is_named(line, reason, rehearse):
    found = rehearse(line, micro_batch_size=1)
    assert found.startswith(reason)
    assert bool(found) == bool(reason)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "torch.nn.utils.clip_grad_norm_(model.parameters(), float('inf'))",
        "norm = sum(p.grad.norm() for p in model.parameters() if p.grad is not None)",
        "raise ValueError('its own fault')",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    ],
    ids=["plain", "norm by torch", "careful norm", "fails", "is killed"],
)
def test_a_script_that_leaves_gradients_alone_or_fails_by_itself_has_no_reason(line, rehearse):
    assert rehearse(line) == ""


def test_clipping_by_accelerate_is_recognised(rehearse):
    pytest.importorskip("accelerate")
    line = "Accelerator(cpu=True).clip_grad_norm_(model.parameters(), 1.0)"
    assert rehearse(f"from accelerate import Accelerator; {line}").startswith(CLIPS)


def test_a_search_excludes_the_step_in_backward_of_a_script_that_clips(executor, tmp_path):
    file = tmp_path / "train.py"
    text = SCRIPT.replace("STEPS", "5").replace("AFTER", "")
    scaled = f"    {SCALED}.mul_(0.5)\n    optimizer.step()"
    file.write_text(text.replace("    optimizer.step()", scaled))
    request = SearchRequest(
        name="clips", space="quick", device="cpu", workload={"script": str(file), "global_batch": 4}
    )
    events = []
    techniques = {"optimizer_fusion": ("none", "backward"), "micro_batch_size": DIVISORS}
    space = dataclasses.replace(
        load_space("quick"), techniques=techniques, conditions=(), configurations=()
    )
    new = new_definition(
        request,
        space=space,
        executor=executor,
        work=tmp_path,
        listener=events.append,
    )
    new.discard()
    assert new.definition.unavailable["optimizer_fusion"]["backward"].startswith(CHANGES)
    assert set(new.definition.unavailable["micro_batch_size"]) == {"1", "2"}  # it ignores them
    excluded = new.definition.legal_space().excluded
    assert any("optimizer_fusion backward: the script changes" in line for line in excluded)
    assert any("trying two steps" in event.what for event in events)
