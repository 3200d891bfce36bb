"""The options of a workload: one for each setting that a command or a search space may override.

Without a default: what is not specified comes from the search space, the model or the device.
"""

from collections.abc import Mapping

from autotune.spec.model_choice import MODEL_NAMES
from autotune.spec.option import (
    COUNT,
    EVERYDAY,
    NUMBER,
    SWITCH,
    TEXTS,
    THE_DATA,
    THE_DEVICE,
    THE_MODEL,
    THE_SEARCH,
    THE_STEPS,
    Option,
)

_OPTIONS = (
    Option(
        flag="--model",
        group=EVERYDAY,
        choices=MODEL_NAMES,
        metavar="NAME|PATH",
        help="Model: gpt, deep-one, a Hugging Face config.json, a folder with one, a hub name, or "
        "your own as file.py:function. [default: gpt]",
    ),
    Option(
        flag="--pretrained",
        group=THE_MODEL,
        kind=SWITCH,
        help="Start from the model's pretrained weights (fine-tuning).",
    ),
    Option(
        flag="--script",
        group=EVERYDAY,
        metavar="FILE|MODULE",
        help="Your own training script, instead of --model: train.py, or a module: package.train. "
        "Its arguments follow a separate --: --script train.py -- config/tiny.py --device=cpu.",
    ),
    Option(flag="--layers", group=THE_MODEL, kind=COUNT, help="Number of transformer blocks."),
    Option(flag="--width", group=THE_MODEL, kind=COUNT, help="Width of the residual stream."),
    Option(flag="--heads", group=THE_MODEL, kind=COUNT, help="Number of attention heads."),
    Option(
        flag="--feed-forward-width",
        group=THE_MODEL,
        kind=COUNT,
        help="Inner width of the feed-forward layers. [default: the model's]",
    ),
    Option(
        flag="--vocab-size", group=THE_MODEL, kind=COUNT, help="Number of tokens in the vocabulary."
    ),
    Option(
        flag="--dataset",
        group=EVERYDAY,
        metavar="PATH|NAME",
        help="Training data: a text, jsonl, csv or parquet file, a folder of such files, a folder "
        "written by save_to_disk (text or tokens), or a Hugging Face hub name. [default: the "
        "documentation of Python's standard library]",
    ),
    Option(flag="--dataset-config", group=THE_DATA, help="Configuration name of a hub dataset."),
    Option(
        flag="--dataset-split",
        group=THE_DATA,
        help="Split to train on, of a hub dataset or a folder with the same layout. [default: "
        "train]",
    ),
    Option(
        flag="--held-out-split",
        group=THE_DATA,
        help="Split to compute the perplexity on. [default: a tenth of the text, selected by hash]",
    ),
    Option(flag="--text-column", group=THE_DATA, help="Column of the dataset that holds the text."),
    Option(
        flag="--streaming",
        group=THE_DATA,
        off_flag="--no-streaming",
        kind=SWITCH,
        help="Read only as much of the dataset as the trials can use. [default: read all of it]",
    ),
    Option(
        flag="--tokenizer",
        group=THE_DATA,
        choices=("bytes", "bpe", "model"),
        metavar="bytes|bpe|model|PATH|NAME",
        help="Tokenizer: bytes; bpe: one of --vocab-size tokens (8000), trained on the text; "
        "model: the one in the folder of --model; or a tokenizer.json, a folder with one, or "
        "a hub name. [default: bytes]",
    ),
    Option(
        flag="--packing",
        group=THE_DATA,
        choices=("packed", "padded"),
        help="packed: cut sequences from one stream of tokens; padded: one document per sequence, "
        "truncated or padded. [default: packed]",
    ),
    Option(
        flag="--seq-len",
        group=THE_STEPS,
        keyword="sequence_length",
        kind=COUNT,
        help="Tokens per sequence.",
    ),
    Option(
        flag="--global-batch", group=THE_STEPS, kind=COUNT, help="Sequences per optimizer step."
    ),
    Option(
        flag="--devices-per-trial",
        group=THE_DEVICE,
        kind=COUNT,
        help="Devices that train one model together; --max-mem is the cap of each. [default: 1]",
    ),
    Option(flag="--steps", group=THE_STEPS, kind=COUNT, help="Optimizer steps per trial."),
    Option(
        flag="--warmup-steps",
        group=THE_STEPS,
        kind=COUNT,
        help="First steps of a trial, whose time and memory are not measured.",
    ),
    Option(
        flag="--eval-sequences",
        group=THE_STEPS,
        keyword="evaluation_sequences",
        kind=COUNT,
        help="Number of held-out sequences to compute the perplexity on.",
    ),
    Option(
        flag="--learning-rate",
        group=THE_STEPS,
        keyword="learning_rates",
        kind=TEXTS,
        metavar="[ADAPTER/]OPTIMIZER=RATE",
        help="Learning rate of an optimizer, adamw=3e-4, or of an adapter's training with it, "
        "lora/adamw=3e-4. Repeatable.",
    ),
    Option(
        flag="--schedule",
        group=THE_STEPS,
        choices=("constant", "cosine"),
        help="Learning rate after its warm-up.",
    ),
    Option(
        flag="--lr-warmup-steps",
        group=THE_STEPS,
        keyword="learning_rate_warmup_steps",
        kind=COUNT,
        help="Steps in which the learning rate rises from zero.",
    ),
    Option(
        flag="--gradient-clipping",
        group=THE_STEPS,
        kind=NUMBER,
        metavar="NORM",
        help="Clip the global norm of the gradients to this value. [default: no clipping]",
    ),
)

WORKLOAD_OPTIONS: Mapping[str, Option] = {option.keyword: option for option in _OPTIONS}
"""{field of `Workload`: its option}"""

SEED = Option(
    flag="--seed",
    group=THE_SEARCH,
    kind=COUNT,
    help="Random seed for weights, data order and sampler. [default: 0]",
    is_repeated=False,
)
"""That of a search is the seed of its workload and of its sampler."""

SIZE_SETTINGS = (
    "model",
    "layers",
    "width",
    "heads",
    "feed_forward_width",
    "vocab_size",
    "sequence_length",
    "global_batch",
    "gradient_clipping",
    "devices_per_trial",
)
"""The settings on which memory and legality depend; a prediction reads no text and runs no steps.
"""


def option_of(name: str) -> str:
    """Return the flag of a setting, such as `--seq-len` for `sequence_length`."""
    if name in WORKLOAD_OPTIONS:
        return WORKLOAD_OPTIONS[name].flag
    return f"--{name.replace('_', '-')}"
