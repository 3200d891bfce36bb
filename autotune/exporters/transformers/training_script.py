"""`train.py` beside `autotune_trainer.py`: a script that trains, with the names that the workload knows filled in."""

import json
from pathlib import PurePath

from autotune.exporters.recipe import Recipe, in_one_line
from autotune.spec.model_file import with_layers
from autotune.spec.workload import STANDARD_LIBRARY_TEXT, Workload

FILE = "train.py"
MODEL_CONFIG_FILE = "model_config.json"
LOADERS = {
    **dict.fromkeys((".txt", ".md", ".rst"), "text"),
    **dict.fromkeys((".jsonl", ".json"), "json"),
    ".csv": "csv",
    ".parquet": "parquet",
}
"""What `datasets` calls the reader of each kind of file, as in `autotune/data/sources.py`."""


def training_script(recipe: Recipe) -> dict[str, str]:
    """{file name: text}, with the model's config.json where it was trained from random weights."""
    workload = recipe.workload
    text = f'''"""Trains with autotune_trainer.py. Fill in what is in capitals between <>, then: python {FILE}"""

from autotune_trainer import AutotuneTrainer, model_kwargs, sequences, training_arguments  # first

from datasets import load_dataset
from transformers import {_classes(workload)}, set_seed

set_seed({workload.seed})
{_tokenizer(workload)}
{_model(workload)}
{_texts(workload)}

trainer = AutotuneTrainer(
    model=model,
    args=training_arguments("trainer_output", logging_steps=1),
    train_dataset=sequences(texts, encode),
)
trainer.train()
trainer.save_model()
'''
    files = {FILE: text}
    if workload.model_config is not None and not workload.pretrained:
        content = with_layers(workload.model_config, workload.layers)
        content.pop("auto_map", None)  # names code outside transformers, which is not run
        files[MODEL_CONFIG_FILE] = json.dumps(content, indent=2) + "\n"
    return files


def names_model(workload: Workload) -> bool:
    """Whether the workload's model is one that transformers can make."""
    return workload.model_config is not None


def says_tokenizer(workload: Workload) -> bool:
    """Whether the script has the tokens of the trial, and not those of a model that is to be filled in."""
    return workload.tokenizer != "bpe" and (workload.tokenizer != "bytes" or names_model(workload))


def _classes(workload: Workload) -> str:
    tokenizer = (
        []
        if workload.tokenizer == "bytes" and names_model(workload)
        else [_tokenizer_class(workload)]
    )
    config = ["AutoConfig"] if names_model(workload) and not workload.pretrained else []
    return ", ".join([*config, "AutoModelForCausalLM", *tokenizer])


def _tokenizer_class(workload: Workload) -> str:
    return "PreTrainedTokenizerFast" if workload.tokenizer.endswith(".json") else "AutoTokenizer"


def _tokenizer(workload: Workload) -> str:
    if workload.tokenizer == "bytes" and names_model(workload):
        return "\n\ndef encode(text):\n    return list(text.encode())  # the trial's tokens were bytes\n\n"
    if workload.tokenizer.endswith(".json"):
        made = f"PreTrainedTokenizerFast(tokenizer_file={workload.tokenizer!r})"
    elif not says_tokenizer(workload):
        made = 'AutoTokenizer.from_pretrained("<MODEL>")'
    else:
        made = f"AutoTokenizer.from_pretrained({workload.tokenizer!r})"
    # As in a study: what ends a text stands between packed texts, what begins one before a padded
    # one.
    role, tokens = "eos", 'tokenizer(text, add_special_tokens=False)["input_ids"] + special'
    if workload.packing == "padded":
        role, tokens = "bos", 'special + tokenizer(text, add_special_tokens=False)["input_ids"]'
    return f"""tokenizer = {made}
special = [] if tokenizer.{role}_token_id is None else [tokenizer.{role}_token_id]


def encode(text):
    return {tokens}

"""


def _model(workload: Workload) -> str:
    if not names_model(workload):
        about = in_one_line(workload.describe_model())
        return f'model = AutoModelForCausalLM.from_pretrained("<MODEL>", **model_kwargs())  # the trial\'s was {about}'
    if workload.pretrained:
        return f"model = AutoModelForCausalLM.from_pretrained({workload.model_source!r}, **model_kwargs())"
    config = f'AutoConfig.from_pretrained("{MODEL_CONFIG_FILE}")'
    return f"model = AutoModelForCausalLM.from_config({config}, **model_kwargs())"


def _texts(workload: Workload) -> str:
    column = repr(workload.text_column or "text")
    lines = [f"rows = {_dataset(workload)}"]
    if workload.text_column is None and workload.dataset != STANDARD_LIBRARY_TEXT:
        column = "column"
        lines += [
            'if "input_ids" in rows.column_names:',
            '    raise SystemExit("this dataset is tokenized: give it to AutotuneTrainer as its train_dataset")',
            'strings = [name for name, kind in rows.features.items() if "string" in getattr(kind, "dtype", "")]',
            'column = "text" if "text" in strings else strings[0]',
        ]
    return "\n".join([*lines, f"texts = [text for text in rows[{column}] if text]"])


def _dataset(workload: Workload) -> str:
    name, split = workload.dataset, workload.dataset_split
    if name == STANDARD_LIBRARY_TEXT:
        return 'load_dataset("text", data_files="<TEXT FILE>", split="train")'
    if loader := LOADERS.get(PurePath(name).suffix.lower()):
        return f'load_dataset("{loader}", data_files={name!r}, split={split!r})'
    config = f", {workload.dataset_config!r}" if workload.dataset_config else ""
    return f"load_dataset({name!r}{config}, split={split!r})"
