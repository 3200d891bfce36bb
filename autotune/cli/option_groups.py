"""Options that several commands take together: the workload's and the configuration's.

`@with_workload` on a command with a parameter `workload` gives it one option a setting in that
parameter's place, and calls it with {field of `Workload`: value}; `@with_configuration` does the
same for the techniques.
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
            help="gpt, deep-one, a Hugging Face config.json, a folder with one or a hub name, or your own: "
            "file.py:function. [default: gpt]",
        ),
    ],
    "pretrained": Annotated[
        bool | None,
        typer.Option("--pretrained", help="Go on from the model's weights: fine-tuning."),
    ],
    "script": Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Your own training script, in the place of --model: train.py."
        ),
    ],
    "layers": Annotated[int | None, typer.Option(help="Transformer blocks.")],
    "width": Annotated[int | None, typer.Option(help="Size of the residual stream.")],
    "heads": Annotated[int | None, typer.Option(help="Attention heads.")],
    "feed_forward_width": Annotated[
        int | None,
        typer.Option(help="Inner size of the feed-forward parts. [default: the model's own]"),
    ],
    "vocab_size": Annotated[int | None, typer.Option(help="Rows of embedding and head.")],
    "dataset": Annotated[
        str | None,
        typer.Option(
            metavar="PATH|NAME",
            help="Text, jsonl, csv or parquet file, a folder of them, a folder of save_to_disk (also with tokens), "
            "or a Hugging Face hub name. [default: the documentation of Python's standard library]",
        ),
    ],
    "dataset_config": Annotated[str | None, typer.Option(help="Configuration of a hub dataset.")],
    "dataset_split": Annotated[
        str | None,
        typer.Option(
            help="Split to train on, of a hub dataset or a folder laid out as one. [default: train]"
        ),
    ],
    "held_out_split": Annotated[
        str | None,
        typer.Option(help="Split for the perplexity. [default: a tenth of the text, by hash]"),
    ],
    "text_column": Annotated[str | None, typer.Option(help="Column that holds the text.")],
    "streaming": Annotated[
        bool | None,
        typer.Option(
            "--streaming/--no-streaming",
            help="Read no more than the steps and the held-out set can use, from the hub or from files. "
            "[default: everything]",
        ),
    ],
    "tokenizer": Annotated[
        str | None,
        typer.Option(
            metavar="bytes|bpe|model|PATH|NAME",
            help="bytes; a BPE of --vocab-size tokens (8000) trained on the text; the one in the folder of --model; "
            "a tokenizer.json, a folder with one, or a hub name. [default: bytes]",
        ),
    ],
    "packing": Annotated[
        str | None,
        typer.Option(
            metavar="packed|padded",
            help="packed: sequences cut from one stream; padded: one document a sequence, cut or filled up. "
            "[default: packed]",
        ),
    ],
    "seq_len": Annotated[int | None, typer.Option(help="Tokens in a sequence.")],
    "global_batch": Annotated[int | None, typer.Option(help="Sequences per optimizer step.")],
    "steps": Annotated[int | None, typer.Option(help="Optimizer steps of a trial.")],
    "warmup_steps": Annotated[
        int | None, typer.Option(help="First steps, neither timed nor measured.")
    ],
    "eval_sequences": Annotated[
        int | None, typer.Option(help="Held-out sequences for the perplexity.")
    ],
    "learning_rate": Annotated[
        list[str] | None,
        typer.Option(metavar="OPTIMIZER=RATE", help="For example adamw=3e-4; repeatable."),
    ],
    "schedule": Annotated[
        str | None, typer.Option(metavar="constant|cosine", help="After the warm-up.")
    ],
    "lr_warmup_steps": Annotated[
        int | None, typer.Option(help="Steps in which the learning rate rises.")
    ],
    "gradient_clipping": Annotated[
        float | None,
        typer.Option(
            metavar="NORM", help="Largest norm of all gradients together. [default: no limit]"
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
"""What decides memory and what is legal; a prediction reads no text and takes no steps."""

_CONFIGURATION_OPTIONS: Mapping[str, Any] = {
    **{
        technique: Annotated[
            str | None, typer.Option(metavar="|".join(values), help=f"[default: {default}]")
        ]
        for technique, values, default in (
            ("precision", CHOICES["precision"], "fp32"),
            ("checkpointing", CHOICES["checkpointing"], "none"),
            ("compile", CHOICES["compile"], "none"),
            ("optimizer", CHOICES["optimizer"], "adamw"),
            ("optimizer_fusion", CHOICES["optimizer_fusion"], "none"),
            ("allocator", CHOICES["allocator"], "default"),
            ("attention", CHOICES["attention"], "auto"),
            ("loss", CHOICES["loss"], "full"),
            ("activation_offload", CHOICES["activation_offload"], "none"),
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
    """As `with_workload`, with the settings that decide memory only."""
    options = {name: _WORKLOAD_OPTIONS[name] for name in _WITHOUT_TEXT}
    return _expanded(command, "workload", options, _workload_settings)


def with_configuration(command: Callable[..., None]) -> Callable[..., None]:
    return _expanded(command, "configuration", _CONFIGURATION_OPTIONS, _configuration_choices)


def options_given(
    workload: Mapping[str, Any], configuration: Mapping[str, Any], **others: object
) -> list[str]:
    """Returns the options that have a value, as they are typed: `--seq-len` for `sequence_length`.

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
    """`command` with `options` in the place of `parameter`, which gets what `collect` makes of them."""

    def expanded(**given: Any) -> None:
        given[parameter] = collect({name: given.pop(name) for name in options})
        command(**given)

    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in options.items()
    ]
    parameters: list[inspect.Parameter] = []
    for one in inspect.signature(command).parameters.values():
        parameters += (
            added if one.name == parameter else [one.replace(kind=inspect.Parameter.KEYWORD_ONLY)]
        )
    expanded.__name__, expanded.__doc__ = command.__name__, command.__doc__
    expanded.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    expanded.__annotations__ = {one.name: one.annotation for one in parameters}
    return expanded
