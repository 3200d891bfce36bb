"""The exported script as a program: it is self-contained and reaches the trial's perplexity."""

import ast
import subprocess
import sys
import time

import pytest
import torch

from autotune.spec.config import TrainingConfig
from autotune.spec.workload import Workload, make_workload
from tests.exporters.test_pytorch_script import ALONE, COMPILED, EAGER, OWN, exported
from tests.exporters.texts import settings_of_text


def every_script(tmp_path):
    yield from (
        exported(make_workload("cpu", {}), **choices)
        for choices in (EAGER | ALONE | COMPILED).values()
    )
    for precision in ("fp16-mixed", "fp8", "int8-mixed", "tf32"):
        yield exported(make_workload("cpu", {}), precision=precision, activation_offload="cpu")
    for kind in ("a text with a BPE", "padded rows", "streamed rows"):
        yield exported(make_workload("cpu", settings_of_text(tmp_path, kind)))
    yield exported(make_workload("cpu", {"tokenizer": "somebody/tokenizer"}))
    (tmp_path / "own_model.py").write_text(OWN)
    yield exported(make_workload("cpu", {"model": f"{tmp_path / 'own_model.py'}:make"}))


@pytest.mark.slow
def test_a_script_defines_nothing_twice_and_uses_nothing_undefined(tmp_path):
    for number, export in enumerate(every_script(tmp_path)):
        (tmp_path / f"script_{number}.py").write_text(export.files["train.py"])
        names = [
            name
            for statement in ast.parse(export.files["train.py"]).body
            for name in (
                [alias.asname or alias.name for alias in statement.names]
                if isinstance(statement, ast.Import | ast.ImportFrom)
                else [getattr(statement, "name", None)]
            )
            if name is not None
        ]
        assert sorted(names) == sorted(set(names))
    checked = subprocess.run(
        [
            sys.executable,
            "-m",
            "ruff",
            "check",
            "--isolated",
            "--select",
            "F,E9",
            "--exclude",
            "own_model.py",
            ".",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout


def test_the_script_needs_no_autotune(tmp_path):
    for export in every_script(tmp_path):
        assert "import autotune" not in export.files["train.py"]
        assert "from autotune" not in export.files["train.py"]


@pytest.mark.slow
def test_the_script_as_a_program_ends_at_the_perplexity_of_the_trial(workload, prepared, tmp_path):
    export = exported(workload, checkpointing="block")
    for name, text in export.files.items():
        (tmp_path / name).write_text(text)
    command = [sys.executable, "train.py", "--tokens", str(prepared), "--save", "model.pt"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    said = float(ran.stdout.partition("perplexity ")[2].split()[0])
    assert said == pytest.approx(perplexity_of_trial(workload, prepared), abs=1e-4)
    assert f"{workload.steps} steps beside study tour, trial 12" in ran.stderr
    assert len(torch.load(tmp_path / "model.pt")) == 4 * 7 + 3


def perplexity_of_trial(workload: Workload, prepared):
    from autotune.spec.training_request import TrainingRequest
    from autotune.training.trainer import Trainer

    config = TrainingConfig(micro_batch_size=workload.global_batch, checkpointing="block")
    request = TrainingRequest(
        workload=workload,
        config=config,
        folder=prepared,
        device="cpu",
        cap_bytes=2**40,
        requested_at=time.monotonic(),
    )
    return Trainer(request).run().perplexity
