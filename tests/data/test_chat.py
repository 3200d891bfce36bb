"""Conversations as training data: the tokens of the template, and labels on the answers only."""

import json

import numpy
import pytest
from tokenizers import Tokenizer

from autotune.data.batches import TokenSequences
from autotune.data.sources import read_documents
from autotune.data.token_file import TextFacts
from autotune.data.tokens import write_tokens
from autotune.errors import InvalidDataset, InvalidInput
from autotune.shipped.chat_template import (
    ChatTemplate,
    InvalidConversation,
    chat_template_of,
    conversation_of,
)
from autotune.shipped.labels import IGNORED_LABEL
from autotune.spec.workload import make_workload
from tests.building import chat

USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Hello wörld 🙂 "}
FIRST = [USER, ANSWER]
LONGER = [
    {"role": "system", "content": "Be nice."},
    *FIRST,
    {"role": "user", "content": "Some code?"},
    {"role": "assistant", "content": "Yes:\n    pass"},
    {"role": "user", "content": "Thanks"},
]
SETTINGS = {
    "sequence_length": 48,
    "global_batch": 4,
    "evaluation_sequences": 4,
    "packing": "padded",
    "vocab_size": chat.VOCABULARY,
}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """{template: folder of a tokenizer with it}"""
    return {
        name: chat.write_tokenizer(tmp_path_factory.mktemp(name), template=template)
        for name, template in chat.TEMPLATES.items()
    }


@pytest.fixture
def write(tmp_path, tokenizers):
    """write(rows) writes the tokens of the rows; returns their folder."""

    def write(rows, *, template="chatml", **settings):
        file = chat.write_rows(tmp_path / "chat.jsonl", rows)
        names = {"dataset": str(file), "tokenizer": str(tokenizers[template])}
        workload = make_workload("cpu", SETTINGS, names, settings)
        folder = tmp_path / "written"
        folder.mkdir()
        parts = read_documents(workload, cache_folder=tmp_path / "cache")
        write_tokens(parts, workload, folder=folder)
        return folder

    return write


def samples(folder, name="train.npy", **settings):
    """Returns (tokens, labels) of every sequence, without padding."""
    length = settings.get("sequence_length", SETTINGS["sequence_length"])
    sequences = TokenSequences(folder / name, sequence_length=length)
    batch = sequences.batch(range(len(sequences)))
    return batch.tokens, batch.labels


def rows_like(messages, number=80):
    """Returns rows of these messages, each with a number in its first one."""
    first, *others = messages
    return [
        {"messages": [{**first, "content": f"{index} {first['content']}"}, *others]}
        for index in range(number)
    ]


def learned(template, messages):
    """Returns the texts of the answers by a template without a tokenizer."""
    made = ChatTemplate(
        text=template, special_tokens={"bos_token": chat.BEGIN, "eos_token": chat.END}
    )
    rendered, answers = made.with_answers(conversation_of(messages), tools=None)
    return [rendered[start:end] for start, end in answers]


# -- which text is learned -------------------------------------------------------------------------

HELLO, CODE = "Hello wörld 🙂", "Yes:\n    pass"
LEARNED = {
    "like ChatML": (chat.LIKE_CHATML, [f"{HELLO} {chat.END}\n", f"{CODE}{chat.END}\n"]),
    "like Llama 3": (chat.LIKE_LLAMA, [f"{HELLO}{chat.END}", f"{CODE}{chat.END}"]),
    "marked": (chat.WITH_MARKS, [f"{HELLO} {chat.END}", f"{CODE}{chat.END}"]),
    "without a prompt": (chat.WITHOUT_PROMPT, [f"{HELLO} {chat.END}", f"{CODE}{chat.END}"]),
}


@pytest.mark.parametrize(("template", "answers"), LEARNED.values(), ids=LEARNED)
def test_the_answers_are_learned_with_the_end_of_their_turn(template, answers):
    assert learned(template, LONGER) == answers


NOT_LEARNED = {"weight": {"weight": 0}, "train": {"train": False}, "loss": {"loss": False}}


@pytest.mark.parametrize("excluded", NOT_LEARNED.values(), ids=NOT_LEARNED)
@pytest.mark.parametrize("template", [chat.LIKE_CHATML, chat.WITH_MARKS], ids=["plain", "marked"])
def test_an_answer_that_its_file_excludes_is_read_and_not_learned(template, excluded):
    messages = [*LONGER[:2], {**LONGER[2], **excluded}, *LONGER[3:]]
    [answer] = learned(template, messages)
    assert CODE in answer
    assert learned(template, [USER, {**ANSWER, **excluded}]) == []


@pytest.mark.parametrize("excluded", NOT_LEARNED.values(), ids=NOT_LEARNED)
def test_a_file_of_which_only_some_messages_have_a_weight_is_read(write, excluded):
    rows = [
        {"messages": [USER, {**ANSWER, **excluded}, {**USER, "content": f"{number}?"}, ANSWER]}
        for number in range(80)
    ]
    tokens, labels = samples(write(rows, template="marks", sequence_length=96), sequence_length=96)
    [end] = set(tokens[:, -1].tolist())
    answers = (labels == end).sum(dim=1)
    assert (answers == 1).all()


def test_an_answer_of_half_a_weight_is_rejected():
    with pytest.raises(InvalidConversation, match=r"weight 0\.5"):
        learned(chat.LIKE_CHATML, [USER, {**ANSWER, "weight": 0.5}])


def test_a_conversation_may_begin_with_an_answer():
    assert learned(chat.LIKE_LLAMA, [ANSWER, USER]) == [f"{HELLO}{chat.END}"]


def test_an_answer_as_short_as_a_letter_of_its_header_is_found():
    said = [USER, {"role": "assistant", "content": "A"}]
    assert learned(chat.WITHOUT_PROMPT, said) == [f"A{chat.END}"]


THINKING = chat.LIKE_CHATML.replace(
    "message.content",
    "('<think></think>' if loop.last and message.role == 'assistant' else '') + message.content",
)
ENDED = chat.LIKE_LLAMA + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"


@pytest.mark.parametrize("template", [THINKING, ENDED], ids=["thoughts", "end of the text"])
def test_an_earlier_answer_may_lack_what_only_the_last_has(template):
    first, second = learned(template, LONGER[:-1])
    assert first.strip() == f"{HELLO} {chat.END}" or first == f"{HELLO}{chat.END}"
    assert CODE in second


def test_a_template_that_forgets_earlier_answers_is_rejected():
    with pytest.raises(InvalidConversation, match="renders it differently") as raised:
        learned(chat.FORGETTING, LONGER)
    assert "{% generation %}" in raised.value.hint


def test_a_template_that_leaves_the_answers_out_is_rejected():
    without = "{% for message in messages %}{{ '<|turn|>' + message.role }}{% endfor %}"
    with pytest.raises(InvalidConversation, match=r"cannot be told|no answer"):
        learned(without, FIRST)


def test_the_default_one_of_named_templates_is_used():
    named = [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]
    found = chat_template_of({"chat_template": named}, file_text=None)
    assert found is not None
    assert found.text == "d"


def test_a_template_file_comes_before_the_settings():
    found = chat_template_of({"chat_template": "old"}, file_text="new")
    assert found is not None
    assert found.text == "new"


def test_tools_are_shown_to_the_template(write, tmp_path, tokenizers):
    template = "{{ tools | map(attribute='name') | join }}" + chat.LIKE_CHATML
    tokenizers["tools"] = chat.write_tokenizer(tmp_path / "tools", template=template)
    tools = json.dumps([{"name": "qqq"}])
    rows = [{**row, "tools": tools} for row in chat.conversations(60)]
    tokens, _ = samples(write(rows, template="tools"))
    tokenizer = Tokenizer.from_file(str(tokenizers["tools"] / "tokenizer.json"))
    assert tokenizer.decode(tokens[0].tolist()).startswith("qqq")


# -- which tokens are learned ----------------------------------------------------------------------


def test_the_labels_of_a_template_with_marks_are_those_of_transformers(write, tokenizers):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizers["marks"])
    rows = rows_like(FIRST)
    made = tokenizer.apply_chat_template(
        [row["messages"] for row in rows], return_dict=True, return_assistant_tokens_mask=True
    )
    expected = []
    for ids, mask in zip(made["input_ids"], made["assistant_masks"], strict=True):
        label = [token if one else IGNORED_LABEL for token, one in zip(ids, mask, strict=True)]
        expected.append(label[1 : SETTINGS["sequence_length"]])
    _, labels = samples(write(rows, template="marks"))
    for row in labels.tolist():
        assert any(row[: len(one)] == one for one in expected)


@pytest.mark.parametrize("template", ["chatml", "llama"])
def test_the_labels_of_a_template_without_marks_are_the_tokens_of_the_answers(
    write, tokenizers, template
):
    tokenizer = Tokenizer.from_file(str(tokenizers[template] / "tokenizer.json"))
    _, labels = samples(
        write(rows_like(LONGER), template=template, sequence_length=96),
        sequence_length=96,
    )
    read = tokenizer.decode([x for x in labels[0].tolist() if x >= 0], skip_special_tokens=False)
    [answers] = [said for text, said in LEARNED.values() if text == chat.TEMPLATES[template]]
    assert read == "".join(answers)


def test_rows_of_sharegpt_are_the_same_conversations(write, tmp_path):
    rows = chat.conversations(100)
    tokens, labels = samples(write(rows))
    (tmp_path / "written").rename(tmp_path / "first")
    others = samples(write(chat.as_sharegpt(rows)))
    assert (others[0] == tokens).all()
    assert (others[1] == labels).all()


def test_a_system_column_is_the_first_message(write, tmp_path):
    rows = rows_like(FIRST)
    first = {"role": "system", "content": "Be nice."}
    tokens, labels = samples(write([{"messages": [first, *row["messages"]]} for row in rows]))
    (tmp_path / "written").rename(tmp_path / "first")
    beside = samples(write([{**row, "system": "Be nice."} for row in rows]))
    # Which rows are held out is decided by a hash of their tokens, which are the same.
    assert (beside[0] == tokens).all()
    assert (beside[1] == labels).all()


@pytest.mark.parametrize("names", [("human", "gpt"), ("USER", "ASSISTANT"), ("user", "bot")])
def test_roles_have_the_names_of_other_files(names):
    said = [{"from": name, "value": "Hi"} for name in names]
    assert [message["role"] for message in conversation_of(said)] == ["user", "assistant"]


def test_content_may_be_a_list_of_texts(write):
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    assert conversation_of([USER, {"role": "assistant", "content": parts}])[1]["content"] == "Hello"


def test_messages_in_an_object_of_lists_are_the_same():
    said = {"role": ["user", "assistant"], "content": ["Hi", "Hello"]}
    assert conversation_of(said) == [USER, {"role": "assistant", "content": "Hello"}]


def test_conversations_of_any_name_are_read_by_their_name(write):
    rows = [{"dialogue": row["messages"], "text": "a"} for row in chat.conversations(60)]
    _, labels = samples(write(rows, text_column="dialogue"))
    assert (labels >= 0).any(dim=1).all()


# -- padded and packed -----------------------------------------------------------------------------


def test_a_conversation_whose_answers_are_cut_off_is_left_out(write):
    long = {"role": "user", "content": "word " * 100}
    rows = [{"messages": [long, ANSWER]}, *chat.conversations(60)]
    _, labels = samples(write(rows))
    assert (labels >= 0).any(dim=1).all()


def test_packed_conversations_are_one_stream(write, tokenizers):
    rows = chat.conversations(60)
    folder = write(rows, packing="packed")
    sequences = numpy.load(folder / "train.npy")
    assert (sequences[1:, 0] == sequences[:-1, -1]).all()
    decoded = numpy.where(sequences < 0, -2 - sequences, sequences)
    tokenizer = Tokenizer.from_file(str(tokenizers["chatml"] / "tokenizer.json"))
    text = tokenizer.decode(decoded[:, :-1].ravel().tolist(), skip_special_tokens=False)
    assert text.count("What comes after") > 30
    assert f"{chat.END}\n{chat.TURN}" in text


def test_packed_labels_are_answers_only(write):
    tokens, labels = samples(write(chat.conversations(60), packing="packed"))
    is_label = labels != IGNORED_LABEL
    assert 0 < is_label.float().mean() < 0.6
    assert (labels[is_label] == labels[is_label].clamp(min=0)).all()
    assert (tokens >= 0).all()
    assert (tokens[:, 1:][is_label[:, :-1]] == labels[:, :-1][is_label[:, :-1]]).all()


def test_no_packed_sequence_is_without_a_label(write):
    long = {"role": "user", "content": "word " * 200}
    rows = rows_like([long, ANSWER])
    _, labels = samples(write(rows, packing="packed", sequence_length=16), sequence_length=16)
    assert len(labels) >= 4
    assert (labels >= 0).any(dim=1).all()


def test_too_few_answers_say_how_many_were_cut_off(write):
    long = {"role": "user", "content": "word " * 100}
    with pytest.raises(InvalidDataset, match=r"\d+ without a label in their 48 tokens") as raised:
        write(rows_like([long, ANSWER]))
    assert "--seq-len" in raised.value.hint


def test_a_small_set_is_told_how_many_sequences_it_can_hold_out(write, tmp_path):
    with pytest.raises(InvalidDataset, match=r"held-out part .* has \d+ samples and 64") as raised:
        write(rows_like(FIRST, 200), evaluation_sequences=64)
    number = int(raised.value.hint.split("--eval-sequences ")[1].split(",")[0])
    assert 0 < number < 64
    (tmp_path / "written").rename(tmp_path / "first")
    write(rows_like(FIRST, 200), evaluation_sequences=number)


def test_bytes_per_token_of_answers_are_unknown(write):
    assert TextFacts.read(write(chat.conversations(60))).bytes_per_token is None


# -- what cannot be learned from -------------------------------------------------------------------

IMAGE = {"type": "image", "url": "a.png"}
INVALID = {
    "a text": "Hi",
    "texts": ["Hi", "Hello"],
    "nothing": [],
    "no row": None,
    "an unknown role": [{"role": "narrator", "content": "Once"}, ANSWER],
    "no role": [{"content": "Hi"}, ANSWER],
    "no answer": [USER],
    "an image": [{"role": "user", "content": [IMAGE]}, ANSWER],
    "a number": [{"role": "user", "content": 3}, ANSWER],
    "no content": [USER, {"role": "assistant", "content": None}],
}


@pytest.mark.parametrize("row", INVALID.values(), ids=INVALID)
def test_a_row_that_is_no_conversation_has_a_sentence_and_a_hint(row):
    with pytest.raises(InvalidConversation) as raised:
        conversation_of(row)
    assert raised.value.hint


def test_the_row_is_named(write):
    rows = [*chat.conversations(3), {"messages": [USER]}]
    with pytest.raises(InvalidDataset, match=r"row 4 of dataset .* no message of the assistant"):
        write(rows)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('only two turns') }}", "only two turns"),
        ("{% for", ""),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{% for i in range(10**9) %}{% endfor %}", "[Rr]ange"),
    ],
)
def test_a_template_that_fails_has_a_sentence(template, reason):
    with pytest.raises(InvalidConversation, match=f"not rendered by the chat template.*{reason}"):
        learned(template, FIRST)


def test_a_tokenizer_without_a_template_is_rejected(tmp_path, write, tokenizers):
    tokenizers["none"] = chat.write_tokenizer(tmp_path / "none", template=None)
    with pytest.raises(InvalidInput, match="has no chat template") as raised:
        write(chat.conversations(9), template="none")
    assert "chat_template.jinja" in raised.value.hint


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_a_tokenizer_that_is_built_in_cannot_render_conversations(write, tokenizer):
    with pytest.raises(InvalidInput, match=f"tokenizer '{tokenizer}' has no chat template"):
        write(chat.conversations(9), tokenizer=tokenizer)


def test_a_named_column_of_text_is_taken_before_the_conversations(write):
    rows = [
        {**row, "text": f"some text {index} " * 20}
        for index, row in enumerate(chat.conversations(60))
    ]
    tokens, _ = samples(write(rows, tokenizer="bytes", text_column="text"))
    assert bytes(tokens[0].tolist()).startswith(b"some text")
