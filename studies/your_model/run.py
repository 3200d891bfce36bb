"""Searches on models and text of one's own, each to a front: `python studies/your_model/run.py`.

A Llama-, a Gemma- and a GPT-2-shaped config.json, the last with dropout, and a module in a Python
file, all on a local parquet file; and the training script of `studies/your_script`. Prints each
front, and writes every trial to `results.json.xz` beside itself, or where `--out` says. About
twenty minutes on two CPU cores.
"""

import argparse
import dataclasses
import datetime
import tempfile
import time
from pathlib import Path
from typing import Any

import datasets

import autotune
from autotune.cli.tables import make_console, print_result
from autotune.shipped import python_docs
from studies.compressed import write_json

HERE = Path(__file__).parent
TRIALS = 6
TOKENIZED = {"tokenizer": "bpe", "vocab_size": 1000}
SEARCHES: dict[str, dict[str, Any]] = {
    "llama": {"model": str(HERE / "llama.json"), "tokenizer": "bpe"},
    "gemma3": {"model": str(HERE / "gemma3.json"), "tokenizer": "bpe"},
    "gpt2-dropout": {"model": str(HERE / "gpt2.json"), "tokenizer": "bpe"},
    "own-module": {
        "model": f"{HERE / 'own.py'}:build",
        "layers": 4,
        "width": 128,
        "heads": 4,
        **TOKENIZED,
    },
    "own-script": {"script": str(HERE.parent / "your_script" / "train.py"), "global_batch": 16},
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=HERE / "results.json.xz")
    parser.add_argument("--only", choices=SEARCHES)
    options = parser.parse_args()
    content: dict[str, Any] = {"date": str(datetime.date.today()), "searches": {}}
    console = make_console()
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.parquet"
        datasets.Dataset.from_dict({"text": python_docs.standard_library_texts()}).to_parquet(
            str(text)
        )
        for name, workload in SEARCHES.items():
            if options.only not in (None, name):
                continue
            began = time.monotonic()
            dataset = {} if "script" in workload else {"dataset": str(text)}
            space = str(HERE / ("script.toml" if "script" in workload else "space.toml"))
            storage = f"sqlite:///{folder}/autotune.db"
            result = autotune.search(
                name=name,
                space=space,
                storage=storage,
                max_mem="512MiB",
                trials=TRIALS,
                fresh=True,
                confirm=False,
                **workload,
                **dataset,
            )
            seconds = time.monotonic() - began
            console.print(f"\n[bold]{name}[/bold]: {len(result.trials)} trials in {seconds:.0f} s")
            print_result(result, console)
            content["device"] = dataclasses.asdict(result.device)
            content["searches"][name] = {"seconds": seconds, **result.to_dict()}
    write_json(options.out, content)


if __name__ == "__main__":
    main()
