"""Groups of options that several commands share: the workload's and the configuration's.

`@with_workload` replaces the parameter `workload` of a command by one option for each setting, and
calls the command with {field of `Workload`: value}. `@with_configuration` does the same for the
techniques.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from autotune.cli.options import parse_pairs
from autotune.spec.config import CHOICES
from autotune.spec.model_choice import with_model_config
from autotune.spec.workload_settings import OPTION_NAMES

_WORKLOAD_OPTIONS: Mapping[str, Any] = {
    "model": Annotated[
        str | None,
        typer.Option(
            metavar="NAME|PATH",
            help="Model: gpt, deep-one, a Hugging Face config.json, a folder with one, a hub name, "
            "or your own as file.py:function. [default: gpt]",
        ),
    ],
    "pretrained": Annotated[
        bool | None,
        typer.Option(
            "--pretrained", help="Start from the model's pretrained weights (fine-tuning)."
        ),
    ],
    "script": Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Your own training script, instead of --model: train.py."
        ),
    ],
    "layers": Annotated[int | None, typer.Option(help="Number of transformer blocks.")],
    "width": Annotated[int | None, typer.Option(help="Width of the residual stream.")],
    "heads": Annotated[int | None, typer.Option(help="Number of attention heads.")],
    "feed_forward_width": Annotated[
        int | None,
        typer.Option(help="Inner width of the feed-forward layers. [default: the model's]"),
    ],
    "vocab_size": Annotated[int | None, typer.Option(help="Number of tokens in the vocabulary.")],
    "dataset": Annotated[
        str | None,
        typer.Option(
            metavar="PATH|NAME",
            help="Training data: a text, jsonl, csv or parquet file, a folder of such files, a "
            "folder written by save_to_disk (text or tokens), or a Hugging Face hub name. "
            "[default: the documentation of Python's standard library]",
        ),
    ],
    "dataset_config": Annotated[
        str | None, typer.Option(help="Configuration name of a hub dataset.")
    ],
    "dataset_split": Annotated[
        str | None,
        typer.Option(
            help="Split to train on, of a hub dataset or a folder with the same layout. "
            "[default: train]"
        ),
    ],
    "held_out_split": Annotated[
        str | None,
        typer.Option(
            help="Split to compute the perplexity on. "
            "[default: a tenth of the text, selected by hash]"
        ),
    ],
    "text_column": Annotated[
        str | None, typer.Option(help="Column of the dataset that holds the text.")
    ],
    "streaming": Annotated[
        bool | None,
        typer.Option(
            "--streaming/--no-streaming",
            help="Read only as much of the dataset as the trials can use. "
            "[default: read all of it]",
        ),
    ],
    "tokenizer": Annotated[
        str | None,
        typer.Option(
            metavar="bytes|bpe|model|PATH|NAME",
            help="Tokenizer: bytes; bpe: one of --vocab-size tokens (8000), trained on the text; "
            "model: the one in the folder of --model; or a tokenizer.json, a folder with one, or "
            "a hub name. [default: bytes]",
        ),
    ],
    "packing": Annotated[
        str | None,
        typer.Option(
            metavar="packed|padded",
            help="packed: cut sequences from one stream of tokens; padded: one document per "
            "sequence, truncated or padded. [default: packed]",
        ),
    ],
    "seq_len": Annotated[int | None, typer.Option(help="Tokens per sequence.")],
    "global_batch": Annotated[int | None, typer.Option(help="Sequences per optimizer step.")],
    "steps": Annotated[int | None, typer.Option(help="Optimizer steps per trial.")],
    "warmup_steps": Annotated[
        int | None,
        typer.Option(help="First steps of a trial, whose time and memory are not measured."),
    ],
    "eval_sequences": Annotated[
        int | None, typer.Option(help="Number of held-out sequences to compute the perplexity on.")
    ],
    "learning_rate": Annotated[
        list[str] | None,
        typer.Option(
            metavar="OPTIMIZER=RATE", help="Learning rate of an optimizer: adamw=3e-4. Repeatable."
        ),
    ],
    "schedule": Annotated[
        str | None, typer.Option(metavar="constant|cosine", help="Learning rate after its warm-up.")
    ],
    "lr_warmup_steps": Annotated[
        int | None, typer.Option(help="Steps in which the learning rate rises from zero.")
    ],
    "gradient_clipping": Annotated[
        float | None,
        typer.Option(
            metavar="NORM",
            help="Clip the global norm of the gradients to this value. [default: no clipping]",
        ),
    ],
}

_WORKLOAD_FIELDS = {option.replace("-", "_"): field for field, option in OPTION_NAMES.items()}

_WITHOUT_TEXT = (
    "model",
    "layers",
    "width",
    "heads",
    "feed_forward_width",
    "vocab_size",
    "seq_len",
    "global_batch",
    "gradient_clipping",
)
"""The options on which memory and legality depend; a prediction reads no text and runs no steps."""

_CONFIGURATION_OPTIONS: Mapping[str, Any] = {
    **{
        technique: Annotated[
            str | None,
            typer.Option(
                metavar="|".join(CHOICES[technique]), help=f"{description} [default: {default}]"
            ),
        ]
        for technique, default, description in (
            ("precision", "fp32", "Number formats of weights and computation."),
            ("checkpointing", "none", "Which activations to recompute in the backward pass."),
            ("compile", "none", "What to compile with torch.compile."),
            ("optimizer", "adamw", "Optimizer."),
            ("optimizer_fusion", "none", "How the optimizer applies its updates."),
            ("allocator", "default", "Mode of torch's CUDA memory allocator."),
            ("attention", "auto", "Kernel of the attention."),
            ("loss", "full", "Compute the loss on all logits at once or in chunks."),
            ("activation_offload", "none", "Where activations wait for the backward pass."),
        )
    },
    "memory_budget": Annotated[
        float | None,
        typer.Option(
            metavar="SHARE", help="Activation memory budget of torch.compile. [default: 1.0]"
        ),
    ],
    "micro_batch": Annotated[
        int | None, typer.Option(help="Sequences per forward pass. [default: the global batch]")
    ],
}
_CONFIGURATION_FIELDS = {"micro_batch": "micro_batch_size"}

_OPTIONS = {
    **{_WORKLOAD_FIELDS.get(name, name): name for name in _WORKLOAD_OPTIONS},
    **{_CONFIGURATION_FIELDS.get(name, name): name for name in _CONFIGURATION_OPTIONS},
}
"""{field of `Workload` or `TrainingConfig`: parameter of the command}"""


def with_workload(command: Callable[..., None]) -> Callable[..., None]:
    return _expanded(command, "workload", _WORKLOAD_OPTIONS, _workload_settings)


def with_model_size(command: Callable[..., None]) -> Callable[..., None]:
    """Like `with_workload`, but only with the settings on which memory depends."""
    options = {name: _WORKLOAD_OPTIONS[name] for name in _WITHOUT_TEXT}
    return _expanded(command, "workload", options, _workload_settings)


def with_configuration(command: Callable[..., None]) -> Callable[..., None]:
    return _expanded(command, "configuration", _CONFIGURATION_OPTIONS, _configuration_choices)


def options_given(
    workload: Mapping[str, Any], configuration: Mapping[str, Any], **others: object
) -> list[str]:
    """Return the options that have a value, as they are typed: `--seq-len` for `sequence_length`.

    `others` are parameters of the command that belong to neither group.
    """
    settings = {**workload, **configuration}
    names = [name for field, name in _OPTIONS.items() if settings.get(field) is not None]
    names += [name for name, value in others.items() if value is not None]
    return [f"--{name.replace('_', '-')}" for name in names]


def _workload_settings(given: dict[str, Any]) -> dict[str, Any]:
    if "learning_rate" in given:
        rates = parse_pairs("--learning-rate", given["learning_rate"], known=CHOICES["optimizer"])
        given["learning_rate"] = dict(rates) or None
    return with_model_config(
        {_WORKLOAD_FIELDS.get(name, name): value for name, value in given.items()}
    )


def _configuration_choices(given: dict[str, Any]) -> dict[str, Any]:
    return {
        _CONFIGURATION_FIELDS.get(name, name): value
        for name, value in given.items()
        if value is not None
    }


def _expanded(
    command: Callable[..., None],
    parameter: str,
    options: Mapping[str, Any],
    collect: Callable[[dict[str, Any]], dict[str, Any]],
) -> Callable[..., None]:
    """Return `command` with its `parameter` replaced by `options`.

    The result of `collect`, called with the values of the options, is passed as `parameter`.
    """

    def expanded(**given: Any) -> None:
        given[parameter] = collect({name: given.pop(name) for name in options})
        command(**given)

    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in options.items()
    ]
    parameters: list[inspect.Parameter] = []
    for original in inspect.signature(command).parameters.values():
        if original.name == parameter:
            parameters += added
        else:
            parameters.append(original.replace(kind=inspect.Parameter.KEYWORD_ONLY))
    expanded.__name__ = command.__name__
    expanded.__doc__ = command.__doc__
    expanded.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    expanded.__annotations__ = {entry.name: entry.annotation for entry in parameters}
    return expanded
