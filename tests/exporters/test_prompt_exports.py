"""Rows that are put into prompts, in exports: what the trial learned is learned, or it is said."""

import runpy
from typing import Any

import numpy
import pytest

from autotune.data.sources import read_documents
from autotune.exporters import TARGETS
from autotune.exporters.filled_rows import FILE, ROWS
from autotune.exporters.into.dialects import DIALECTS
from autotune.importers.registry import import_file
from autotune.spec.config import TrainingConfig
from autotune.spec.prompt_format import PromptFormat, named, prompt_formats
from autotune.spec.workload import make_workload
from tests.building import chat
from tests.exporters.readers.hugging_face import imported
from tests.exporters.readers.pytorch_script import loaded
from tests.exporters.readers.registry import READERS
from tests.exporters.recipes import recipe
from tests.exporters.test_chat_exports import IGNORED, learned, learned_by_the_study

LENGTH = 512
MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
FORMATS = {
    **{name: named(name) for name in prompt_formats()},
    "all of alpaca": PromptFormat(**{**named("alpaca").to_dict(), "learned": "all"}),
    "a question": PromptFormat(prompt="Q: {question}\nA: ", answer="{answer}"),
    "two columns of one template": PromptFormat(prompt="{topic}: {question} ", answer="{answer}"),
    "braces": PromptFormat(prompt="{{x}} {question} ", answer="{answer}"),
    "more than a column as the answer": PromptFormat(prompt="{question} ", answer="So: {answer}"),
    "three columns": PromptFormat(prompt="{a} {b} {c} ", answer="{d}"),
    "a system": PromptFormat(
        prompt="{question} ", answer="{answer}", system="<{system}> ", default_system="<none> "
    ),
    "a system of all rows": PromptFormat(
        prompt="{question} ", answer="{answer}", system="<{rules}> ", default_system="<none> "
    ),
    "a question by the template": PromptFormat(
        prompt="{question}", answer="{answer}", is_chat=True
    ),
    "earlier turns": PromptFormat(
        prompt="{question}", answer="{answer}", system="{system}", history="past", is_chat=True
    ),
    "messages with other names": PromptFormat(
        messages="talk",
        role="who",
        content="says",
        roles={"person": "user", "machine": "assistant"},
    ),
}


def rows_of(format, number=120):
    """Returns rows that have all columns of a format, and some that lack one."""
    columns = [*format.columns, *format.optional_columns]
    columns = [name for name in columns if name != "rules"]
    rows: list[dict[str, Any]] = []
    for index in range(number):
        row: dict[str, Any] = {
            column: f"{column} of {index}" for column in columns if column != "rules"
        }
        if index % 2:
            row |= {name: "" for name in columns if name in format.optional_columns}
        if format.history:
            row[format.history] = [[f"Earlier {index}?", "Yes."]] if index % 3 else []
        if format.messages:
            row[format.messages] = [
                {"who": "person", "says": f"Hi {index}"},
                {"who": "machine", "says": "Hello"},
            ]
        if format == named("prompt-completion-chat"):
            row = {
                "prompt": [{**MESSAGES[0], "content": f"Hi {index}"}],
                "completion": MESSAGES[1:],
            }
        rows.append(row)
    return rows


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return chat.write_tokenizer(tmp_path_factory.mktemp("tokenizer"), template=chat.WITH_MARKS)


@pytest.fixture
def workload(tmp_path, tokenizer):
    """workload(format) writes rows for a format, and returns how they are trained on."""

    def workload(format, **settings):
        file = chat.write_rows(tmp_path / "rows.jsonl", rows_of(format))
        names = {"dataset": str(file), "tokenizer": str(tokenizer)}
        sizes = {"vocab_size": chat.VOCABULARY, "sequence_length": LENGTH, "packing": "padded"}
        counts = {"evaluation_sequences": 1, "global_batch": 2}
        format = {"prompt_format": format.to_dict()}
        return make_workload("cpu", names, sizes, counts, format, settings)

    return workload


def exported(target, workload):
    config = TrainingConfig(micro_batch_size=workload.global_batch)
    made = recipe(config, **{**workload.to_dict(), "steps": 20})
    return TARGETS[target].write(made, TARGETS[target].versions[0])


# -- scripts ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["padded", "packed"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_script_of_torch_learns_the_samples_of_the_study(name, packing, workload, tmp_path):
    length = LENGTH if packing == "padded" else 64
    of = workload(FORMATS[name], packing=packing, sequence_length=length)
    learned_by_the_study(of, tmp_path / "prepared")
    with loaded(exported("pytorch", of)) as script:
        made = script.read_text(None, script.TEXT)
        kept = script.read_text(str(tmp_path / "prepared"), script.TEXT)
    for one, other in zip(made, kept, strict=True):
        assert numpy.array_equal(one.tokens, other.tokens)


def test_a_script_of_torch_puts_bytes_into_prompts(workload, tmp_path):
    of = workload(named("alpaca"), tokenizer="bytes")
    learned_by_the_study(of, tmp_path / "prepared")
    with loaded(exported("pytorch", of)) as script:
        made, _ = script.read_text(None, script.TEXT)
        kept, _ = script.read_text(str(tmp_path / "prepared"), script.TEXT)
    assert numpy.array_equal(made.tokens, kept.tokens)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_a_trainer_of_transformers_learns_the_samples_of_the_study(name, workload, tmp_path):
    of = workload(FORMATS[name])
    prepared = tmp_path / "prepared"
    learned_by_the_study(of, prepared)
    rows = [numpy.load(prepared / file) for file in ("train.npy", "held_out.npy")]
    expected = {learned(row[:LENGTH]) for row in numpy.concatenate(rows).tolist()}
    export = exported("transformers", of)
    lines = export.files["train.py"].splitlines()
    of_tokenizer = lines[lines.index(next(one for one in lines if "tokenizer = " in one)) :]
    of_tokenizer = of_tokenizer[: next(at for at, one in enumerate(of_tokenizer) if "model" in one)]
    with imported(export.files["autotune_trainer.py"]) as module:
        from transformers import AutoTokenizer

        names = {"AutoTokenizer": AutoTokenizer, "rows": rows_of(FORMATS[name])}
        exec("\n".join(of_tokenizer), names)
        call = next(one for one in lines if "train_dataset=" in one).strip().rstrip(",")
        samples = eval(
            call.removeprefix("train_dataset="), {**names, "sequences": module.sequences}
        )
    made = set()
    for sample in samples:
        labels = sample["labels"].tolist()
        made.add((tuple(sample["input_ids"].tolist()), tuple(one != IGNORED for one in labels[1:])))
    assert made == expected


# -- files of trainers -----------------------------------------------------------------------------


def seen(workload, folder):
    """Returns the tokens and which are labels, of every row, as a study reads them."""
    parts = read_documents(workload, cache_folder=folder / "cache")
    samples = [numpy.asarray(sample) for sample in parts.train]
    return [
        (numpy.where(sample < 0, -2 - sample, sample).tolist(), (sample >= 0).tolist())
        for sample in samples
    ]


@pytest.mark.parametrize("target", ["axolotl", "trl", "llamafactory"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_trainers_file_is_read_back_as_the_rows_of_the_study(
    target, name, workload, tmp_path, monkeypatch
):
    format = FORMATS[name]
    of = workload(format)
    export = exported(target, of)
    for file, text in export.files.items():
        (tmp_path / file).write_text(text)
    monkeypatch.chdir(tmp_path)
    if FILE in export.files:
        assert any(FILE in sentence for sentence in export.before_use)
        runpy.run_path(FILE, run_name="__main__")
    found = import_file(tmp_path / DIALECTS[target].file, {"model": "gpt"})
    settings = {key: value for key, value in found.workload.items() if key != "pretrained"}
    same = {"tokenizer": of.tokenizer, "vocab_size": of.vocab_size, "evaluation_sequences": 1}
    read_back, wanted = make_workload("cpu", settings, same), of
    if target == "trl" and not format.makes_messages:
        # It tokenizes prompt and completion together, and learns both only by an option.
        joined = {**format.to_dict(), "is_joined": True, "learned": "answers"}
        wanted = make_workload("cpu", of.to_dict(), {"prompt_format": joined})
    assert seen(read_back, tmp_path) == seen(wanted, tmp_path)


NATIVE = {
    "axolotl": {
        *(name for name in prompt_formats() if prompt_formats()[name].get("axolotl")),
        *("all of alpaca", "prompt-completion", "a question", "two columns of one template"),
        *("braces", "a system", "a system of all rows", "messages with other names"),
    },
    "trl": {"prompt-completion", "prompt-completion-chat"},
    "llamafactory": {
        *("prompt-completion", "instruction-chat", "a question by the template"),
        *("earlier turns", "messages with other names"),
    },
    "ms-swift": {
        *("prompt-completion", "instruction-chat", "a question by the template"),
        "earlier turns",
    },
    "unsloth": {"prompt-completion"},
}


@pytest.mark.parametrize("target", NATIVE)
def test_a_trainer_reads_the_users_own_rows_where_it_can(target, workload):
    named_files = {
        name
        for name, format in FORMATS.items()
        if FILE not in exported(target, workload(format)).files
    }
    assert named_files == NATIVE[target]


@pytest.mark.parametrize("target", NATIVE)
@pytest.mark.parametrize("name", FORMATS)
def test_the_file_has_no_key_that_its_trainer_lacks(target, name, workload):
    export = exported(target, workload(FORMATS[name]))
    READERS[target](export, TARGETS[target].versions[0])
    assert (ROWS in "".join(export.files.values())) == (FILE in export.files)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["alpaca", "instruction-chat"])
def test_a_target_learns_answers_or_says_that_the_user_must_see_to_it(target, name, workload):
    export = exported(target, workload(FORMATS[name]))
    files, told = "".join(export.files.values()), " ".join(export.notes)
    words = ("answered_prompt", "labelled_tokens", "type: alpaca", FILE, "loss_scale: default")
    in_files = any(word in files or word in export.files for word in words)
    in_files |= '"response": "output"' in files
    assert in_files or "the label -100 on all that is no answer" in told


def test_what_a_conversation_learned_otherwise_is_said(workload):
    format = PromptFormat(**{**FORMATS["earlier turns"].to_dict(), "learned": "last"})
    of = workload(format)
    assert any("the last answer alone" in note for note in exported("trl", of).notes)
    assert "mask_history: true" in exported("llamafactory", of).files["llamafactory.yaml"]
    assert "loss_scale: last_round" in exported("ms-swift", of).files["ms_swift.yaml"]


def test_ms_swift_gets_its_own_names_for_the_columns(workload):
    text = exported("ms-swift", workload(FORMATS["earlier turns"])).files["ms_swift.yaml"]
    for line in ("question: query", "answer: response", "system: system", "past: history"):
        assert line in text
