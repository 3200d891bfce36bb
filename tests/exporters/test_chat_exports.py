"""Chat data in exports: the answers alone are learned, or the user is told."""

import ast
import dataclasses

import numpy
import pytest
import torch
import yaml

from autotune.execution.process.preparation import prepare
from autotune.execution.tasks import Prepare
from autotune.exporters import TARGETS
from autotune.exporters.written import composed_export
from autotune.spec.workload import make_workload
from tests.building import chat
from tests.building.results import record, study_result
from tests.exporters.readers import axolotl
from tests.exporters.readers.hugging_face import imported, tiny_llama
from tests.exporters.readers.trl import parse
from tests.exporters.recipes import recipe

LENGTH = 32
CHAT = {"dataset": "chat.jsonl", "tokenizer": "somebody/model", "chat_column": "messages"}
IGNORED = -100
LEARN_ANSWERS = (
    *("assistant_only_loss", "roles_to_train", "labelled_tokens"),
    *("train_on_prompt: false", "loss_scale: default", "train_on_responses_only(trainer)"),
)
"""What the files of a trainer say where it learns answers alone."""


def chat_workload(folder, *, template=chat.LIKE_CHATML, **settings):
    tokenizer = chat.write_tokenizer(folder / "model", template=template)
    file = chat.write_rows(folder / "chat.jsonl", chat.conversations())
    return make_workload(
        "cpu",
        {
            "dataset": str(file),
            "tokenizer": str(tokenizer),
            "vocab_size": chat.VOCABULARY,
            "chat_column": "messages",
            "sequence_length": LENGTH,
            "evaluation_sequences": 4,
            **settings,
        },
    )


def learned_by_the_study(workload, folder):
    """Returns the tokens and labels of every sequence, of both parts together."""
    prepare(Prepare(workload=workload, folder=folder))
    rows = [numpy.load(folder / name) for name in ("train.npy", "held_out.npy")]
    return {learned(row[:LENGTH]) for row in numpy.concatenate(rows).tolist()}


def learned(row):
    """Returns (tokens, which of them are labels) of a row as the study stores it."""
    tokens = [token if token >= 0 else max(0, -2 - token) for token in row]
    return tuple(tokens), tuple(token >= 0 for token in row[1:])


@pytest.mark.parametrize("template", [chat.LIKE_CHATML, chat.WITH_MARKS], ids=["plain", "marked"])
def test_a_trainer_of_transformers_learns_the_samples_of_the_study(tmp_path, template):
    from transformers import AutoTokenizer

    workload = chat_workload(tmp_path, template=template, packing="padded")
    expected = learned_by_the_study(workload, tmp_path / "prepared")
    export = TARGETS["transformers"].write(recipe(**workload.to_dict()), "5")
    tokenizer = AutoTokenizer.from_pretrained(workload.tokenizer)
    with imported(export.files["autotune_trainer.py"]) as module:
        samples = module.sequences(chat.conversations(), tokenizer)
    pad = tokenizer.pad_token_id
    made = set()
    for sample in samples:
        tokens, labels = sample["input_ids"].tolist(), sample["labels"].tolist()
        assert all(label in (IGNORED, token) for token, label in zip(tokens, labels, strict=True))
        made.add((tuple(tokens), tuple(label != IGNORED for label in labels[1:])))
    # Padding is no label, so that its token does not matter.
    assert pad != 0
    assert made == expected


def test_a_packed_trainer_of_transformers_learns_every_answer(tmp_path):
    from transformers import AutoTokenizer

    workload = chat_workload(tmp_path)
    export = TARGETS["transformers"].write(recipe(**workload.to_dict()), "5")
    tokenizer = AutoTokenizer.from_pretrained(workload.tokenizer)
    with imported(export.files["autotune_trainer.py"]) as module:
        samples = module.sequences(chat.conversations(), tokenizer)
    labels = torch.stack([sample["labels"] for sample in samples])
    assert (labels != IGNORED).any(dim=1).all()
    text = tokenizer.decode(labels[labels != IGNORED].tolist())
    assert text.count("It is") > 300
    assert "What comes" not in text


def test_the_script_of_transformers_gives_it_conversations_and_a_tokenizer():
    text = TARGETS["transformers"].write(recipe(**CHAT), "5").files["train.py"]
    ast.parse(text)
    assert "sequences(rows, tokenizer)" in text
    assert "AutoTokenizer.from_pretrained('somebody/model')" in text


def test_trl_learns_the_answers_only():
    export = TARGETS["trl"].write(recipe(**CHAT), "1.16")
    _, args, _, _ = parse(export.files["sft.yaml"])
    assert args.assistant_only_loss
    assert any("{% generation %}" in note for note in export.notes)


@pytest.mark.parametrize(
    ("template", "is_told"), [(chat.LIKE_CHATML, True), (chat.WITH_MARKS, False)]
)
def test_trl_is_told_before_the_command_of_a_template_at_which_it_stops(
    template, is_told, tmp_path
):
    workload = chat_workload(tmp_path, template=template)
    result = dataclasses.replace(study_result([record(0)]), workload=workload)
    written = composed_export(result, result.trial(0), "trl")
    to_do = dict(written.sections()).get("Before you use it", [])
    assert any("has no {% generation %}" in line for line in to_do) == is_told
    assert not any("generation" in note for note in written.content.notes)


def test_trl_trains_with_a_template_that_got_the_marks(tmp_path, monkeypatch):
    """The way out, and the error without it."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import SFTTrainer

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    workload = chat_workload(tmp_path, packing="padded")
    text = TARGETS["trl"].write(recipe(**workload.to_dict()), "1.16").files["sft.yaml"]
    (tmp_path / "answers.jinja").write_text(chat.WITH_MARKS)

    def make(text):
        _, args, _, _ = parse(text, output_dir=str(tmp_path / "out"))
        args.model_init_kwargs = None
        return SFTTrainer(
            tiny_llama(),
            args,
            train_dataset=Dataset.from_list(chat.conversations(4)),
            processing_class=AutoTokenizer.from_pretrained(workload.tokenizer),
        )

    with pytest.raises(ValueError, match="template"):
        make(text)
    trainer = make(f"{text}chat_template_path: {tmp_path / 'answers.jinja'}\n")
    assert any(label != IGNORED for row in trainer.train_dataset["labels"] for label in row)


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["packed", "padded"])
def test_trl_has_the_labels_of_the_study(tmp_path, packing, monkeypatch):
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import SFTTrainer

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    workload = chat_workload(tmp_path, template=chat.WITH_MARKS, packing=packing)
    export = TARGETS["trl"].write(recipe(**workload.to_dict()), "1.16")
    _, args, _, _ = parse(export.files["sft.yaml"], output_dir=str(tmp_path / "out"))
    model = tiny_llama(vocab_size=chat.VOCABULARY)
    args.model_init_kwargs = None
    trainer = SFTTrainer(
        model,
        args,
        train_dataset=Dataset.from_list(chat.conversations()),
        processing_class=AutoTokenizer.from_pretrained(workload.tokenizer),
    )
    by_trl = [label for row in trainer.train_dataset["labels"] for label in row]
    # All conversations of the study, in one part.
    expected = learned_by_the_study(workload, tmp_path / "prepared")
    if packing == "padded":
        of_trl = {
            tuple(label for label in row[1:] if label != IGNORED)
            for row in trainer.train_dataset["labels"]
        }
        of_study = {
            tuple(token for token, is_label in zip(tokens[1:], flags, strict=True) if is_label)
            for tokens, flags in expected
        }
        assert of_trl - {()} == of_study
    else:
        answers = chat_answers(workload)
        assert [label for label in by_trl if label != IGNORED] == answers


def chat_answers(workload):
    """Returns the labels of all conversations in order."""
    from autotune.data.sources import read_documents

    parts = read_documents(workload, cache_folder=workload.tokenizer)
    return [int(token) for tokens in parts.train for token in tokens if token >= 0]


@pytest.mark.parametrize("column", ["messages", "conversations"])
def test_axolotl_learns_the_answers_only(column):
    export = TARGETS["axolotl"].write(recipe(**{**CHAT, "chat_column": column}), "0.19")
    axolotl.read(export, "0.19")  # fails for keys and values that axolotl lacks
    [dataset] = yaml.safe_load(export.files["axolotl.yaml"])["datasets"]
    assert dataset["type"] == "chat_template"
    assert dataset["roles_to_train"] == ["assistant"]
    assert dataset["field_messages"] == column
    assert ("message_property_mappings" in dataset) == (column == "conversations")


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_learns_the_answers_or_says_that_the_user_must_see_to_it(name):
    export = TARGETS[name].write(recipe(**CHAT), TARGETS[name].versions[0])
    told = " ".join(export.notes)
    in_files = any(word in text for text in export.files.values() for word in LEARN_ANSWERS)
    assert in_files or "-100 on all that is no answer" in told
