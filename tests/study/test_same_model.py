"""A study goes on only with the code, files, packages and seeds that it was begun with."""

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from autotune.errors import StudyMismatch
from autotune.execution.local import LocalExecutor
from autotune.spec.provenance import FailedSeed, PerplexitySource
from autotune.spec.script_files import LARGEST_WHOLE_BYTES, check_files_unchanged, input_files
from autotune.spec.search_space import SearchSpace
from autotune.spec.user_code import sha256_of
from autotune.spec.workload import make_workload
from autotune.study.opening.resume import check_same_device, check_same_model, check_same_seeds
from autotune.study.request import SearchRequest
from tests.building.results import mean_of, record, shared_with
from tests.building.studies import config, definition


def test_a_changed_file_is_rejected_and_the_old_content_accepted(tmp_path, one_trial_server):
    file = tmp_path / "mine.py"
    file.write_text("def make(): ...\n")
    workload = make_workload("cpu", {"model": f"{file}:make", "model_sha256": sha256_of(file)})
    stored = definition(workload=workload)
    with LocalExecutor(tmp_path / "work") as executor:
        check_same_model(stored, executor=executor)
        file.write_text("def make(): ...  # otherwise\n")
        with pytest.raises(StudyMismatch, match=r"mine\.py:make is no longer"):
            check_same_model(stored, executor=executor)


# -- what a study is prepared from -----------------------------------------------------------------

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 256,
}


NO_TENSORS = "\x02" + 7 * "\0" + "{}"


@dataclass(frozen=True, kw_only=True)
class Input:
    """Files that a study is prepared from, by what the workload names; each may change."""

    settings: dict[str, object]
    files: dict[str, str]
    others: tuple[str, ...] = ()
    """Files next to them that are not read."""


INPUTS = {
    "text": Input(settings={"dataset": "text.txt"}, files={"text.txt": "a"}, others=("README.md",)),
    "a folder of text": Input(
        settings={"dataset": "rows"},
        files={"rows/a.jsonl": "{}", "rows/deep/b.jsonl": "{}"},
        others=("rows/README.md", "rows/.hidden", "text.txt"),
    ),
    "a folder of very many files": Input(
        settings={"dataset": "rows"}, files={f"rows/{number}.txt": "a" for number in range(101)}
    ),
    "tokenizer": Input(
        settings={"tokenizer": "mine.json"}, files={"mine.json": "{}"}, others=("other.json",)
    ),
    "a folder of a tokenizer": Input(
        settings={"tokenizer": "mine"},
        files={
            "mine/tokenizer.json": "{}",
            "mine/tokenizer_config.json": "{}",
            "mine/chat_template.jinja": "",
        },
        others=("mine/README.md",),
    ),
    "weights": Input(
        settings={"model": "model", "pretrained": True},
        files={"model/model.safetensors": NO_TENSORS},
        others=("model/README.md",),
    ),
}


@pytest.mark.parametrize("kind", INPUTS.values(), ids=INPUTS)
def test_a_changed_or_missing_input_is_named_and_what_lies_next_to_it_may_change(
    kind, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for name, text in {**kind.files, **dict.fromkeys(kind.others, "")}.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
    if "model" in kind.settings:
        Path("model/config.json").write_text(json.dumps(CONFIG))
    workload = make_workload("cpu", kind.settings)
    workload = replace(workload, script_files_after_apply=input_files(workload))
    for name in kind.others:
        Path(name).write_text("changed")
    check_files_unchanged(workload)
    for name in [*kind.files][:3]:
        file = Path(name)
        shutil.copy(file, "kept")
        place = f"({name}|{file.parent}/)"
        file.write_text("changed")
        with pytest.raises(StudyMismatch, match=rf"^\S*{place} has changed since the study"):
            check_files_unchanged(workload)
        file.unlink()
        with pytest.raises(StudyMismatch, match=rf"^\S*{place}.* (cannot be read|has changed)"):
            check_files_unchanged(workload)
        shutil.copy("kept", file)
    check_files_unchanged(workload)


def test_of_a_very_large_text_the_size_and_pieces_of_it_are_looked_at(tmp_path):
    file = tmp_path / "text.txt"
    file.touch()
    with file.open("r+b") as opened:  # takes no room on the disk
        opened.truncate(LARGEST_WHOLE_BYTES + 1000)
    workload = make_workload("cpu", {"dataset": str(file)})
    workload = replace(workload, script_files_after_apply=input_files(workload))
    check_files_unchanged(workload)
    with file.open("ab") as opened:
        opened.write(b"1")
    with pytest.raises(StudyMismatch, match="has changed since"):
        check_files_unchanged(workload)


# -- packages --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("package", "techniques", "settings"),
    [
        ("torch", {}, {}),
        ("transformers", {}, {"model": "model"}),
        ("peft", {"adapter": ("none", "lora")}, {}),
        ("bitsandbytes", {"base_weights": ("bf16", "nf4"), "adapter": ("lora",)}, {}),
        ("torchao", {"precision": ("fp32", "fp8")}, {}),
        ("torchao", {"optimizer": ("adamw", "adamw-8bit")}, {}),
        ("deepspeed", {"engine": ("torch", "deepspeed")}, {}),
        ("kernels-of-mine", {}, {"packages": {"kernels-of-mine": "1.0"}}),
    ],
)
def test_a_study_goes_on_only_with_the_versions_of_what_computes_in_it(
    package, techniques, settings, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps(CONFIG))
    packages = settings.pop("packages", None)
    workload = replace(make_workload("cpu", settings), packages=packages)
    stored = definition(workload=workload, space=SearchSpace(name="one", techniques=techniques))
    versions = dict.fromkeys(("torch", "transformers", "peft", "bitsandbytes"), "1.0")
    versions |= dict.fromkeys(("torchao", "deepspeed"), "1.0")
    device = replace(stored.device, versions=versions)
    stored = replace(stored, device=device)
    if packages is None:
        check_same_device(stored, device)
        device = replace(device, versions={**versions, package: "2.0"})
    with pytest.raises(StudyMismatch, match=f"measured on {package} 1.0, here is (2.0|none)"):
        check_same_device(stored, device)


def test_a_study_on_a_gpu_goes_on_only_with_the_same_settings_of_the_allocator():
    stored = definition()
    device = replace(stored.device, device="cuda:0")
    stored = replace(stored, device=device)
    check_same_device(stored, device)
    other = replace(device, versions={**device.versions, "allocator": "max_split_size_mb:128"})
    with pytest.raises(StudyMismatch, match="PYTORCH_ALLOC_CONF: none, here is max_split"):
        check_same_device(stored, other)


def test_a_package_that_no_trial_uses_may_change_and_one_that_is_not_known_is_not_missed():
    versions = {"torch": "1.0", "peft": "1.0"}
    stored = definition()
    stored = replace(stored, device=replace(stored.device, versions=versions))
    check_same_device(stored, replace(stored.device, versions={"torch": "1.0", "peft": "2.0"}))
    adapters = SearchSpace(name="one", techniques={"adapter": ("lora",)})
    earlier = replace(
        stored, space=adapters, device=replace(stored.device, versions={"torch": "1.0"})
    )
    check_same_device(earlier, stored.device)


# -- seeds -----------------------------------------------------------------------------------------

FAILED = PerplexitySource(
    kind="measured", seeds=2, failed_seeds=(FailedSeed(seed=2, reason="crashed"),)
)


@pytest.mark.parametrize(
    ("source", "seeds"),
    [(PerplexitySource(kind="measured"), 1), (mean_of(3), 3), (FAILED, 3)],
    ids=["one", "several", "one of them failed"],
)
def test_a_study_keeps_its_number_of_seeds_and_rejects_another(source, seeds):
    records = [
        record(0, config=config(0), perplexity_source=shared_with(1)),
        record(1, config=config(1), perplexity_source=source),
    ]
    stored = definition()
    for wanted in (None, seeds):
        request = SearchRequest(perplexity_seeds=wanted)
        assert check_same_seeds(request, stored, records) == seeds
    with pytest.raises(StudyMismatch, match=f"are of --seeds {seeds}, and one of --seeds 4"):
        check_same_seeds(SearchRequest(perplexity_seeds=4), stored, records)
    assert check_same_seeds(SearchRequest(perplexity_seeds=4), stored, []) is None
