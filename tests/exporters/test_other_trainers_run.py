"""LLaMA-Factory and ms-swift themselves train with the exported files, and do what readers say.

They want older packages than the tests have, so each gets an environment of its own, made once a
run. AUTOTUNE_LLAMAFACTORY_PYTHON and AUTOTUNE_MS_SWIFT_PYTHON name the Python of one that is there.
"""

import json
import os
import subprocess
import venv
from pathlib import Path

import numpy
import pytest
import torch
from transformers import AutoTokenizer, Trainer

from autotune.execution.process.preparation import prepare
from autotune.execution.tasks import Prepare
from autotune.exporters import TARGETS
from autotune.spec.config import TrainingConfig
from autotune.spec.model_file import model_name
from tests.building import chat
from tests.exporters.readers import llamafactory as llamafactory_reader
from tests.exporters.readers import ms_swift as ms_swift_reader
from tests.exporters.readers.hugging_face import LAYERS, tiny_llama
from tests.exporters.readers.trl import tokenizer
from tests.exporters.recipes import recipe
from tests.exporters.test_chat_exports import chat_workload, learned

pytestmark = pytest.mark.slow

LLAMAFACTORY = (
    *("torch==2.13.0", "transformers==5.6.0", "datasets==4.0.0", "accelerate==1.11.0"),
    *("peft==0.18.1", "trl==0.24.0", "torchdata==0.11.0", "bitsandbytes==0.50.2", "omegaconf"),
    *("fire", "einops", "sentencepiece", "tiktoken", "matplotlib", "pandas", "scipy", "protobuf"),
)
"""What training needs of the requirements of llamafactory 0.9.5, which also has a web server."""
MS_SWIFT = ("torch==2.13.0", "transformers==5.19.0", "bitsandbytes==0.50.2", "ms-swift==4.6.0")
STAND_IN = '"""Stands in for torchaudio, which reads sounds and has no build for this torch."""\n'
WATCH = Path(__file__).with_name("watched_training.py")
STEPS = 12


@pytest.fixture(scope="module")
def llamafactory(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llamafactory")
    (folder / "torchaudio.py").write_text(STAND_IN)
    installs = (LLAMAFACTORY, ("--no-deps", "llamafactory==0.9.5"))
    return environment(folder, "AUTOTUNE_LLAMAFACTORY_PYTHON", installs)


@pytest.fixture(scope="module")
def ms_swift(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ms_swift")
    return environment(folder, "AUTOTUNE_MS_SWIFT_PYTHON", (MS_SWIFT,))


def environment(folder, variable, installs):
    """Returns the Python that has a trainer, and the variables that it needs."""
    python = os.environ.get(variable)
    if python is None:
        venv.create(folder / "environment", with_pip=True)
        python = str(folder / "environment/bin/python")
        for packages in installs:
            install = [python, "-m", "pip", "install", "--quiet", *packages]
            done = subprocess.run(install, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                pytest.skip(f"the trainer cannot be installed: {done.stderr[-400:]}")
    offline = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    return python, {**os.environ, **offline}


def exported(folder, target, *, model=None, **settings):
    """Writes model, text and files into the folder, and returns the export of a trial on a CPU."""
    workload = {
        "global_batch": 4,
        "sequence_length": 16,
        "steps": STEPS,
        "dataset": "text.txt",
        **settings.pop("workload", {}),
    }
    weights = tiny_llama(dtype=torch.bfloat16)
    if model is None:
        model = folder / "model"
        tokenizer().save_pretrained(model)
        (folder / "text.txt").write_text(f"{'a b c d e f g h ' * 5}\n" * 300)
    else:
        weights.resize_token_embeddings(chat.VOCABULARY)
    weights.save_pretrained(model)
    config = tiny_llama().config.to_dict() | {"model_type": "llama", "vocab_size": 256}
    named = {
        "model": model_name(config),
        "model_config": config,
        "pretrained": True,
        "model_source": str(model),
    }
    asked = TrainingConfig(micro_batch_size=2, **settings)
    version = TARGETS[target].versions[0]
    asked = recipe(asked, device_type="cpu", **{**named, **workload})
    export = TARGETS[target].write(asked, version)
    for name, text in export.files.items():
        (folder / name).write_text(text)
    return export


def run(command, trainer, folder):
    _, environment = trainer
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


def watched(name, trainer, folder):
    run([trainer[0], str(WATCH), name, "report.json"], trainer, folder)
    return json.loads((folder / "report.json").read_text())


CASES = {
    "mixed, all blocks checkpointed": {"precision": "bf16-mixed", "checkpointing": "block"},
    "plain": {
        "optimizer": "sgd",
        "workload": {"schedule": "cosine", "gradient_clipping": 1.0, "seed": 7},
    },
    "LoRA of the attention, fused": {
        "adapter": "lora",
        "adapter_targets": "attention",
        "optimizer_fusion": "kernel",
    },
    "LoRA over nf4, paged": {
        "precision": "bf16-mixed",
        "adapter": "lora",
        "adapter_rank": 16,
        "base_weights": "nf4",
        "checkpointing": "block",
        "optimizer": "paged-adamw-8bit",
    },
    "DoRA over nf4, which it refuses": {
        "precision": "bf16-mixed",
        "adapter": "dora",
        "base_weights": "nf4",
    },
}
PRODUCTS = {"fp32": "torch.float32"}


@pytest.mark.parametrize("case", CASES)
def test_llamafactory_does_what_its_reader_says(case, llamafactory, tmp_path):
    export = exported(tmp_path, "llamafactory", **CASES[case])
    values = llamafactory_reader.values_of(export)
    model = llamafactory_reader.model_of(values)
    args = llamafactory_reader.arguments(values)
    found = watched("llamafactory", llamafactory, tmp_path)
    compare(found, llamafactory_reader.read(export, "0.9"), model, args)


@pytest.mark.parametrize("case", [case for case in CASES if "DoRA" not in case])
def test_ms_swift_does_what_its_reader_says(case, ms_swift, tmp_path):
    export = exported(tmp_path, "ms-swift", **CASES[case])
    _, values = ms_swift_reader.values_of(export)
    model, args = ms_swift_reader.model_of(values), ms_swift_reader.arguments(values)
    name_the_model(tmp_path)
    found = watched("ms-swift", ms_swift, tmp_path)
    compare(found, ms_swift_reader.read(export, "4.6"), model, args)


def name_the_model(folder):
    """Add what the note asks for where ms-swift does not know the model by its name."""
    with (folder / "ms_swift.yaml").open("a") as file:
        file.write("model_type: llama\ntemplate: llama\n")


def compare(found, done, model, args):
    """Fail where a trainer did something else than its reader says (`done`, `model`, `args`)."""
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    assert found["trained"] == sum(weight.numel() for weight in trained)
    assert found["trained_dtypes"] == sorted({str(weight.dtype) for weight in trained})
    assert found["products"] == [PRODUCTS.get(done["precision"], "torch.bfloat16")]
    assert found["attention"] == "sdpa"
    parts = {"all-linear": ["mlp", "self_attn"], "attention": ["self_attn"]}
    assert found["adapted"] == ([] if done["adapter"] == "none" else parts[done["adapter_targets"]])
    if done["base_weights"] != "nf4":  # its bytes are stored as bfloat16
        frozen = {str(weight.dtype) for weight in model.parameters() if not weight.requires_grad}
        assert found["frozen_dtypes"] == sorted(frozen)

    micro_batches = STEPS * found["accumulation"]
    calls = micro_batches * LAYERS if done["checkpointing"] == "block" else 0
    assert (found["checkpoints"], found["reentrant"]) == (calls, False)
    # The last piece of a text may be shorter.
    assert found["logits"][-1] == [done["micro_batch_size"], done["sequence_length"], 64]
    assert found["accumulation"] * done["micro_batch_size"] == done["global_batch"]

    kind, settings = Trainer.get_optimizer_cls_and_kwargs(args)
    assert found["optimizer"] == f"{kind.__module__}.{kind.__name__}"
    assert found["fused"] == settings.get("fused", False)
    assert found["momentum"] == settings.get("momentum")
    assert found["weight_decay"] == done["weight_decay"]
    assert (found["steps"], found["seed"]) == (done["steps"], done["seed"])
    assert (found["max_grad_norm"] or None) == done["gradient_clipping"]
    assert found["rates"] == pytest.approx(rates(args))


def rates(args):
    """Returns the rate of every step by transformers' own schedule of this environment."""
    weight = torch.nn.Parameter(torch.zeros(1))
    trainer = Trainer(torch.nn.Linear(1, 1), args)
    trainer.optimizer = torch.optim.SGD([weight], lr=args.learning_rate)
    scheduler = trainer.create_scheduler(args.max_steps)
    found = []
    for _ in range(args.max_steps):
        found.append(trainer.optimizer.param_groups[0]["lr"])
        trainer.optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize("packing", ["packed", "padded"])
def test_llamafactory_learns_the_answers_alone(packing, llamafactory, tmp_path):
    workload = chat_workload(tmp_path, packing=packing, sequence_length=128).to_dict()
    chosen = ("dataset", "tokenizer", "chat_column", "sequence_length", "packing")
    exported(
        tmp_path,
        "llamafactory",
        model=tmp_path / "model",
        workload={name: workload[name] for name in chosen},
    )
    found = {tuple(answer) for answer in watched("llamafactory", llamafactory, tmp_path)["answers"]}
    words = AutoTokenizer.from_pretrained(tmp_path / "model")
    texts = {words.decode(answer) for answer in found}
    assert texts
    assert all("It is" in text and "What comes" not in text for text in texts)
    if packing == "packed":
        return
    prepare(Prepare(workload=recipe(**workload).workload, folder=tmp_path / "prepared"))
    rows = [numpy.load(tmp_path / "prepared" / name) for name in ("train.npy", "held_out.npy")]
    expected = [learned(row[:128]) for row in numpy.concatenate(rows).tolist()]
    assert found <= {
        tuple(token for token, is_label in zip(tokens[1:], flags, strict=True) if is_label)
        for tokens, flags in expected
    }


@pytest.mark.parametrize("attention", ["auto", "math"], ids=["plain", "launched"])
def test_the_printed_command_of_llamafactory_trains(attention, llamafactory, tmp_path):
    settings = {"precision": "bf16-mixed", "adapter": "lora", "attention": attention}
    export = exported(tmp_path, "llamafactory", **settings)
    python = llamafactory[0]
    command = [
        word
        for part in export.command.split()
        for word in {
            "llamafactory-cli": [python, "-m", "llamafactory.cli"],
            "python": [python],
        }.get(part, [part])
    ]
    run(command, llamafactory, tmp_path)
    assert (tmp_path / "trainer_output/adapter_model.safetensors").exists()


@pytest.mark.parametrize("attention", ["auto", "math"], ids=["plain", "with settings"])
def test_the_printed_command_of_ms_swift_trains(attention, ms_swift, tmp_path):
    settings = {"precision": "bf16-mixed", "adapter": "lora", "attention": attention}
    export = exported(tmp_path, "ms-swift", **settings)
    name_the_model(tmp_path)
    _, *arguments = export.command.split()
    run([ms_swift[0], "-m", "swift.cli.main", *arguments], ms_swift, tmp_path)
    assert [*tmp_path.glob("trainer_output/*/checkpoint-*/adapter_model.safetensors")]
