"""The page and the route that say whether a pasted training fits: texts, progress, one click."""

import asyncio
import html
import json
import re
import sys
import time
from pathlib import Path
from urllib.parse import quote_plus

import pytest

from autotune.errors import InvalidInput, NotAllowed
from autotune.importers.keys_of_file import KeysOfFile
from autotune.importers.registry import TRAINERS, import_text
from autotune.service.pages.fit_text import fit_text
from autotune.service.quick import FAILURE_KEPT_SECONDS, QuickAnswers
from autotune.service.quick_process import _ANSWERS
from autotune.study.prediction.pasted import (
    LARGEST_ADDRESS,
    PastedTraining,
    answer_part,
    ways_to_train,
)
from tests.building.service import BEARER, serving, write_example
from tests.importers.examples import contents, text_of, toml_of

CONFIG = json.dumps(
    {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 256,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
    }
)
TRL = """
model_name_or_path: owner/own
dataset_name: owner/data
learning_rate: 2.0e-4
per_device_train_batch_size: 2
gradient_accumulation_steps: 2
max_length: 128
use_peft: true
lora_r: 8
report_to: none
"""
NAMED = {
    "axolotl": "base_model: owner/own\nsequence_len: 8\nmicro_batch_size: 1\n"
    "gradient_accumulation_steps: 1\nlearning_rate: 1e-4\nnum_epochs: 1\noptimizer: adamw_torch\n"
    "datasets: [{path: owner/data, type: alpaca}]\ndeepspeed: FILE\n",
    "trl": f"{TRL}deepspeed: FILE\n",
    "trl's launcher": f"{TRL}accelerate_config: FILE\n",
    "llamafactory": "model_name_or_path: owner/own\nstage: sft\ndo_train: true\ndataset: data\n"
    "template: llama3\ncutoff_len: 8\noutput_dir: out\ndeepspeed: FILE\n",
    "transformers": '{"output_dir": "out", "per_device_train_batch_size": 1, "deepspeed": "FILE"}',
}
"""Texts of trainers that name another file."""


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    storage = f"sqlite:///{tmp_path_factory.mktemp('fit')}/autotune.db"
    write_example(storage)
    with serving(storage) as client:
        yield client


@pytest.fixture
def get(served):
    return lambda path, **query: served.get(path, params=query, headers=BEARER)


OPENED: list[str] = []
sys.addaudithook(lambda event, values: event == "open" and OPENED.append(str(values[0])))


@pytest.mark.parametrize("trainer", NAMED)
def test_no_file_that_a_pasted_text_names_is_opened(trainer, tmp_path):
    secret = tmp_path / "secret.json"
    secret.write_text("{}")
    OPENED.clear()
    with pytest.raises(InvalidInput):
        import_text(
            NAMED[trainer].replace("FILE", str(secret)),
            {"model": "owner/own", "sequence_length": 8, "global_batch": 1},
        )
    assert str(secret) not in OPENED


@pytest.mark.parametrize("way", ways_to_train())
def test_a_config_has_a_bound_each_way_that_it_can_be_trained(way):
    pasted = PastedTraining(text=CONFIG, way=way)
    answer = answer_part("least", pasted, pasted.read.settings, storage="sqlite://")
    assert answer["least_bytes"] > 0


def test_a_file_that_only_names_its_model_takes_its_config_from_a_second_text():
    pasted = PastedTraining(text=TRL, model_text=CONFIG)
    answer = answer_part("least", pasted, pasted.read.settings, storage="sqlite://")
    assert "2 layers" in answer["workload"]
    assert "adapter lora" in answer["config"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"text": CONFIG, "card": "h1000"}, "h1000"),
        ({"text": CONFIG, "max_mem": "lots"}, "lots"),
        ({"text": CONFIG, "way": "by magic"}, "no way to train"),
        ({"text": CONFIG, "sequence_length": "long"}, "long"),
        ({"text": "\u00e9" * 8_001}, "48,006 characters"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_question_that_is_none_is_a_sentence_on_the_page(get, given, said):
    answer = get("/fit", **given)
    [shown] = re.findall(r'id="problem">(.*)</p>', answer.text)
    assert answer.status_code == 422
    assert said in shown


NO_SIZES = (None, [1], [], {"of": 1}, "many", "", True, 0, -1, 1.5, float("nan"), float("inf"))
MISSING = object()
REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
OF_A_SHAPE = ("intermediate_size", "num_key_value_heads", "max_position_embeddings", "head_dim")
MAY_BE_LISTS = {"num_attention_heads": [1], **{key: [1] for key in OF_A_SHAPE}}
"""Keys of which a config.json may have one for each layer."""


def with_size(key, value):
    content = {name: one for name, one in json.loads(CONFIG).items() if name != key}
    return json.dumps(content if value is MISSING else {**content, key: value})


def wrong_sizes():
    for key in (*REQUIRED, *OF_A_SHAPE):
        for value in NO_SIZES:
            may_be_null = value is None and key in OF_A_SHAPE
            if not may_be_null and not (value == [1] and key in MAY_BE_LISTS):
                yield pytest.param(key, value, id=f"{key} {value}")
    yield from (pytest.param(key, MISSING, id=f"no {key}") for key in REQUIRED)


def test_a_state_space_model_has_no_heads():
    content = {"model_type": "mamba", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 256}
    assert PastedTraining(text=json.dumps(content)).read.settings["model_config"] == content


@pytest.mark.parametrize(("key", "value"), list(wrong_sizes()))
def test_a_size_of_a_config_that_is_none_is_one_sentence(key, value):
    for place in ("text", "model_text"):
        given = {"text": TRL, place: with_size(key, value)}
        with pytest.raises(InvalidInput, match=key) as error:
            _ = PastedTraining(**given).read
        if value is not MISSING:
            assert json.dumps(value).strip('-"') in error.value.message


@pytest.mark.parametrize("name", ["ffn_dim", "num_local_experts", "q_lora_rank", "state_size"])
def test_a_size_that_only_transformers_reads_is_none_of_another_type(name):
    for value in ("many", -1, 1.5, {}):
        with pytest.raises(InvalidInput, match=name):
            _ = PastedTraining(text=with_size(name, value)).read
    for value in (None, 8, [8, 8]):
        assert PastedTraining(text=with_size(name, value)).read.settings["model_config"]


@pytest.mark.parametrize("path", ["/fit", "/fit/parts/least", "/api/v1/will-it-fit/peak"])
def test_what_is_wrong_in_a_text_is_said_at_once(get, path):
    answer = get(path, text=with_size("hidden_size", None))
    assert "hidden_size = null, which is not a size" in html.unescape(answer.text)
    assert answer.status_code == (200 if "parts" in path else 422)
    assert html.unescape(answer.text).count("hidden_size = ") == 1


def numbers_of(trainer, content):
    """Yield the keys that are read of a file and whose value, or default, is a whole number."""
    found = TRAINERS[trainer]
    keys = KeysOfFile(content, found.table, file=Path("file"), options=BESIDE, is_alone=True)
    try:
        found.read(keys)
    except InvalidInput:  # it names another file
        return
    for key, default in found.table.defaults.items():
        of_file = content
        for name in key.split("."):
            of_file = of_file.get(name, default) if isinstance(of_file, dict) else default
        if type(of_file) is int and key in keys.asked - NO_SIZES_OF_TRAINERS:
            yield key


BESIDE = {"model": "owner/own", "model_config": json.loads(CONFIG)}
NO_SIZES_OF_TRAINERS = {"seed_everything", "pissa_iter"}
"""Keys with a number of which nothing is made, or only where another key turns it on."""


def with_key(content, key, value):
    first, _, rest = key.partition(".")
    return {**content, first: with_key(content.get(first, {}), rest, value) if rest else value}


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_size_of_a_trainer_that_is_none_is_one_sentence(trainer):
    suffix = TRAINERS[trainer].suffixes[0]
    checked = 0
    for content in contents(trainer):
        for key in numbers_of(trainer, content):
            for value in ([1], {"of": 1}, "many", -2, float("nan")):
                wrong = with_key(content, key, value)
                if key == "trainer.devices" and value == [1]:
                    continue  # one device, by its number
                if suffix == ".toml" and value != value:
                    continue  # which the writer of the test cannot write
                text = toml_of(wrong) if suffix == ".toml" else text_of(wrong, suffix)
                with pytest.raises(InvalidInput, match=key.rpartition(".")[2]):
                    import_text(text, BESIDE)
                checked += 1
    assert checked


def test_no_model_of_a_folder_for_data_is_read(tmp_path):
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "config.json").write_text(CONFIG)
    text = TRL.replace("owner/own", "secret")
    rules = {"storage": "sqlite://", "data_roots": [str(tmp_path)]}
    order = {"part": "least", "settings": {"text": text}, "rules": rules}
    with pytest.raises(NotAllowed):
        _ANSWERS["bound"](order, lambda what: None)


def test_a_config_is_searched_as_it_was_said_to_be_trained():
    pasted = PastedTraining(text=CONFIG, way="LoRA, bf16 base")
    own = pasted.submission()["own_config"]
    assert (own["adapter"], own["base_weights"], own["micro_batch_size"]) == ("lora", "bf16", 1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("no: trainer", "the file of no trainer"),
        ("{", "not valid JSON"),
        ("a=" + "[" * 3000 + "]" * 3000, "TOML"),
    ],
    ids=lambda value: value[:12],
)
def test_a_text_that_is_no_training_is_a_sentence(text, said):
    with pytest.raises(InvalidInput, match=said):
        _ = PastedTraining(text=text).read


def served_part(get, given):
    """Returns the part with the bound, once it is there."""
    while "hx-trigger" in (answer := get("/fit/parts/least", **given)).text:
        time.sleep(0.1)
    return answer


def test_the_bound_is_on_the_page_a_moment_later(get):
    page = get("/fit", text=CONFIG, card="l4")
    assert re.findall(r"/fit/parts/(\w+)\?", page.text) == ["least", "peak", "front", "longest"]
    assert "It needs at least" in served_part(get, {"text": CONFIG, "card": "l4"}).text


@pytest.mark.slow
def test_a_program_gets_the_bound_as_json(get):
    answer = get("/api/v1/will-it-fit/least", text=CONFIG, card="l4", max_mem="1GiB")
    assert answer.json()["cap_bytes"] == 2**30


def test_one_click_queues_a_search_from_the_training_under_its_cap(served):
    asked = {"text": TRL, "model_text": CONFIG, "max_mem": "1GiB", "key": "one"}
    headers = {**BEARER, "Sec-Fetch-Site": "same-origin"}
    answer = served.post("/fit/search", params=asked, headers=headers, follow_redirects=False)
    assert answer.status_code == 303, answer.text
    search = served.get(f"/api/v1{answer.headers['location']}", headers=BEARER).json()
    assert search["request"]["max_mem"] == 2**30
    assert search["request"]["own_config"]["adapter"] == "lora"
    assert search["request"]["space"] == "finetune"


def test_an_address_can_hold_the_longest_text(get):
    lines = f"# {'x' * 60}\n" * 300
    text = f"{TRL}{lines}"
    while len(quote_plus(text + CONFIG)) > LARGEST_ADDRESS:
        text = text[:-1]
    assert get("/fit", text=text, model_text=CONFIG).status_code == 200


def test_who_may_only_read_asks_and_gets_no_button(served):
    token = served.app.state.service.tokens.add("grace", role="reader")
    headers = {"Authorization": f"Bearer {token}"}
    page = served.get("/fit", params={"text": CONFIG}, headers=headers)
    assert page.status_code == 200
    assert "/fit/search" not in page.text


def test_what_a_process_does_is_told_until_it_answers(tmp_path, monkeypatch):
    (tmp_path / "said.py").write_text(
        "import sys, time\n"
        'print(\'{"progress": "3 of 12"}\', flush=True)\n'
        "while True:\n"
        "    time.sleep(0.05)\n"
        f"    if __import__('pathlib').Path({str(tmp_path / 'go')!r}).exists(): break\n"
        "print('{\"answer\": {}}', end='')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    async def look():
        asked = QuickAnswers(tmp_path, module="said").asked("will-it-fit", {})
        while not asked.progress:
            await asyncio.sleep(0.01)
        (tmp_path / "go").touch()
        return asked.progress, await asked.answer

    assert asyncio.run(look()) == ("3 of 12", {})


def test_a_failure_is_there_for_the_page_that_looks_a_second_later(tmp_path, monkeypatch):
    (tmp_path / "fails.py").write_text(
        'print(\'{"error": "no", "hint": "", "kind": "InvalidInput"}\')'
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    async def look():
        answers = QuickAnswers(tmp_path, module="fails")
        first = answers.asked("will-it-fit", {})
        await asyncio.wait([first.answer])
        return first, answers.asked("will-it-fit", {})

    first, second = asyncio.run(look())
    assert first is second
    assert first.has_failed
    assert FAILURE_KEPT_SECONDS > 1


@pytest.mark.slow
def test_every_part_of_an_answer_can_be_shown():
    pasted = PastedTraining(text=CONFIG, card="l4", max_mem=2**28)
    for part in ("peak", "front", "longest"):
        answer = answer_part(part, pasted, pasted.read.settings, storage="sqlite://")
        shown = fit_text(part, json.loads(json.dumps(answer)))
        assert shown.lead


@pytest.mark.parametrize("text", ["", " \n"])
def test_an_empty_text_is_a_sentence(get, text):
    answer = get("/api/v1/will-it-fit/least", text=text)
    assert (answer.status_code, answer.json()["detail"]) == (422, "text is empty")
    assert "Text is empty" in get("/fit/parts/least", text=text).text
