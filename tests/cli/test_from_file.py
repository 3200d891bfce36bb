"""`--from FILE` as a user types it: a trainer's file in, its training as the baseline."""

import json

import pytest

from tests.building.commands import run_here

pytestmark = pytest.mark.usefixtures("one_trial_server")

TRL = """\
# Mine.
model_name_or_path: {model}
dataset_name: {data}
max_length: 32
packing: true
per_device_train_batch_size: 4
gradient_accumulation_steps: 2
learning_rate: 1e-3  # the YAML of Python reads a text
bf16: false
gradient_checkpointing: true
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a tiny model and its tokenizer, a text, and files of trainers."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("from")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "tiny")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=letters[0], pad_token=letters[0]
    ).save_pretrained(folder / "tiny")
    rows = [json.dumps({"text": " ".join(str(i * j % 97) for j in range(60))}) for i in range(300)]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    text = TRL.format(model=folder / "tiny", data=folder / "rows.jsonl")
    (folder / "sft.yaml").write_text(text)
    (folder / "typo.yaml").write_text(f"{text}learning_rat: 1\n")
    (folder / "flash.yaml").write_text(
        text.replace("bf16: false", "bf16: true\nattn_implementation: flash_attention_2")
    )
    return folder


def run(command, *arguments, folder):
    return run_here(command, *map(str, arguments), folder=folder)


def test_the_training_of_the_file_is_predicted(folder):
    of_file = run("predict", "--from", "sft.yaml", "--device", "cpu", "--json", folder=folder)
    given = ("--model", "tiny", "--seq-len", 32, "--global-batch", 8, "--micro-batch", 4)
    techniques = ("--checkpointing", "block", "--optimizer-fusion", "kernel", "--loss", "chunked")
    clipped = ("--gradient-clipping", 1.0)
    described = run(
        "predict", *given, *techniques, *clipped, "--device", "cpu", "--json", folder=folder
    )
    found, expected = json.loads(of_file.stdout), json.loads(described.stdout)
    assert found["config"] == expected["config"]
    assert found["peak_memory_bytes"] == expected["peak_memory_bytes"]


@pytest.mark.slow
def test_what_was_read_and_what_was_not_is_said_beside_the_answer(folder):
    ended = run("predict", "--from", "sft.yaml", "--device", "cpu", folder=folder)
    first, second, *_ = ended.stderr.splitlines()
    assert first.startswith("sft.yaml is a training of TRL ")
    assert second == "lr_scheduler_type: linear: trials have cosine, the nearest of two schedules"


@pytest.mark.slow
def test_an_option_beside_the_file_overrides_it(folder):
    given = ("--from", "sft.yaml", "--checkpointing", "none", "--device", "cpu", "--json", "-q")
    ended = run("predict", *given, folder=folder)
    assert json.loads(ended.stdout)["config"]["checkpointing"] == "none"
    assert ended.stderr == ""


@pytest.mark.slow
def test_the_smallest_change_that_makes_it_fit_is_said(folder):
    peak = json.loads(
        run("predict", "--from", "sft.yaml", "--device", "cpu", "--json", folder=folder).stdout
    )["peak_memory_bytes"]
    cap = ("--max-mem", f"{peak * 85 // 100}B")
    ended = run("predict", "--from", "sft.yaml", "--device", "cpu", *cap, folder=folder)
    assert ended.returncode == 1
    last = ended.stdout.splitlines()[-1]
    assert last.startswith("The smallest change that makes it fit: micro_batch_size 2: peak ")
    assert "Predicting it with micro_batch_size 2 ..." in ended.stderr


def test_a_key_that_the_trainer_does_not_have_is_one_sentence(folder):
    ended = run("predict", "--from", "typo.yaml", "--device", "cpu", folder=folder)
    assert ended.returncode == 2
    assert ended.stderr.splitlines() == [
        "error: typo.yaml has 'learning_rat', which is no key of TRL 1.16",
        "hint: did you mean 'learning_rate'? otherwise remove it",
    ]


@pytest.mark.slow
def test_a_search_begins_with_the_training_of_the_file_and_compares_with_it(folder):
    given = ("--from", "sft.yaml", "--max-mem", "1MiB", "--steps", 9, "--trials", 2, "--json")
    ended = run("search", *given, "--device", "cpu", "--no-confirm", "-q", folder=folder)
    study = json.loads(ended.stdout)
    baseline = study["trials"][study["baseline"]]
    assert (baseline["number"], baseline["name"], baseline["outcome"]) == (0, "sft.yaml", "ok")
    assert baseline["config"]["checkpointing"] == "block"
    assert baseline["config"]["micro_batch_size"] == 4
    assert baseline["peak_memory_bytes"] == baseline["predicted_peak_memory_bytes"]
    again = run("search", "--from", "sft.yaml", "--name", study["study"], "-q", folder=folder)
    assert again.returncode == 0
    other = run("search", "--from", "flash.yaml", "--name", study["study"], "-q", folder=folder)
    assert other.returncode == 2
    assert "was begun with a file that has" in other.stderr


@pytest.mark.slow
def test_what_this_device_cannot_do_is_replaced_and_said(folder):
    given = ("--from", "flash.yaml", "--space", "quick", "--steps", 9, "--trials", 1, "--json")
    ended = run("search", *given, "--device", "cpu", "--no-confirm", folder=folder)
    study = json.loads(ended.stdout)
    assert study["trials"][0]["config"]["precision"] == "bf16-mixed"
