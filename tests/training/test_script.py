"""A user's training script as a trial: three added lines; without a search it is unchanged."""

import dataclasses
import json
import math
import os
import random
import subprocess
import sys
import textwrap
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import get_args

import numpy
import pytest
import torch
from torch import nn

import autotune
from autotune.errors import (
    IllegalConfiguration,
    InvalidInput,
    PredictionImpossible,
    StudyMismatch,
)
from autotune.execution.process.device import all_devices
from autotune.execution.tasks import Examine, Predict, Train
from autotune.shipped.changed_method import Changed
from autotune.shipped.promise import COMPARED_UP_TO
from autotune.spec.config import TrainingConfig
from autotune.spec.early_stopping import PruningBound
from autotune.spec.optimizers import Optimizer
from autotune.spec.prediction import PredictionRequest
from autotune.spec.reading import parse
from autotune.spec.result import Measurement
from autotune.spec.training_request import TrainingRequest
from autotune.spec.workload import make_workload
from autotune.techniques.user_training import apply_to_user_training, missing_in_user_model
from autotune.training.script.run import seed_everything

EXAMPLE = Path(__file__).resolve().parents[2] / "studies" / "your_script" / "train.py"
SCRIPT = textwrap.dedent("""
    import sys
    import torch, autotune
    import torch.nn.functional as F
    from torch import nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
        def forward(self, x):
            return x + self.down(self.up(x).relu())

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(256, 64), nn.Linear(64, 256)
            self.blocks = nn.ModuleList(Block() for _ in range(4))
        def forward(self, tokens):
            x = self.embedding(tokens)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    torch.manual_seed(0)
    model = Model()
    model, optimizer = autotune.apply(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    tokens = torch.arange(4 * 33).view(4, 33) % 256
    for step in range(STEPS):
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        autotune.report(tokens=128, loss=loss)
    AFTER
""")
BYTES = (256 * 64 + 64 * 256 + 256 + 4 * (2 * 64 * 256 + 256 + 64)) * 4
"""Of its parameters."""


@pytest.fixture
def script(tmp_path):
    """script(steps=100, after="") is the path of a script that trains that many steps."""

    def write(*, steps=100, after=""):
        file = tmp_path / "train.py"
        file.write_text(SCRIPT.replace("STEPS", str(steps)).replace("AFTER", after))
        return file

    return write


def source_of(found):
    return str(parse(Measurement, found).perplexity_source)


@pytest.fixture
def trial_of(server, tmp_path):
    """trial_of(script, checkpointing="block") measures one trial in a separate process."""

    def run(
        file,
        *,
        cap_bytes=2**40,
        steps=12,
        seed=0,
        shares_perplexity=False,
        pruning_bounds=(),
        device="cpu",
        is_baseline=False,
        **choices,
    ):
        uuid = None if device == "cpu" else all_devices()[0].uuid
        settings = {"script": str(file), "global_batch": 4, "steps": steps, "seed": seed}
        workload = make_workload("cpu", settings)
        training = TrainingRequest(
            workload=workload,
            config=TrainingConfig(micro_batch_size=4, **choices),
            folder=tmp_path,
            device=device,
            device_uuid=uuid,
            cap_bytes=cap_bytes,
            shares_perplexity=shares_perplexity,
            pruning_bounds=pruning_bounds,
            is_baseline=is_baseline,
        )
        future = server.submit(Train(training=training), log_file=tmp_path / "trial.log")
        return asdict(future.result(timeout=120).measurement)

    return run


@pytest.fixture
def examine(server, tmp_path):
    def run(file, **choices):
        workload = make_workload("cpu", {"script": str(file), "global_batch": 4})
        task = Examine(workload=workload, choices=choices, device="cpu")
        future = server.submit(task, log_file=tmp_path / "examine.log")
        return future.result(timeout=120).unavailable

    return run


# -- as a trial ------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_on_cuda_nothing_waits_for_the_device_between_timed_steps(script, trial_of):
    """A transfer that waits during a timed step, such as that of the loss, is an error."""
    file = script()
    text = file.read_text().replace("Model()", "Model().cuda()").replace("% 256", "% 256).cuda()")
    text = text.replace("tokens = torch", "tokens = (torch")
    text = text.replace(
        "    autotune.report(",
        "    if step == 7: torch.cuda.set_sync_debug_mode('error')\n    autotune.report(",
    )
    file.write_text(text)
    found = trial_of(file, device="cuda:0")
    assert (found["outcome"], found["message"]) == ("ok", "")
    assert found["tokens_per_second"] > 0


def test_it_is_ended_after_the_workloads_steps_and_measured(script, trial_of):
    found = trial_of(script())
    assert (found["outcome"], source_of(found)) == (
        "ok",
        "training loss of the last 3 steps",
    )
    assert found["tokens_per_second"] > 0
    assert found["bytes_by_kind"]["parameters"] == BYTES
    assert 4 * BYTES < found["peak_memory_bytes"] < 6 * BYTES


def test_techniques_change_the_scripts_memory_but_not_its_loss(script, trial_of):
    plain, fused = (
        trial_of(script()),
        trial_of(script(), checkpointing="block", optimizer_fusion="backward"),
    )
    assert (
        fused["peak_memory_bytes"] < plain["peak_memory_bytes"] - BYTES / 2
    )  # never all gradients together
    assert fused["perplexity"] == pytest.approx(plain["perplexity"], rel=1e-4)


def test_the_seed_of_the_study_is_added_to_the_seeds_that_the_script_sets(script, trial_of):
    """Most scripts set one: without that, several seeds would be the same training."""
    file = script()
    found = [trial_of(file)["final_loss"], trial_of(file, seed=7)["final_loss"]]
    file.write_text(file.read_text().replace("manual_seed(0)", "manual_seed(seed=7)"))
    assert trial_of(file)["final_loss"] == found[1] != found[0]


def test_the_seed_of_the_study_is_added_once_to_the_seed_of_cuda(monkeypatch):
    """torch.manual_seed seeds CUDA by torch.cuda.manual_seed_all, and both are changed."""
    seeds = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: seeds.append(seed))
    for module, name in (
        (random, "seed"),
        (numpy.random, "seed"),
        (torch, "manual_seed"),
        (torch.random, "manual_seed"),
        (torch.cuda, "manual_seed"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name))  # seed_everything replaces it
    with torch.random.fork_rng():
        seed_everything(7)
        torch.manual_seed(1)
        torch.cuda.manual_seed_all(2)
        assert torch.initial_seed() == 8
    assert seeds[-2:] == [8, 9]


def test_the_seed_of_the_study_is_added_to_a_seed_that_numpy_has_drawn(script, trial_of):
    file = script()
    drawn = "import numpy\ntorch.manual_seed(numpy.int64(0))"
    file.write_text(file.read_text().replace("torch.manual_seed(0)", drawn))
    assert trial_of(file, seed=7)["final_loss"] != trial_of(file)["final_loss"]


def test_in_backward_it_follows_a_schedule_after_its_optimizers_state_was_loaded(script, trial_of):
    """accelerate loads the state of every optimizer it prepares, then a schedule uses it."""
    file = script()
    loaded = "optimizer.load_state_dict(optimizer.state_dict())"
    schedule = "schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=12)"
    text = file.read_text().replace(
        "tokens = torch.arange", f"{loaded}\n{schedule}\ntokens = torch.arange"
    )
    file.write_text(
        text.replace("    optimizer.zero_grad()", "    optimizer.zero_grad()\n    schedule.step()")
    )
    plain, in_backward = trial_of(file), trial_of(file, optimizer_fusion="backward")
    assert in_backward["final_loss"] == plain["final_loss"]


@pytest.mark.parametrize(
    "clip",
    [
        "clip_grad_norm_(model.parameters(), max_norm=1.0)",
        "clip_grad_value_(w, 1.0)",
        "clip_grads_with_norm_(w, 1.0, torch.tensor(2.0))",
    ],
)
def test_with_a_step_in_backward_a_script_that_clips_gradients_is_ended(clip, script, trial_of):
    file = script()
    text = file.read_text().replace(
        "import sys",
        "import sys\nfrom torch.nn.utils import clip_grad_norm_, clip_grad_value_\n"
        "from torch.nn.utils import clip_grads_with_norm_",
    )
    file.write_text(
        text.replace(
            "    optimizer.step()", f"    w = model.parameters()\n    {clip}\n    optimizer.step()"
        )
    )
    found = trial_of(file, optimizer_fusion="backward")
    assert found["outcome"] == "parity_failed"
    assert (
        "the script clips gradients, which optimizer_fusion backward has used" in found["message"]
    )


def test_memory_that_the_script_frees_before_the_steady_steps_does_not_count(script, trial_of):
    file = script()
    plain = trial_of(file)
    file.write_text("import torch\nlarge = torch.ones(2**24)\ndel large\n" + file.read_text())
    assert trial_of(file)["peak_memory_bytes"] == plain["peak_memory_bytes"]


def test_over_the_cap_it_is_ended_at_once(script, trial_of):
    found = trial_of(script(), cap_bytes=BYTES)
    assert (found["outcome"], found["tokens_per_second"]) == ("over_cap", None)


def with_evaluation(file, *, before="", after="", condition="True"):
    """Evaluates in each step before or after its update; reports `evaluated` if `condition`."""
    text = file.read_text().replace("    loss = F", f"    {before}\n    loss = F")
    text = text.replace("    optimizer.zero_grad()", f"    optimizer.zero_grad()\n    {after}")
    report = f"loss=loss, evaluation_loss=evaluated if {condition} else None)"
    file.write_text(text.replace("loss=loss)", report))
    return file


EVALUATE = "model.eval(); evaluated = 1.5; model.train()"


def test_an_evaluation_after_the_last_step_is_the_perplexity(script, trial_of):
    found = trial_of(with_evaluation(script(), after=EVALUATE))
    assert found["perplexity"] == pytest.approx(math.exp(1.5))
    assert source_of(found) == "evaluation loss after step 12"


@pytest.mark.slow
@pytest.mark.parametrize(
    "where",
    [
        {"after": EVALUATE, "condition": "step == 9"},
        {"before": EVALUATE},
        {"before": EVALUATE, "condition": "step == 0"},
    ],
    ids=["only after an earlier step", "before each update", "before training"],
)
def test_an_evaluation_that_does_not_follow_the_last_step_is_ignored(where, script, trial_of):
    found = trial_of(with_evaluation(script(), **where))
    assert found["perplexity"] == trial_of(script())["perplexity"]
    says = "training loss of the last 3 steps, as no evaluation was seen after the last step"
    assert source_of(found) == says


@pytest.mark.slow
@pytest.mark.parametrize("by", ["autotune", "the script"])
def test_an_evaluation_of_a_compiled_model_is_detected(by, script, trial_of):
    file = with_evaluation(script(), before=EVALUATE)
    if by == "the script":
        file.write_text(
            file.read_text().replace(
                "tokens = torch", "model = torch.compile(model)\ntokens = torch"
            )
        )
    found = trial_of(file, compile="model" if by == "autotune" else "none")
    assert "no evaluation was seen after the last step" in source_of(found)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
def test_a_copy_of_the_model_has_separate_weights(precision, script, trial_of):
    """For example averaged weights, or the frozen reference of a preference loss."""
    file = script()
    text = file.read_text().replace(
        "tokens = torch.arange", "import copy\nfrozen = copy.deepcopy(model)\ntokens = torch.arange"
    )
    compute = (
        "F.cross_entropy(frozen(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).item()"
    )
    file.write_text(text.replace("loss=loss)", f"loss=loss, evaluation_loss={compute})"))
    untrained, found = math.log(256), trial_of(file, precision=precision)
    assert math.log(found["perplexity"]) == pytest.approx(untrained, rel=0.1)
    assert found["final_loss"] < 0.9 * untrained


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
def test_the_signature_of_the_models_forward_is_preserved(precision, script, trial_of):
    """A Trainer chooses the columns of a dataset by it."""
    file = script(after="")
    check = "import inspect; assert list(inspect.signature(model.forward).parameters) == ['tokens']"
    file.write_text(
        file.read_text().replace("tokens = torch.arange", f"{check}\ntokens = torch.arange")
    )
    assert trial_of(file, precision=precision)["outcome"] == "ok"


def test_its_model_can_be_saved_whole(script, trial_of):
    file = script()
    save = "import io; torch.save(model, io.BytesIO())"
    file.write_text(
        file.read_text().replace("tokens = torch.arange", f"{save}\ntokens = torch.arange")
    )
    assert trial_of(file)["outcome"] == "ok"


def test_an_optimizer_without_a_learning_rate_trains(script, trial_of):
    file = script()
    text = file.read_text().replace(
        "torch.optim.AdamW(model.parameters(), lr=1e-3)", "Own(model.parameters())"
    )
    own = """
class Own(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"scale": 0.01})
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= group["scale"] * parameter.grad
"""
    file.write_text(text.replace("torch.manual_seed(0)", f"{own}\ntorch.manual_seed(0)"))
    assert [
        trial_of(file, optimizer_fusion=fusion)["outcome"] for fusion in ("none", "backward")
    ] == ["ok", "ok"]


def test_an_evaluation_with_a_loss_of_0_counts(script, trial_of):
    found = trial_of(with_evaluation(script(), after="evaluated = 0.0"))
    assert (found["perplexity"], source_of(found)) == (
        1.0,
        "evaluation loss after step 12",
    )


def test_with_a_reused_perplexity_it_is_ended_once_speed_and_memory_are_known(script, trial_of):
    found = trial_of(script(), steps=50, shares_perplexity=True)
    assert (found["outcome"], found["perplexity"], found["final_loss"]) == ("ok", None, None)
    assert found["tokens_per_second"] > 0


def test_a_trial_that_another_of_its_numerics_dominates_is_ended(script, trial_of):
    dominating = PruningBound(number=7, peak_memory_bytes=1, tokens_per_second=1e12)
    found = trial_of(script(), steps=50, shares_perplexity=True, pruning_bounds=[dominating])
    assert (found["outcome"], found["message"]) == (
        "dominated",
        "trial 7 trains the same faster in no more memory",
    )


@pytest.mark.parametrize(
    ("steps", "after", "message"),
    [
        (5, "", "ended after 5 of 12 steps: let it go on for at least"),
        (0, "", "ended after 0 of 12 steps: after each optimizer step"),
        (0, "sys.exit(3)", "exit code 3"),
        (0, "raise LookupError('no text')", "LookupError: no text"),
    ],
)
def test_a_script_that_ends_early_has_an_outcome_that_names_it(
    steps, after, message, script, trial_of
):
    found = trial_of(script(steps=steps, after=after))
    assert found["outcome"] == "crashed"
    assert message in found["message"]


def test_a_script_that_ends_early_without_any_technique_does_not_match_its_study(script, trial_of):
    with pytest.raises(StudyMismatch, match="ended after 11 of 12 steps") as found:
        trial_of(script(steps=11), is_baseline=True)
    assert found.value.hint == "let it go on, or search with --steps 11"


def test_a_nan_loss_is_reported_as_diverged(script, trial_of):
    file = script()
    file.write_text(file.read_text().replace("loss=loss", "loss=float('nan')"))
    assert trial_of(file)["outcome"] == "diverged"


def test_a_loss_that_is_too_large_for_a_mean_over_tokens_is_asked_whether_it_is_a_sum(
    script, trial_of
):
    file = script()
    file.write_text(file.read_text().replace("loss=loss", "loss=888.0"))
    found = trial_of(file)
    assert (found["outcome"], found["message"]) == (
        "diverged",
        "the loss is 888.0 after 12 steps; is it a sum? report the mean over the tokens",
    )


def test_a_loss_so_far_below_zero_that_its_exponential_is_zero_is_reported_as_diverged(
    script, trial_of
):
    file = script()
    file.write_text(file.read_text().replace("loss=loss", "loss=-1000.0"))
    found = trial_of(file)
    assert (found["outcome"], found["message"]) == (
        "diverged",
        "the loss is -1000.0 after 12 steps",
    )


# -- before the study ------------------------------------------------------------------------------


def test_what_its_model_and_optimizer_do_not_support_is_excluded(script, examine):
    missing = examine(
        script(),
        checkpointing=["none", "attention", "block", "sqrt"],
        precision=["fp32", "bf16-mixed", "fp16-mixed"],
        optimizer=["adamw", "sgd"],
        optimizer_fusion=["none", "foreach", "kernel", "backward"],
    )
    assert {technique: list(values) for technique, values in missing.items()} == {
        "checkpointing": ["attention", "sqrt"],
        "precision": ["fp16-mixed"],
        "optimizer": ["sgd"],
    }
    assert missing["checkpointing"]["sqrt"] == (
        "it runs several blocks as one, and how the script's model calls its blocks is not known"
    )


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("x = 1", r"does not call autotune\.apply"),
    ],
)
def test_a_script_that_fails_before_its_training_is_rejected(source, named, script, examine):
    file = script()
    file.write_text(source)
    with pytest.raises(InvalidInput, match=named):
        examine(file)


@pytest.mark.parametrize(
    ("library", "hint"),
    [
        ("decimal", "add `model, optimizer = autotune.apply(model, optimizer)`"),
        ("transformers.trainer", "callbacks=[autotune.TrainerCallback(args)])"),
        ("lightning.pytorch", "callbacks=[autotune.LightningCallback(global_batch=...)])"),
    ],
)
def test_a_script_without_a_line_of_autotune_is_told_the_one_for_its_loop(
    library, hint, script, examine
):
    file = script()
    file.write_text(f"import sys; sys.modules.setdefault({library!r}, sys)")  # as if it was loaded
    with pytest.raises(InvalidInput, match=r"does not call autotune\.apply") as raised:
        examine(file)
    assert hint in raised.value.hint


def test_a_script_that_a_callback_rejects_is_told_what_to_change(script, examine):
    file = script()
    file.write_text("from autotune.errors import InvalidInput as E; raise E('is 8', hint='say 8')")
    with pytest.raises(InvalidInput) as found:
        examine(file)
    assert (found.value.message, found.value.hint) == ("is 8", "say 8")


def test_another_number_of_sequences_than_the_search_has_is_rejected_with_the_option(
    script, examine
):
    """Its micro batches would not add up to a step: 16 // 64 passes are none."""
    file = script()
    text = file.read_text()
    file.write_text(text.replace("Model()\n", "Model()\nautotune.current_config(global_batch=6)\n"))
    with pytest.raises(InvalidInput, match=r"trains on 6 sequences.* its search on 4") as raised:
        examine(file)
    assert raised.value.hint == "search with --global-batch 6"


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"model": "gpt"}, "a script decides its model itself"),
        ({"layers": 3}, "layers = 3 cannot be set"),
        ({"dataset": "my.txt"}, "decides its text itself"),
        ({"script": "gone.py"}, r"gone\.py cannot be read"),
        ({"script": "train.sh"}, "is not a Python file"),
    ],
)
def test_settings_that_cannot_be_combined_with_a_script_are_rejected(settings, named, script):
    with pytest.raises(InvalidInput, match=named):
        make_workload("cpu", {"script": str(script()), **settings})


def test_it_cannot_be_predicted(server, script, tmp_path):
    workload = make_workload("cpu", {"script": str(script())})
    request = PredictionRequest(workload=workload, config=TrainingConfig(), device="cpu")
    task = Predict(request=request)
    with pytest.raises(PredictionImpossible):
        server.submit(task, log_file=tmp_path / "predict.log").result(timeout=60)


def test_the_script_cannot_catch_an_error_of_the_measurement(script, trial_of):
    report = "    autotune.report(tokens=128, loss=loss)"
    handled = [
        "    try:",
        "        autotune.report(tokens=128, loss='none')",
        "    except Exception:",
        "        pass",
    ]
    file = script()
    file.write_text(file.read_text().replace(report, "\n".join(handled)))
    measurement = trial_of(file)
    assert measurement["outcome"] == "crashed"
    assert "could not convert string to float" in measurement["message"]


REPORT = "autotune.report(tokens=128, loss=loss)"


@pytest.mark.parametrize(
    "caught",
    [f"try: {REPORT}\n    except: pass", f"try: {REPORT}\n    except: raise SystemExit(1)"],
    ids=["goes on", "ends"],
)
def test_a_script_that_catches_the_end_of_its_trial_is_measured(caught, script, trial_of):
    file = script(steps=20)
    file.write_text(file.read_text().replace(REPORT, caught))
    found = trial_of(file)
    assert (found["outcome"], source_of(found)) == ("ok", "training loss of the last 3 steps")


def test_an_error_that_ends_a_trial_is_its_outcome_though_the_script_catches_it(script, trial_of):
    file = script(steps=20)
    caught = "try: autotune.report(tokens=0, loss=loss)\n    except: pass"
    file.write_text(file.read_text().replace(REPORT, caught))
    assert "Invalid tokens=0 in autotune.report" in trial_of(file)["message"]


def test_a_script_of_a_model_without_tokens_reports_rows(script, trial_of):
    file = script(steps=20)
    file.write_text(file.read_text().replace("tokens=128", "rows=4"))
    found = trial_of(file)
    assert (found["outcome"], found["counted"]) == ("ok", "rows")


@pytest.mark.parametrize(
    ("count", "sentence"),
    [
        ("tokens=128, rows=4", "Invalid tokens=128, rows=4 in autotune.report. Give one of both"),
        ("tokens=None", "Invalid tokens=None, rows=None in autotune.report. Give one of both"),
        ("rows=True", "Invalid rows=True in autotune.report. Give the number of rows of the step"),
        (
            '**{"rows" if step == 3 else "tokens": 4}',
            "Invalid rows=4 in autotune.report. The reports before have counted tokens",
        ),
    ],
)
def test_a_report_that_counts_nothing_or_two_things_ends_with_a_sentence(
    count, sentence, script, trial_of
):
    file = script(steps=20)
    file.write_text(file.read_text().replace("tokens=128", count))
    assert sentence in trial_of(file)["message"]


def test_a_second_call_of_apply_ends_the_search_with_the_way_out(script, trial_of):
    file = script()
    again = "autotune.apply(model, torch.optim.SGD([tokens.float()]))\n"
    file.write_text(file.read_text().replace("for step", f"{again}for step"))
    with pytest.raises(StudyMismatch, match=r"calls autotune\.apply twice") as found:
        trial_of(file)
    assert "autotune.apply(model, [muon, adam])" in found.value.hint


@pytest.mark.parametrize("fusion", ["none", "backward"])
def test_the_state_of_every_optimizer_counts(fusion, script, trial_of):
    file = script()
    several = (
        "[torch.optim.SGD(model.embedding.parameters(), lr=1e-3, momentum=0.9), "
        "torch.optim.AdamW([*model.head.parameters(), *model.blocks.parameters()], lr=1e-3)]"
    )
    text = file.read_text()
    for plain, replaced in (
        ("torch.optim.AdamW(model.parameters(), lr=1e-3)", several),
        ("optimizer.step()", "[one.step() for one in optimizer]"),
        ("optimizer.zero_grad()", "[one.zero_grad() for one in optimizer]"),
    ):
        assert plain in text
        text = text.replace(plain, replaced)
    file.write_text(text)
    found = trial_of(file, optimizer_fusion=fusion)
    momentum = 256 * 64 * 4
    steps = 4 * (2 + 4 * 4)  # a number for each weight of the second one
    expected = momentum + 2 * (BYTES - momentum) + steps
    assert (found["outcome"], found["bytes_by_kind"]["optimizer_state"]) == ("ok", expected)


WRAPPER = """
class Delegates(torch.optim.Optimizer):  # as accelerate's, it does not initialize its base class
    def __init__(self, optimizer):
        self.optimizer = optimizer
    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)
    defaults = property(lambda self: self.optimizer.defaults)
    def step(self, closure=None):
        self.optimizer.step()
    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad()

"""


def test_an_optimizer_in_a_wrapper_of_a_library_is_measured(script, trial_of):
    file = script()
    made = "torch.optim.AdamW(model.parameters(), lr=1e-3)"
    text = file.read_text().replace(made, f"Delegates({made})")
    file.write_text(text.replace("class Block", f"{WRAPPER}class Block"))
    found = trial_of(file, optimizer_fusion="foreach")
    steps = 4 * (3 + 4 * 4)  # a number for each weight
    assert (found["outcome"], found["bytes_by_kind"]["optimizer_state"]) == (
        "ok",
        2 * BYTES + steps,
    )


def test_a_report_while_the_script_is_ended_changes_nothing(script, trial_of):
    file = script()
    lines = file.read_text().splitlines()
    loop = next(index for index, line in enumerate(lines) if line.startswith("for step"))
    body = [f"    {line}" for line in lines[loop:] if line.strip()]
    last = ["finally:", "    autotune.report(tokens=128, loss=1.0, evaluation_loss=1.0)"]
    file.write_text("\n".join([*lines[:loop], "try:", *body, *last]))
    found = trial_of(file)
    assert (found["outcome"], source_of(found)) == (
        "ok",
        "training loss of the last 3 steps",
    )


# -- without a search ------------------------------------------------------------------------------


def test_outside_a_trial_nothing_is_changed():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    assert autotune.apply(model, optimizer) == (model, optimizer)
    assert autotune.current_config() == TrainingConfig(precision="as-is", optimizer_fusion="as-is")
    assert autotune.current_config(global_batch=16).micro_batch_size == 16
    autotune.report(tokens=1, loss=1.0)


def test_a_file_can_name_the_configuration(tmp_path, monkeypatch):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"precision": "bf16-true"}))
    monkeypatch.setenv("AUTOTUNE_CONFIG", str(file))
    model = nn.Linear(2, 2)
    autotune.apply(model, torch.optim.SGD(model.parameters()))
    assert autotune.current_config().precision == "bf16-true"
    assert model.weight.dtype == torch.bfloat16
    file.write_text('{"precision": "fp3"}')
    with pytest.raises(InvalidInput, match="fp3"):
        autotune.current_config()


def test_steps_that_a_script_reports_are_compared_with_the_trial_of_the_file(
    tmp_path, monkeypatch, capsys
):
    file = tmp_path / "config.json"
    measured = {"trial": "study tour, trial 12", "peak_memory_bytes": 1, "weights_bytes": 8}
    file.write_text(json.dumps({"config": {"precision": "fp32"}, "measured": measured}))
    monkeypatch.setenv("AUTOTUNE_CONFIG", str(file))
    model = nn.Linear(8, 8)
    model, optimizer = autotune.apply(model, torch.optim.AdamW(model.parameters()))
    for _ in range(COMPARED_UP_TO + 2):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        autotune.report(tokens=1, loss=1.0)
    said = capsys.readouterr().err
    assert said.count("20 steps beside study tour, trial 12") == 1
    assert "288 bytes of weights (8 in the trial)" in said


def test_the_micro_batch_of_a_file_must_divide_the_sequences_of_a_step(tmp_path, monkeypatch):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"micro_batch_size": 4}))
    monkeypatch.setenv("AUTOTUNE_CONFIG", str(file))
    assert autotune.current_config(global_batch=12).micro_batch_size == 4
    with pytest.raises(InvalidInput, match="micro batch of 4, which does not divide the 6"):
        autotune.current_config(global_batch=6)


@pytest.mark.slow
def test_the_example_runs_by_itself():
    text = EXAMPLE.read_text().replace(
        "STEPS, EVALUATE_EVERY = 200, 10", "STEPS, EVALUATE_EVERY = 2, 1"
    )
    code = f"__file__ = {str(EXAMPLE)!r}\n{text}"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=dict(os.environ),
    )
    assert "step 2: loss" in ran.stdout


# -- its optimizer ---------------------------------------------------------------------------------


def test_mixed_precision_gives_the_script_logits_in_float32():
    model = nn.Linear(8, 8)
    inside = []
    model.register_forward_hook(lambda _module, inputs, _output: inside.append(inputs[0].dtype))
    apply_to_user_training(
        TrainingConfig(precision="bf16-mixed"), model, torch.optim.SGD(model.parameters())
    )
    outputs = model(torch.ones(2, 8))
    assert outputs.dtype == torch.float32
    assert not torch.equal(
        outputs, nn.functional.linear(torch.ones(2, 8), model.weight, model.bias)
    )


def test_a_stored_script_workload_loads(script):
    workload = make_workload("cpu", {"script": str(script())})
    assert type(workload)(**json.loads(json.dumps(workload.to_dict()))) == workload
    with pytest.raises(InvalidInput):
        dataclasses.replace(workload, model="gpt")


# -- a configuration for a user's training loop ----------------------------------------------------


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


def stack():
    return nn.Sequential(nn.Linear(8, 8), nn.Sequential(*(Block() for _ in range(4))))


def recomputed(model):
    return [isinstance(block, Changed) for block in model[1]]


def test_a_configuration_is_loaded_from_an_export(tmp_path):
    config = TrainingConfig(checkpointing="every-2", micro_batch_size=4)
    file = tmp_path / "autotune_config.json"
    file.write_text(
        json.dumps({"origin": "study tour, trial 3", "config": config.to_dict(), "workload": {}})
    )
    assert autotune.load_config(file) == config


def test_a_configuration_is_applied_to_a_model_alone():
    model = autotune.apply(stack(), TrainingConfig(checkpointing="every-2"))
    assert recomputed(model) == [True, False, True, False]


def test_a_configuration_is_applied_to_a_model_and_its_optimizer():
    model = stack()
    config = TrainingConfig(checkpointing="block", optimizer_fusion="kernel")
    model, optimizer = autotune.apply(model, torch.optim.AdamW(model.parameters()), config=config)
    assert recomputed(model) == [True] * 4
    assert optimizer.defaults["fused"]


def test_a_fusion_cannot_be_applied_to_a_model_alone_and_warns():
    with pytest.warns(UserWarning, match="optimizer_fusion backward is not applied"):
        autotune.apply(stack(), TrainingConfig(optimizer_fusion="backward"))


def test_another_optimizer_than_the_measured_one_warns():
    model = stack()
    with pytest.warns(UserWarning, match="measured with AdamW, and the optimizer is SGD"):
        autotune.apply(model, torch.optim.SGD(model.parameters(), lr=0.1), config=TrainingConfig())


@pytest.mark.parametrize("choices", [{"loss": "chunked"}, {"precision": "fp16-mixed"}], ids=str)
def test_techniques_that_a_users_training_loop_does_not_support_are_rejected(choices):
    with pytest.raises(IllegalConfiguration):
        autotune.apply(stack(), TrainingConfig(**choices))


def test_a_chunked_loss_is_rejected_with_its_reason():
    with pytest.raises(IllegalConfiguration, match="computes its loss itself"):
        autotune.apply(stack(), TrainingConfig(loss="chunked"))


def test_an_adapter_is_rejected_by_name_where_a_script_has_made_its_optimizer():
    with pytest.raises(IllegalConfiguration, match="adapter lora cannot be applied: a script's"):
        autotune.apply(stack(), TrainingConfig(adapter="lora"))


@pytest.mark.parametrize("optimizer", get_args(Optimizer))
def test_another_optimizer_than_any_that_was_measured_warns(optimizer):
    model = stack()
    with pytest.warns(UserWarning, match="and the optimizer is RMSprop"):
        autotune.apply(
            model,
            torch.optim.RMSprop(model.parameters()),
            config=TrainingConfig(optimizer=optimizer),
        )


def test_no_adapter_is_tried_with_a_users_training():
    model = stack()
    missing = missing_in_user_model(
        model,
        torch.optim.AdamW(model.parameters()),
        {"adapter": ["none", "lora", "dora"], "adapter_rank": [8, 4096], "base_weights": ["nf4"]},
    )
    assert {name: set(values) for name, values in missing.items()} == {"adapter": {"lora", "dora"}}


def test_an_allocator_setting_that_comes_too_late_warns(monkeypatch):
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    with pytest.warns(UserWarning, match="allocator expandable is not applied"):
        autotune.apply(stack(), TrainingConfig(allocator="expandable"))


def test_an_allocator_setting_that_the_process_has_does_not_warn(monkeypatch):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        autotune.apply(stack(), TrainingConfig(allocator="expandable"))


def test_a_memory_budget_without_compilation_is_rejected():
    with pytest.raises(IllegalConfiguration, match=r"needs torch\.compile"):
        autotune.apply(stack(), TrainingConfig(memory_budget=0.5))


def test_apply_without_optimizer_and_configuration_is_rejected():
    with pytest.raises(InvalidInput, match="neither an optimizer nor a configuration"):
        autotune.apply(stack())


@pytest.mark.parametrize(
    "text", ["", "[]", '{"config": {"precision": "fp99"}}', '{"colour": 1}', "\x00"], ids=repr
)
def test_a_file_without_a_configuration_is_rejected_by_name(tmp_path, text):
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(InvalidInput) as raised:
        autotune.load_config(file)
    assert raised.value.exit_code == 2


def test_a_missing_file_is_rejected_by_name(tmp_path):
    with pytest.raises(InvalidInput, match=r"nothing\.json cannot be read"):
        autotune.load_config(tmp_path / "nothing.json")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{bad", "is not valid JSON: .* line 1 column 2"),
        ('{"config": 3}', "holds no configuration"),
        ('{"config": {"checkpoint": "block"}}', "there is no technique 'checkpoint'"),
        ('{"micro_batch_size": "two"}', "Invalid micro_batch_size: 'two'"),
    ],
)
def test_a_wrong_file_is_answered_without_names_of_python(text, sentence, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(InvalidInput, match=sentence) as raised:
        autotune.load_config(file)
    assert "__init__" not in raised.value.message
