"""Writes `train.py`, the script that trains with `autotune_trainer.py`.

The names of model, tokenizer and data are filled in as far as the workload has them.
"""

import json
from pathlib import PurePath

from autotune.exporters.adapters import is_quantized
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
"""{suffix: name of the reader in `datasets`}, as in `autotune/data/sources.py`."""


def training_script(recipe: Recipe) -> dict[str, str]:
    """Returns {file name: text}, with the model's config if it was trained from random weights."""
    workload = recipe.workload
    text = f'''"""Trains with autotune_trainer.py. Replace each <NAME>, then: python {FILE}"""

from autotune_trainer import {", ".join(_names(recipe))}  # first

from datasets import load_dataset
from transformers import {_classes(workload)}, set_seed

set_seed({workload.seed})
{_tokenizer(workload)}
{_model(recipe)}
{_texts(workload)}

trainer = AutotuneTrainer(
    model=model,
    args=training_arguments("trainer_output", logging_steps=1),
    train_dataset=sequences({arguments_of_sequences(workload)}),
)
trainer.train()
trainer.save_model()
'''
    files = {FILE: text}
    if workload.model_config is not None and not workload.pretrained:
        content = with_layers(workload.model_config, workload.layers)
        content.pop("auto_map", None)  # names code outside transformers, which is not run
        content.pop("quantization_config", None)  # the trial did not use it
        files[MODEL_CONFIG_FILE] = json.dumps(content, indent=2) + "\n"
    return files


def arguments_of_sequences(workload: Workload) -> str:
    """Returns what the function that makes the training set is given."""
    if workload.has_conversations:
        return "rows, tokenizer"
    if workload.prompt_format is not None:
        return "rows, encode, beginning=beginning, ending=ending"
    return "texts, encode"


def _names(recipe: Recipe) -> list[str]:
    """Returns what the script imports from the trainer's file."""
    names = ["AutotuneTrainer", "model_kwargs", "sequences", "training_arguments"]
    if "WEIGHTS_DTYPE" in _model(recipe):
        names.insert(0, "WEIGHTS_DTYPE")
    return names


def names_model(workload: Workload) -> bool:
    """Returns whether transformers can make the workload's model."""
    return workload.model_config is not None


def says_tokenizer(workload: Workload) -> bool:
    """Returns whether the script has the trial's tokenizer, not that of a model to be filled in."""
    if workload.tokenizer == "bytes":
        return names_model(workload)
    return workload.tokenizer != "bpe"


def _classes(workload: Workload) -> str:
    """Returns the classes that the script imports from transformers."""
    classes = ["AutoModelForCausalLM"]
    if names_model(workload) and not workload.pretrained:
        classes.insert(0, "AutoConfig")
    if workload.tokenizer.endswith(".json") and not workload.has_conversations:
        classes.append("PreTrainedTokenizerFast")
    elif workload.tokenizer != "bytes" or not names_model(workload):
        classes.append("AutoTokenizer")
    return ", ".join(classes)


def _tokenizer(workload: Workload) -> str:
    """Returns the definition of `encode(text)`, or of the tokenizer of conversations."""
    if workload.has_conversations:
        path = PurePath(workload.tokenizer)
        folder = str(path.parent) if path.suffix == ".json" else workload.tokenizer
        return f"tokenizer = AutoTokenizer.from_pretrained({folder!r})"
    if workload.tokenizer == "bytes" and names_model(workload):
        around = 'beginning, ending = [], list(b"\\n\\n")\n'
        return f"""{around if workload.prompt_format is not None else ""}

def encode(text):
    return list(text.encode())  # the trial's tokens were bytes

"""
    if workload.tokenizer.endswith(".json"):
        made = f"PreTrainedTokenizerFast(tokenizer_file={workload.tokenizer!r})"
    elif not says_tokenizer(workload):
        made = 'AutoTokenizer.from_pretrained("<MODEL>")'
    else:
        made = f"AutoTokenizer.from_pretrained({workload.tokenizer!r})"
    if workload.prompt_format is not None:
        return f"""tokenizer = {made}
ending = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
# Some tokenizers put a token before each text.
beginning = [token for token in tokenizer("")["input_ids"][:1] if token == tokenizer.bos_token_id]


def encode(text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]

"""
    # As in a study: packed texts are separated by the end token, a padded text begins with the
    # beginning token.
    if workload.packing == "padded":
        role = "bos"
        tokens = 'special + tokenizer(text, add_special_tokens=False)["input_ids"]'
    else:
        role = "eos"
        tokens = 'tokenizer(text, add_special_tokens=False)["input_ids"] + special'
    return f"""tokenizer = {made}
special = [] if tokenizer.{role}_token_id is None else [tokenizer.{role}_token_id]


def encode(text):
    return {tokens}

"""


def _model(recipe: Recipe) -> str:
    workload = recipe.workload
    if not names_model(workload):
        about = in_one_line(workload.describe_model())
        return (
            f"# The trial's model was {about}.\n"
            'model = AutoModelForCausalLM.from_pretrained("<MODEL>", **model_kwargs())'
        )
    if workload.pretrained:
        arguments = f"{workload.model_source!r}, **model_kwargs()"
        return f"model = AutoModelForCausalLM.from_pretrained({arguments})"
    config = f'AutoConfig.from_pretrained("{MODEL_CONFIG_FILE}")'
    if is_quantized(recipe.config):
        return f"""# Only weights from files are quantized.
model = AutoModelForCausalLM.from_config({config}, dtype=WEIGHTS_DTYPE)
model.save_pretrained("initial_weights")
model = AutoModelForCausalLM.from_pretrained("initial_weights", **model_kwargs())"""
    return f"model = AutoModelForCausalLM.from_config({config}, **model_kwargs())"


def _texts(workload: Workload) -> str:
    """Returns the lines that read the dataset and define `texts`."""
    column = repr(workload.text_column or "text")
    lines = [f"rows = {loading(workload)}"]
    if workload.learns_answers:
        return lines[0]
    if workload.text_column is None and workload.dataset != STANDARD_LIBRARY_TEXT:
        column = "column"
        lines += [
            'if "input_ids" in rows.column_names:',
            '    raise SystemExit("The dataset is tokenized: use it as train_dataset.")',
            'dtypes = {name: getattr(kind, "dtype", "") for name, kind in rows.features.items()}',
            'strings = [name for name, dtype in dtypes.items() if "string" in dtype]',
            'column = "text" if "text" in strings else strings[0]',
        ]
    return "\n".join([*lines, f"texts = [text for text in rows[{column}] if text]"])


def loading(workload: Workload) -> str:
    """Returns the expression that loads the dataset."""
    name, split = workload.dataset, workload.dataset_split
    if name == STANDARD_LIBRARY_TEXT:
        return 'load_dataset("text", data_files="<TEXT FILE>", split="train")'
    if loader := LOADERS.get(PurePath(name).suffix.lower()):
        return f'load_dataset("{loader}", data_files={name!r}, split={split!r})'
    config = f", {workload.dataset_config!r}" if workload.dataset_config else ""
    return f"load_dataset({name!r}{config}, split={split!r})"
