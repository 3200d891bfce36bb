"""Searches of three scripts that others wrote: `python studies/your_script/real_scripts.py`.

nanoGPT, the example run_clm_no_trainer of transformers, and Stanford Alpaca with its Trainer. Each
is fetched from GitHub at a named commit into a folder outside this repository, checked by SHA-256,
and changed by the lines below, which are those of docs/scripts.md. `--sources FOLDER` takes files
that were fetched before, at FOLDER/REPOSITORY/PATH.

Each script is searched under a cap below its plain training's peak, and then once more with
`--full-trainings --seeds 3`. The picks of both are compared, the first is exported, and the script
trains with the export: its peak is compared with the promised one. Writes `real_scripts.json.xz`
beside itself, or where `--out` says. About half an hour on two CPU cores.

Text, tokenizer and models are made here, so that nothing but the scripts is fetched.
"""

import argparse
import datetime
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shlex
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.shipped import python_docs
from studies.compressed import read_json, write_json

HERE = Path(__file__).resolve().parent
SPACE = HERE / "real_scripts.toml"
FULL = ("--full-trainings", "--seeds", "3")


@dataclass(frozen=True)
class Edit:
    """Lines of ours in a file of others."""

    after: int
    """The line of the original after which `text` is inserted."""
    text: str
    instead_of: int = 0
    """How many lines of the original `text` replaces."""


@dataclass(frozen=True, kw_only=True)
class RealScript:
    """A script at a commit, our lines in it, and what it needs to train for seconds."""

    repository: str
    commit: str
    files: Mapping[str, str]
    """{path: SHA-256}."""
    script: str
    edits: tuple[Edit, ...]
    """The lines that docs/scripts.md names."""
    for_newer_packages: tuple[Edit, ...] = ()
    """What the script needs with the packages that are installed, with or without a search."""
    unused_modules: tuple[str, ...] = ()
    """Files that stand in for modules which it imports, does not use, and does not find."""
    prepare: Callable[[Path, Path], None]
    """prepare(folder of the repository, folder of models and texts)."""
    arguments: tuple[str, ...]
    global_batch: int
    steps: int
    trials: int
    """The baseline and the configurations of the space that it can have: all searches try these."""
    works_in: str
    """The folder that it is started in: that of its `repository`, or one of its own."""
    max_mem: str

    @property
    def name(self) -> str:
        return self.repository.split("/")[1]


def prepare_nano_gpt(repository: Path, _given: Path) -> None:
    data = repository / "data" / "shakespeare_char"
    text = "\n".join(python_docs.standard_library_texts()).encode("ascii", "ignore").decode()
    (data / "input.txt").write_text(text[:400_000])
    run([sys.executable, str(data / "prepare.py")], folder=repository)


def prepare_nothing(_repository: Path, _given: Path) -> None:
    pass


NANO_GPT = RealScript(
    repository="karpathy/nanoGPT",
    commit="3adf61e154c3fe3fca428ad6bc3818b27a3b8291",
    files={
        "train.py": "413bd97b40bb400a2a0d01230e2946f056c263ebac1b7281c2367d964a123085",
        "model.py": "7c01703240dbec5d554527dc666e35b3df8391d0b117fddc07afcf325a21d11c",
        "configurator.py": "5cc23aca26b4ab3c0d9e5f82740f4781f9444f42718c15abcee70d93c5aabe8f",
        "config/train_shakespeare_char.py": (
            "9b41cdfb2c917259d796a8184d835221a349c23cd18a0a63b46da431d95d9c05"
        ),
        "data/shakespeare_char/prepare.py": (
            "d5fbea0686d146748cf36017d6c34136a2fe9c41f065f1429529ad55a992c692"
        ),
    },
    script="train.py",
    edits=(
        Edit(30, "import autotune"),
        Edit(
            78,
            "sequences = gradient_accumulation_steps * batch_size\n"
            "batch_size = autotune.current_config(global_batch=sequences).micro_batch_size\n"
            "gradient_accumulation_steps = sequences // batch_size",
        ),
        Edit(202, "model, optimizer = autotune.apply(model, optimizer)"),
        Edit(291, "    step_loss = 0.0"),
        Edit(301, "        step_loss += loss.detach()"),
        Edit(
            314,
            "    is_due = (iter_num + 1) % eval_interval == 0\n"
            '    evaluated = estimate_loss()["val"] if is_due else None\n'
            "    autotune.report(\n"
            "        tokens=tokens_per_iter, loss=step_loss, evaluation_loss=evaluated\n"
            "    )",
        ),
    ),
    unused_modules=("data/shakespeare_char/requests.py",),
    prepare=prepare_nano_gpt,
    arguments=(
        "config/train_shakespeare_char.py",
        "--device=cpu",
        "--compile=False",
        "--dtype=float32",
        "--n_layer=4",
        "--n_head=4",
        "--n_embd=128",
        "--block_size=64",
        "--batch_size=16",
        "--eval_interval=20",
        "--eval_iters=10",
    ),
    global_batch=16,
    steps=20,
    trials=6,
    works_in="repository",
    max_mem="50MiB",
)

RUN_CLM = RealScript(
    repository="huggingface/transformers",
    commit="8ac2b916b042b1f78b75c9eb941c0f5d2cdd8e10",  # v4.57.0
    files={
        "examples/pytorch/language-modeling/run_clm_no_trainer.py": (
            "1c562c82db677e1b0a96f00facc67d3f205ea2136402b6bf1990816eb8df224c"
        )
    },
    script="examples/pytorch/language-modeling/run_clm_no_trainer.py",
    edits=(
        Edit(48, "import autotune"),
        Edit(
            269,
            "    sequences = args.per_device_train_batch_size * args.gradient_accumulation_steps\n"
            "    micro_batch = autotune.current_config(global_batch=sequences).micro_batch_size\n"
            "    args.per_device_train_batch_size = micro_batch\n"
            "    args.gradient_accumulation_steps = sequences // micro_batch",
        ),
        Edit(
            521,
            "    model, optimizer = autotune.apply(model.to(accelerator.device), optimizer)",
        ),
        Edit(614, "    step_loss = 0.0"),
        Edit(
            631,
            "                step_loss += loss.detach() / args.gradient_accumulation_steps",
        ),
        Edit(
            639,
            "                autotune.report(tokens=sequences * block_size, loss=step_loss)\n"
            "                step_loss = 0.0",
        ),
    ),
    # accelerate 1.15 has no DistributedType.TPU any more.
    for_newer_packages=(
        Edit(544, "    if accelerator.distributed_type == DistributedType.XLA:", instead_of=1),
    ),
    prepare=prepare_nothing,
    arguments=(
        "--model_name_or_path=../given/llama",
        "--train_file=../given/text.txt",
        "--block_size=64",
        "--per_device_train_batch_size=16",
        "--learning_rate=1e-3",
        "--max_train_steps=100",
        "--seed=0",
    ),
    global_batch=16,
    steps=12,
    trials=7,
    works_in="run",
    max_mem="56MiB",
)

ALPACA = RealScript(
    repository="tatsu-lab/stanford_alpaca",
    commit="761dc5bfbdeeffa89b8bff5d038781a4055f796a",
    files={
        "train.py": "8a399e3c940515bcb72b8f7f564b3b0976ada6752fc5e8f5a737d8a33ad3981e",
        "utils.py": "018e825342f2774a15514a9c715540e8d78827faf54de57a622812bea7c2dcdb",
    },
    script="train.py",
    edits=(
        Edit(24, "import autotune"),
        # Trainer of transformers 5 calls the tokenizer `processing_class`.
        Edit(
            214,
            "    trainer = Trainer(\n"
            "        model=model, processing_class=tokenizer, args=training_args,\n"
            "        callbacks=[autotune.TrainerCallback(training_args)], **data_module\n"
            "    )",
            instead_of=1,
        ),
    ),
    unused_modules=("openai.py",),
    prepare=prepare_nothing,
    arguments=(
        "--model_name_or_path=../given/llama",
        "--data_path=../given/instructions.json",
        "--output_dir=out",
        "--per_device_train_batch_size=8",
        "--learning_rate=1e-3",
        "--model_max_length=192",
        "--max_steps=100",
        "--save_strategy=no",
        "--report_to=none",
        "--use_cpu=True",
    ),
    global_batch=8,
    steps=12,
    trials=6,
    works_in="run",
    max_mem="70MiB",
)

SCRIPTS = {one.name: one for one in (NANO_GPT, RUN_CLM, ALPACA)}


class NotFetched(Exception):
    """A file that cannot be had, or that is not the one that was changed and measured here."""


def edited(original: str, edits: tuple[Edit, ...]) -> str:
    """Returns `original` with our lines."""
    lines = original.splitlines(keepends=True)
    for one in sorted(edits, key=lambda edit: edit.after, reverse=True):
        end = one.after + one.instead_of
        lines[one.after : end] = [f"{one.text}\n"]
    return "".join(lines)


def fetch(script: RealScript, path: str, sources: Path | None) -> bytes:
    """Returns a file of the repository. Raises NotFetched."""
    if sources is not None:
        origin = str(sources / script.name / path)
    else:
        base = "https://raw.githubusercontent.com"
        origin = f"{base}/{script.repository}/{script.commit}/{path}"
    try:
        if sources is not None:
            content = Path(origin).read_bytes()
        else:
            with urllib.request.urlopen(origin, timeout=60) as answer:
                content = answer.read()
    except OSError as error:
        raise NotFetched(f"{origin} cannot be read: {error}") from None
    if hashlib.sha256(content).hexdigest() != script.files[path]:
        raise NotFetched(f"{origin} is not the file of commit {script.commit}")
    return content


def set_up(script: RealScript, folder: Path, sources: Path | None) -> Path:
    """Fetches and changes the script; returns the folder to start it in. Raises NotFetched."""
    repository = folder / script.name
    for path in script.files:
        content = fetch(script, path, sources).decode()
        if path == script.script:
            content = edited(content, script.edits + script.for_newer_packages)
        target = repository / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(content)
    for path in script.unused_modules:
        stand_in = repository / path
        if importlib.util.find_spec(stand_in.stem) is None:
            stand_in.write_text("class openai_object:\n    OpenAIObject = object\n")
    script.prepare(repository, folder / "given")
    if script.works_in == "repository":
        return repository
    work = folder / f"{script.name}-run"
    work.mkdir(exist_ok=True)
    return work


def make_given(folder: Path) -> None:
    """Makes a text, instructions, and a Llama of 1 M parameters with its tokenizer."""
    # Only these scripts need transformers.
    import torch
    from tokenizers import ByteLevelBPETokenizer
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        PreTrainedTokenizerFast,
    )

    folder.mkdir(exist_ok=True)
    documents = python_docs.standard_library_texts()
    lines = [line for document in documents for line in document.splitlines() if line.strip()]
    (folder / "text.txt").write_text("\n".join(lines[:6000]))
    instructions = [
        {"instruction": f"Explain: {line[:40]}", "input": "", "output": document[:200]}
        for document in documents
        if (line := document.strip().partition("\n")[0])
    ]
    (folder / "instructions.json").write_text(json.dumps(instructions))
    learned = ByteLevelBPETokenizer()
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    learned.train_from_iterator(documents, vocab_size=1000, special_tokens=[*special.values()])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=learned._tokenizer, model_max_length=256, **special
    )
    tokenizer.save_pretrained(folder / "llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=256,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "llama")


def run(command: list[str], *, folder: Path, **environment: str) -> str:
    """Runs a command in `folder`; returns what it printed. Ends this program where it fails."""
    ended = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode != 0:
        print(ended.stdout, ended.stderr, sep="\n", file=sys.stderr)
        raise SystemExit(f"{shlex.join(command)} ended with {ended.returncode}")
    return ended.stdout


def search(script: RealScript, work: Path, *, name: str, options: tuple[str, ...]) -> Any:
    """Runs one search, shows what it printed, and returns its summary."""
    words = ["search", "--script", script_path(script, work), "--name", name, *options]
    words += ["--global-batch", str(script.global_batch), "--steps", str(script.steps)]
    words += ["--space", str(SPACE), "--max-mem", script.max_mem, "--trials", str(script.trials)]
    words += ["--fresh", "--device", "cpu", "--", *script.arguments]
    print(run([sys.executable, "-m", "autotune", *words], folder=work), flush=True)
    show = [sys.executable, "-m", "autotune", "show", name, "--json"]
    result = json.loads(run(show, folder=work))
    typed = [word.replace(str(SPACE), SPACE.name) for word in words]
    return {
        "command": shlex.join(["autotune", *typed]),
        "seconds_of_trials": round(sum(trial["seconds"] for trial in result["trials"])),
        "pick": result["pick"],
        "pick_reason": result["pick_reason"],
        "trials": [summary(trial) for trial in result["trials"]],
    }


def script_path(script: RealScript, work: Path) -> str:
    return os.path.relpath(work.parent / script.name / script.script, work)


KEPT = (
    "number",
    "name",
    "outcome",
    "message",
    "peak_memory_bytes",
    "tokens_per_second",
    "tokens_per_second_spread",
    "perplexity",
    "perplexity_spread",
    "perplexity_source",
)
TECHNIQUES = ("precision", "checkpointing", "compile", "optimizer_fusion", "micro_batch_size")


def summary(trial: Mapping[str, Any]) -> dict[str, Any]:
    techniques = {name: trial["config"][name] for name in TECHNIQUES}
    return {**{name: trial[name] for name in KEPT}, "config": techniques}


def compare(quick: Mapping[str, Any], full: Mapping[str, Any]) -> dict[str, Any]:
    """Compares two picks: `same`, or by how much their speeds differ in each search.

    `within_noise` is true where, in either search, the faster one is not faster by more than the
    spreads of both speeds together.
    """
    picks = [search["trials"][search["pick"]] for search in (quick, full)]
    found: dict[str, Any] = {"same": picks[0]["config"] == picks[1]["config"]}
    if found["same"]:
        return found
    speeds = []
    for one in (quick, full):
        pair = [_trial_with(one, pick["config"]) for pick in picks]
        speeds.append(
            {
                "tokens_per_second": [trial["tokens_per_second"] for trial in pair],
                "spreads": [trial["tokens_per_second_spread"] for trial in pair],
                "perplexities": [trial["perplexity"] for trial in pair],
            }
        )
    found["speeds"] = speeds
    found["within_noise"] = any(_is_within(one) for one in speeds)
    return found


def _is_within(one: Mapping[str, Any]) -> bool:
    if None in one["tokens_per_second"]:
        return False
    first, second = one["tokens_per_second"]
    return bool(abs(first - second) <= sum(one["spreads"]))


def _trial_with(one: Mapping[str, Any], config: Mapping[str, Any]) -> Any:
    return next(trial for trial in one["trials"] if trial["config"] == config)


def export_and_train(script: RealScript, work: Path, *, name: str, pick: Any) -> dict[str, Any]:
    """Exports the pick, and trains with it as the export says; returns promised and found peak."""
    export = [sys.executable, "-m", "autotune", "export", name, "--to", "pytorch", "--json"]
    written = json.loads(run(export, folder=work))
    words = shlex.split(written["command"])  # cd FOLDER && AUTOTUNE_CONFIG=FILE python ...
    variable, _python, *command = words[words.index("&&") + 1 :]
    name_of_variable, _, value = variable.partition("=")
    printed = run(
        [sys.executable, str(HERE / "peak_of_a_run.py"), *command],
        folder=work,
        **{name_of_variable: value},
    )
    found = json.loads(printed.splitlines()[-1])["peak_memory_bytes"]
    return {"promised_peak_bytes": pick["peak_memory_bytes"], "peak_memory_bytes": found}


def environment() -> dict[str, Any]:
    packages = ("torch", "transformers", "accelerate", "datasets", "autotune")
    return {
        "date": str(datetime.date.today()),
        "python": sys.version.split()[0],
        "cpus": os.cpu_count(),
        "versions": {name: importlib.metadata.version(name) for name in packages},
    }


def study(script: RealScript, folder: Path, sources: Path | None) -> dict[str, Any]:
    """Runs all of it for one script; returns what is stored. Raises NotFetched."""
    work = set_up(script, folder, sources)
    quick = search(script, work, name="quick", options=())
    full = search(script, work, name="full-trainings", options=FULL)
    return {
        "commit": script.commit,
        "script": script.script,
        "edits": [vars(edit) for edit in script.edits],
        "for_newer_packages": [vars(edit) for edit in script.for_newer_packages],
        **environment(),
        "quick": quick,
        "full": full,
        "picks": compare(quick, full),
        "export": export_and_train(script, work, name="quick", pick=quick["trials"][quick["pick"]]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, help="outside this repository; default: a new one")
    parser.add_argument("--sources", type=Path, help="files that were fetched before")
    parser.add_argument("--only", choices=SCRIPTS, action="append", default=[])
    parser.add_argument("--out", type=Path, default=HERE / "real_scripts.json.xz")
    typed = parser.parse_args()
    folder = typed.folder or Path(tempfile.mkdtemp(prefix="real-scripts-"))
    folder.mkdir(parents=True, exist_ok=True)
    folder = folder.resolve()
    known = read_json(typed.out) if typed.out.exists() else {}
    make_given(folder / "given")
    for name in typed.only or SCRIPTS:
        script = SCRIPTS[name]
        try:
            known[script.repository] = study(script, folder, typed.sources)
        except NotFetched as error:
            raise SystemExit(str(error)) from None
        print(json.dumps({name: known[script.repository]["picks"]}), flush=True)
        write_json(typed.out, known)


if __name__ == "__main__":
    main()
