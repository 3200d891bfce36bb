"""A workload says what is trained: model, text, batch, steps, seed, learning rates and schedule.

Two trials are comparable only if all fields of their workloads are equal, including the hash of the
text.
"""

import dataclasses
import hashlib
import json
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, Self

from autotune.errors import InvalidInput, suggestion
from autotune.spec.config import (
    CHOICES,
    LegalityContext,
    OptimizerFusion,
    Precision,
    TrainingConfig,
    configuration_of,
)
from autotune.spec.learning_rates import (
    FROM_SCRATCH,
    LEARNING_RATE_NAMES,
    default_learning_rates,
    learning_rate_of,
)
from autotune.spec.model_choice import (
    HOW_TO_NAME,
    MODEL_NAMES,
    arguments_without_script,
    no_model,
    with_model_config,
)
from autotune.spec.model_file import (
    FILE_NAME,
    check_finite,
    largest_sequence_length,
    model_name,
    sizes_of,
)
from autotune.spec.prompt_format import PromptFormat, read_prompt_format, write_prompt_format
from autotune.spec.setting import (
    EVERYDAY,
    THE_DATA,
    THE_DEVICE,
    THE_MODEL,
    THE_SEARCH,
    THE_STEPS,
    Format,
    InvalidSetting,
    Seed,
    Settings,
    number,
    option_of,
    pairs,
    setting,
    specified,
    texts,
    whole_number,
)
from autotune.spec.terms import Counted
from autotune.spec.user_code import (
    SCRIPT,
    is_function_reference,
    is_script_module,
    read_arguments,
    read_reference,
)
from autotune.units import is_positive_number

STANDARD_LIBRARY_TEXT = "python-docs"
"""Name of the default text: the documentation of the Python standard library, which every machine
has."""

SHAREGPT_COLUMN = "conversations"
"""Name of the column of conversations in the format of ShareGPT."""

BYTE_VOCABULARY = 256
SMALLEST_BPE_VOCABULARY = BYTE_VOCABULARY + 2
"""One token per byte, one for the end of a text and one for padding."""
DEFAULT_BPE_VOCABULARY = 8000
MEMORY_STEPS = 2
"""Steady-state steps whose memory is measured; they are not timed."""

MINIMUM_TIMED_STEPS = 3
SHORT_TIMED_STEPS = 10
"""Steps that are timed if only memory and speed of a training are measured."""

LinearShape = tuple[int, int, int]
"""Of a product: [rows, inner] by [inner, columns]."""
_USUAL_WIDENING = 4
"""Of the feed-forward layers of a transformer, relative to its width."""


_PROMPT_FORMAT = Format(
    wanted="the name of a format, or a text with columns in braces: '{question} {answer}'",
    metavar="NAME|TEXT",
    read=read_prompt_format,
    write=write_prompt_format,
    other_type="string",
)
Schedule = Literal["constant", "cosine"]
Packing = Literal["packed", "padded"]
SavedDtype = Literal["adapter", "base"]
AdapterScaling = Literal["standard", "rslora"]
AdapterInit = Literal["standard", "pissa"]
Steps = Annotated[int, whole_number(1, 2**31 - 1)]
"""Fewer than in any number that cannot be multiplied and stored in a database."""


def _read_modules(names: Any) -> Any:
    """Returns the names one by one, of texts that may have several between commas."""
    if isinstance(names, str):
        names = (names,)
    if not isinstance(names, list | tuple) or not all(isinstance(one, str) for one in names):
        return names
    found = [name.strip() for one in names for name in one.split(",")]
    for name in found:
        if not re.fullmatch(r"\w+(\.\w+)*", name):
            raise InvalidInput(
                f"{name!r:.60} is no name of a module",
                hint="write the end of its name in the model, such as embed_tokens or lm_head",
            )
    return tuple(dict.fromkeys(found))


_MODULES = replace(
    texts("names of modules, such as embed_tokens and lm_head"),
    read=_read_modules,
    parse=_read_modules,
)

_RATES = pairs(LEARNING_RATE_NAMES, example="adamw=3e-4", metavar="[ADAPTER/]OPTIMIZER=RATE")


def end_of_path(name: str) -> str:
    """Returns the regular expression of paths that end so, from a dot on, as peft has it."""
    if not isinstance(name, str):
        raise TypeError("it is no text")
    return rf"(.*\.)?({name})$"


def _by_layer(values: Any) -> Any:
    """Returns the values as whole numbers, which the command line has read as any numbers.

    Raises InvalidInput for a name that is no regular expression, and for a value that is none.
    """
    if not isinstance(values, Mapping):
        return values
    for name, value in values.items():
        try:
            re.compile(end_of_path(name))
        except (re.error, TypeError) as error:
            raise InvalidInput(
                f"{name!r} is no end of a layer's name: {error}",
                hint="write a name such as q_proj, or a regular expression",
            ) from None
        if not is_positive_number(value) or not float(value).is_integer():
            raise InvalidInput(
                f"{name}={value} has no whole number above zero", hint=f"write {name}=16"
            )
    return {name: int(value) for name, value in values.items()}


_BY_LAYER = replace(pairs(None, example="q_proj=16", metavar="LAYER=NUMBER"), read=_by_layer)
"""Numbers by the ends of layers' names, which may be regular expressions."""


def _read_config(content: Any) -> Any:
    if not isinstance(content, Mapping):
        return content
    kind = content.get("model_type")
    if not isinstance(kind, str) or not re.fullmatch(r"[\w.-]+", kind):
        raise InvalidInput(
            f"{kind!r:.60} is no model_type",
            hint="give the content of a config.json, which has one",
        )
    return content


def _read_choices(choices: Any) -> Any:
    return configuration_of(choices).to_dict() if isinstance(choices, Mapping) else choices


def _positive_rates(rates: Any) -> Any:
    """Returns the rates as they are. Raises InvalidInput for one that is not above zero."""
    for name, rate in rates.items() if isinstance(rates, Mapping) else ():
        if name not in LEARNING_RATE_NAMES:
            raise InvalidInput(
                f"there is no optimizer {name!r} to set a learning rate for",
                hint=suggestion(
                    name,
                    LEARNING_RATE_NAMES,
                    otherwise=f"use one of {', '.join(CHOICES['optimizer'])}, or one of them after "
                    "an adapter: lora/adamw",
                ),
            )
        if not is_positive_number(rate):
            raise InvalidInput(
                f"learning rate {rate!r} of {name} is not possible", hint="use a number above zero"
            )
    return rates


@dataclass(frozen=True, kw_only=True)
class Workload(Settings):
    """Everything that decides which numbers a training computes, apart from its `TrainingConfig`.

    The largest sizes are several times those of any model: building takes milliseconds per layer,
    and the divisors of the global batch are tried one by one. Raises InvalidInput for settings that
    are impossible or do not fit together.
    """

    is_partial: ClassVar = True

    model: str = setting(
        "gpt",
        "Model: gpt, deep-one, a Hugging Face config.json, a folder with one, a hub name, or "
        "your own as file.py:function. [default: gpt]",
        group=EVERYDAY,
        choices=MODEL_NAMES,
        metavar="NAME|PATH",
        over_http=True,
    )
    """A built-in model, the name that `model_file.py` gives to a config.json, or
    `file.py:function`."""
    model_config: (
        Annotated[Mapping[str, Any], Format(wanted=HOW_TO_NAME, read=_read_config)] | None
    ) = setting(
        None,
        "The content of a Hugging Face config.json; `model` is then its name.",
        is_typed=False,
        over_http=True,
    )
    """The whole content of the config.json, so that a study can be resumed without the file; None
    for other models."""
    model_sha256: str = ""
    """SHA-256 of the model's Python file or of its trained weights, set when the study is created;
    empty if the model has neither."""
    pretrained: bool = setting(
        False,
        "Start from the model's pretrained weights (fine-tuning).",
        group=THE_MODEL,
        over_http=True,
    )
    """Whether training starts from the weights in `model_source`; otherwise they are drawn at
    random from the seed."""
    model_source: str | None = None
    """Folder or hub name of the pretrained weights; None without them."""
    script: str | None = setting(
        None,
        "Your own training script, instead of --model: train.py, or a module: package.train. "
        "Its arguments follow a separate --: --script train.py -- config/tiny.py --device=cpu.",
        group=EVERYDAY,
        metavar="FILE|MODULE",
        synonym="-m",  # as of `python -m`
        over_http=True,
    )
    """The user's training script, a file or a module as of `python -m`, which is run instead of a
    model; `model` is then "script"."""
    script_arguments: Annotated[
        tuple[str, ...], Format(wanted="a list of texts", read=read_arguments)
    ] = setting((), "Arguments of a script.", is_typed=False, over_http=True)
    """What follows the script on its command line."""
    callback: bool = setting(
        True,
        "Leave a trainer in --script as it is; by default transformers' and Lightning's Trainer "
        "and accelerate are searched where the script calls nothing of autotune.",
        group=THE_MODEL,
        over_http=True,
    )
    is_injected: bool = False
    """Whether a trainer in the script gets its callback from us."""
    script_files: Mapping[str, str] | None = None
    """{path: SHA-256} of the code that the script has read when it calls `autotune.apply`, or that
    the function has read to make its model, without the file of `script` or `model` itself
    (`spec/script_files.py`); None: not known, as for studies of earlier releases."""
    script_files_after_apply: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The same of data, and of what is first read later. Trials add to it, so that it is no part of
    the identity."""
    packages: Mapping[str, str] | None = None
    """{name: version} of the installed packages that compute, apart from torch, and that the user's
    script or function imports; None: not known, as for studies of earlier releases."""
    one_rank: bool = False
    """Whether the script gets the environment variables of torchrun with one process."""
    own_precision: Precision = "fp32"
    """The precision of the training without any technique, which a script's weights decide."""
    own_fusion: OptimizerFusion = "none"
    """How the optimizer of that training updates, which a script's optimizers decide."""
    own_config: (
        Annotated[Mapping[str, Any], Format(wanted="a value by technique", read=_read_choices)]
        | None
    ) = setting(
        None,
        "What a trainer's file trains with: a value by technique.",
        is_typed=False,
        over_http=True,
    )
    """The choices of the trainer's file that the other settings come from: the baseline."""
    own_file: str | None = setting(
        None, "Name of the trainer's file.", is_typed=False, over_http=True
    )
    layers: Annotated[int, whole_number(1, 1_000)] | None = setting(
        help="Number of transformer blocks.", group=THE_MODEL, over_http=True
    )
    width: Annotated[int, whole_number(1, 2**20)] | None = setting(
        help="Width of the residual stream.", group=THE_MODEL, over_http=True
    )
    heads: Annotated[int, whole_number(1, 100_000)] | None = setting(
        help="Number of attention heads.", group=THE_MODEL, over_http=True
    )
    """Layers, width and heads. None where the config.json does not specify one: mamba has no
    heads."""
    feed_forward_width: Annotated[int, whole_number(1, 2**22)] | None = setting(
        None,
        "Inner width of the feed-forward layers. [default: the model's]",
        group=THE_MODEL,
        over_http=True,
    )
    vocab_size: Annotated[int, whole_number(1, 2**24)] = setting(
        BYTE_VOCABULARY, "Number of tokens in the vocabulary.", group=THE_MODEL, over_http=True
    )

    dataset: str = setting(
        STANDARD_LIBRARY_TEXT,
        "Training data: a text, jsonl, csv or parquet file, a folder of such files, a folder "
        "written by save_to_disk (text or tokens), or a Hugging Face hub name. [default: the "
        "documentation of Python's standard library]",
        group=EVERYDAY,
        metavar="PATH|NAME",
        over_http=True,
    )
    dataset_config: str | None = setting(
        None, "Configuration name of a hub dataset.", group=THE_DATA, over_http=True
    )
    dataset_split: str = setting(
        "train",
        "Split to train on, of a hub dataset or a folder with the same layout. [default: train]",
        group=THE_DATA,
        over_http=True,
    )
    held_out_split: str | None = setting(
        None,
        "Split to compute the perplexity on. [default: a tenth of the text, selected by hash]",
        group=THE_DATA,
        over_http=True,
    )
    text_column: str | None = setting(
        None, "Column of the dataset that holds the text.", group=THE_DATA, over_http=True
    )
    prompt_format: Annotated[Mapping[str, Any], _PROMPT_FORMAT] | None = setting(
        None,
        "How columns are put into a prompt whose answer is learned: alpaca, prompt-completion, "
        "instruction-chat (the chat template around instruction, input and output), or a text with "
        "the columns in braces, the answer last: '{question} {answer}'. [default: by the columns]",
        group=THE_DATA,
        choices=("alpaca", "prompt-completion", "instruction-chat"),
        metavar="NAME|TEXT",
        over_http=True,
    )
    """The fields of a `PromptFormat`; None for text, tokens and conversations in one column, and
    until the data has been read."""
    streaming: bool = setting(
        False,
        "Read only as much of the dataset as the trials can use. [default: read all of it]",
        group=THE_DATA,
        off_flag="--no-streaming",
        over_http=True,
    )
    chat_column: str | None = None
    """The column of conversations, whose answers alone are trained on and evaluated; None for other
    data, and until the data has been read."""
    text_sha256: str = ""
    """SHA-256 of the prepared training and held-out tokens; empty until the text has been read."""
    tokenizer: str = setting(
        "bytes",
        "Tokenizer: bytes; bpe: one of --vocab-size tokens (8000), trained on the text; "
        "model: the one in the folder of --model; or a tokenizer.json, a folder with one, or "
        "a hub name. [default: bytes]",
        group=THE_DATA,
        choices=("bytes", "bpe", "model"),
        metavar="bytes|bpe|model|PATH|NAME",
        over_http=True,
    )
    packing: Packing = setting(
        "packed",
        "packed: cut sequences from one stream of tokens; padded: one document per sequence, "
        "truncated or padded. [default: packed]",
        group=THE_DATA,
        over_http=True,
    )

    sequence_length: Annotated[int, whole_number(1, 2**27)] = setting(
        help="Tokens per sequence.", group=THE_STEPS, flag="--seq-len", over_http=True
    )
    global_batch: Annotated[int, whole_number(1, 2**20)] = setting(
        help="Sequences per optimizer step.", group=THE_STEPS, over_http=True
    )
    devices_per_trial: Annotated[int, whole_number(1, 4096)] = setting(
        1,
        "Devices that train one model together; --max-mem is the cap of each. [default: 1]",
        group=THE_DEVICE,
        synonym="--world-size",
        over_http=True,
    )
    nodes_per_trial: Annotated[int, whole_number(1, 4096)] = setting(
        1,
        "Nodes of a Ray cluster that the devices of a trial are divided among, in equal parts. "
        "[default: 1]",
        group=THE_DEVICE,
        over_http=True,
    )
    steps: Steps = setting(help="Optimizer steps per trial.", group=THE_STEPS, over_http=True)
    """Perplexity is measured after the last one."""
    warmup_steps: Steps = setting(
        4,
        "First steps of a trial, whose time and memory are not measured.",
        group=THE_STEPS,
        over_http=True,
    )
    """Compilation and the allocation of optimizer state fall into them."""
    evaluation_sequences: Steps = setting(
        help="Number of held-out sequences to compute the perplexity on.",
        group=THE_STEPS,
        flag="--eval-sequences",
        over_http=True,
    )

    seed: Seed = setting(
        0,
        "Random seed for weights, data order and sampler. [default: 0]",
        group=THE_SEARCH,
        is_repeated=False,
        over_http=True,
    )
    """That of a search is the seed of its workload and of its sampler."""
    learning_rates: Annotated[Mapping[str, float], replace(_RATES, read=_positive_rates)] = setting(
        lambda: dict(FROM_SCRATCH),
        "Learning rate of an optimizer, adamw=3e-4, or of an adapter's training with it, "
        "lora/adamw=3e-4. Repeatable.",
        group=THE_STEPS,
        flag="--learning-rate",
        over_http=True,
    )
    """By optimizer, or adapter and optimizer (`learning_rates.py`)."""
    schedule: Schedule = setting(
        "constant", "Learning rate after its warm-up.", group=THE_STEPS, over_http=True
    )
    learning_rate_warmup_steps: Steps = setting(
        10,
        "Steps in which the learning rate rises from zero.",
        group=THE_STEPS,
        flag="--lr-warmup-steps",
        over_http=True,
    )
    gradient_clipping: Annotated[float, number("a norm above zero", least=5e-324)] | None = setting(
        None,
        "Clip the global norm of the gradients to this value. [default: no clipping]",
        group=THE_STEPS,
        metavar="NORM",
        over_http=True,
    )
    """Largest norm of all gradients of a global batch together; a larger norm is scaled down to
    it. None: no clipping."""
    adapter_dropout: Annotated[
        float, number("a share from 0 to below 1", least=0.0, most=1.0 - 2.0**-53)
    ] = setting(
        0.0,
        "Dropout of what adapters read, as lora_dropout of peft. [default: 0]",
        group=THE_STEPS,
        metavar="SHARE",
        over_http=True,
    )
    """Share of the input of each adapter that is zero in training. It is a fact of the training,
    as other dropout is in a model, and no technique: a search compares nothing with it off."""
    adapter_alpha: Annotated[int, whole_number(1, 2**31 - 1)] = setting(
        16,
        "Alpha of adapters, as lora_alpha of peft. [default: 16]",
        group=THE_STEPS,
        metavar="ALPHA",
        over_http=True,
    )
    """At rank 8 the scale is 2, the customary one of twice the rank. That the best rate hardly
    depends on the rank with a constant alpha: Schulman et al., "LoRA Without Regret" (2025)."""
    adapter_scaling: AdapterScaling = setting(
        "standard",
        "Scale of adapters: alpha / rank, or alpha / sqrt(rank) of rsLoRA. [default: standard]",
        group=THE_STEPS,
        over_http=True,
    )
    """`rslora` is arXiv:2312.03732, use_rslora of peft."""
    adapter_init: AdapterInit = setting(
        "standard",
        "Start of adapters: random and zero, or PiSSA's largest singular values of each weight. "
        "[default: standard]",
        group=THE_STEPS,
        over_http=True,
    )
    """With `pissa` (arXiv:2404.02948) the frozen weight is what the start leaves of it."""
    adapter_rank_pattern: Annotated[Mapping[str, int], _BY_LAYER] = setting(
        dict,
        "Rank of some adapters, by the end of a layer's name, such as q_proj=16. Repeatable.",
        group=THE_MODEL,
        over_http=True,
    )
    """The end may be a regular expression, as in rank_pattern of peft."""
    adapter_alpha_pattern: Annotated[Mapping[str, int], _BY_LAYER] = setting(
        dict,
        "Alpha of some adapters, by the end of a layer's name, such as q_proj=32. Repeatable.",
        group=THE_MODEL,
        over_http=True,
    )
    """The end may be a regular expression, as in alpha_pattern of peft."""
    modules_to_save: Annotated[tuple[str, ...], _MODULES] = setting(
        (),
        "Module that is trained whole beside adapters, by the end of its name, such as lm_head. "
        "Repeatable.",
        group=THE_MODEL,
        metavar="NAME",
        over_http=True,
    )
    """Ends of the names of modules that are trained whole where there are adapters. The model keeps
    the frozen original of each, as with peft's `modules_to_save`."""
    modules_to_save_dtype: SavedDtype = setting(
        "adapter",
        "Number format of modules that are trained whole beside adapters: that of the adapters, or "
        "that of the frozen base, as peft leaves them. [default: adapter]",
        group=THE_MODEL,
        over_http=True,
    )
    """`base` is the format of frozen weights that are not quantized; float16 is none to train in,
    and float32 stands for it."""

    @property
    def linear_shape(self) -> "LinearShape | None":
        """Shape of the product of a large linear layer; None for a model that is code of the user.

        Rows are the tokens of a step.
        """
        if self.script is not None or self.width is None or is_function_reference(self.model):
            return None
        return (
            self.tokens_per_step,
            self.width,
            self.feed_forward_width or _USUAL_WIDENING * self.width,
        )

    @property
    def fewest_steps(self) -> int:
        """The smallest number of steps, after which something was timed."""
        return self.warmup_steps + MEMORY_STEPS + MINIMUM_TIMED_STEPS

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in _BLOCK_SIZES:
            if getattr(self, name) is None and self.model_config is None:
                option = option_of(Workload, name)
                raise InvalidSetting(option, "None", hint=option.hint(None))
        if self.script_arguments and self.script is None:
            raise arguments_without_script(self.script_arguments)
        self._check_steps()
        self._check_devices()
        if (self.script is not None) != (self.model == SCRIPT):
            raise no_model(self.model)
        if self.script is not None:
            return  # a script brings its own model and text
        if self.model_config is not None:
            self._check_model_config(self.model_config)
        elif not is_function_reference(self.model):
            self._check_built_in()
        self._check_pretrained()
        self._check_vocabulary()
        if self.prompt_format is not None and self.text_column is not None:
            raise InvalidInput(
                f"text_column = {self.text_column!r} and a prompt_format are given, and only one "
                "of them says what is learned of a row",
                hint="leave --text-column or --prompt-format out",
            )

    def _check_steps(self) -> None:
        fewest = self.fewest_steps
        if self.steps < fewest:
            raise InvalidInput(
                f"steps = {self.steps} leaves nothing to time after {self.warmup_steps} warm-up "
                f"and {MEMORY_STEPS} memory steps",
                hint=f"use at least {fewest} steps, or fewer warm-up steps",
            )

    def _check_devices(self) -> None:
        if self.devices_per_trial % self.nodes_per_trial:
            raise InvalidInput(
                f"the {self.devices_per_trial} devices of a trial cannot be divided equally among "
                f"{self.nodes_per_trial} nodes",
                hint=f"use --devices-per-trial {self.nodes_per_trial} or a multiple of it, or "
                "another --nodes-per-trial",
            )
        if self.devices_per_trial == 1:
            return
        if self.script is not None:
            raise InvalidInput(
                f"devices_per_trial = {self.devices_per_trial} is not possible with a script, "
                "which starts its own processes",
                hint="name the model with --model, or leave --devices-per-trial out",
            )
        if self.global_batch % self.devices_per_trial:
            larger = -(-self.global_batch // self.devices_per_trial) * self.devices_per_trial
            raise InvalidInput(
                f"the global batch of {self.global_batch} cannot be divided among "
                f"{self.devices_per_trial} devices",
                hint=f"use --global-batch {larger}, or another --devices-per-trial",
            )

    def _check_vocabulary(self) -> None:
        if self.tokenizer == "model":
            raise InvalidInput(
                "tokenizer = 'model' needs a model with files", hint="name its folder with --model"
            )
        smallest_by_tokenizer = {"bytes": BYTE_VOCABULARY, "bpe": SMALLEST_BPE_VOCABULARY}
        smallest = smallest_by_tokenizer.get(self.tokenizer, 1)
        if self.vocab_size < smallest:
            option = "--vocab-size" if self.model_config is None else "a model with a vocabulary of"
            raise InvalidInput(
                f"vocab_size = {self.vocab_size} is smaller than the {smallest} byte-level tokens",
                hint=f"use {option} {smallest} or more",
            )

    def _check_built_in(self) -> None:
        if self.model not in MODEL_NAMES:
            raise no_model(self.model)
        _, width, heads = self.block_sizes
        if width % heads:
            raise InvalidInput(
                f"width {width} cannot be split into {heads} heads of equal size",
                hint="choose a width that is a multiple of the number of heads",
            )
        # Rotary positions of the GPT rotate pairs of numbers.
        if self.model == "gpt" and (width // heads) % 2:
            raise InvalidInput(
                f"width {width} cannot be split into {heads} heads of an even size",
                hint="choose a width that is a multiple of twice the number of heads",
            )

    def _check_pretrained(self) -> None:
        if not self.pretrained:
            return
        if self.model_config is None or self.model_source is None:
            raise InvalidInput(
                f"there are no pretrained weights of model {self.model!r}",
                hint="name a Hugging Face model by folder or hub name together with --pretrained",
            )
        weight_layers = sizes_of(self.model_config)["layers"]
        if self.layers != weight_layers:
            raise InvalidInput(
                f"layers = {self.layers} contradicts the pretrained weights, "
                f"which have {weight_layers}",
                hint="leave --layers or --pretrained out",
            )

    def _check_model_config(self, content: Mapping[str, Any]) -> None:
        if self.model != model_name(content):
            raise InvalidInput(
                f"model {self.model!r} and model_config do not belong together", hint=HOW_TO_NAME
            )
        check_finite(content)
        fixed = {**sizes_of(content), "feed_forward_width": None}
        if fixed["layers"] is not None:
            fixed["layers"] = self.layers
        for field, expected in fixed.items():
            if getattr(self, field) != expected:
                in_file = f"says {expected}"
                if expected is None:
                    in_file = (
                        "decides it" if field == "feed_forward_width" else "does not specify it"
                    )
                raise InvalidInput(
                    f"{field} = {getattr(self, field)} contradicts the model's {FILE_NAME}, "
                    f"which {in_file}",
                    hint=f"leave --{field.replace('_', '-')} out; only --layers can be changed",
                )
        positions = largest_sequence_length(content)
        if positions is not None and self.sequence_length > positions:
            raise InvalidInput(
                f"sequence_length = {self.sequence_length} is more than the {positions} positions "
                "of the model",
                hint=f"use --seq-len {positions} or less",
            )

    @property
    def prompts(self) -> PromptFormat | None:
        """How rows are put into prompts; None where a row is text, tokens or one conversation."""
        return None if self.prompt_format is None else PromptFormat(**self.prompt_format)

    @property
    def has_conversations(self) -> bool:
        """Whether the chat template of the tokenizer renders a row."""
        of_columns = self.prompts is not None and self.prompts.makes_messages
        return self.chat_column is not None or of_columns

    @property
    def learns_answers(self) -> bool:
        """Whether rows have parts that are not learned: the prompts before their answers."""
        return self.chat_column is not None or self.prompt_format is not None

    @property
    def model_name(self) -> str:
        """A short name of the model that is valid as part of a file name."""
        model = self.model if self.script is None else f"{self.script}:{SCRIPT}"
        if is_function_reference(model):
            return read_reference(model).short_name
        return model

    def describe(self, *, counted: Counted = "tokens") -> str:
        """Returns model and global batch as a short text, in what a script has `counted`."""
        if self.script is not None:
            units = "sequences" if counted == "tokens" else counted
            return f"{self.describe_model()}, {self.global_batch} {units} a step"
        return (
            f"{self.describe_model()}, {self.global_batch} x {self.sequence_length} tokens a step"
        )

    def describe_model(self) -> str:
        """Returns the model as a short text, with its sizes if the settings decide them."""
        if self.script is not None:
            return shlex.join(["script", self.script, *self.script_arguments])
        if is_function_reference(self.model):
            return self.model
        sizes = []
        if self.layers is not None:
            sizes.append(f"{self.layers} layers")
        if self.width is not None:
            sizes.append(f"width {self.width}")
        if self.pretrained:
            sizes.append("pretrained")
        return f"{self.model} of {', '.join(sizes)}" if sizes else self.model

    @property
    def block_sizes(self) -> tuple[int, int, int]:
        """Layers, width and heads of a model that has all three, as built-in ones do."""
        assert self.layers is not None
        assert self.width is not None
        assert self.heads is not None
        return self.layers, self.width, self.heads

    def script_command(self) -> list[str]:
        """Returns what stands after `python` on the script's command line."""
        assert self.script is not None
        module = ["-m"] if is_script_module(self.script) else []
        return [*module, self.script, *self.script_arguments]

    @property
    def own_name(self) -> str | None:
        """The name of the training that the user has: that of its file, or of its script."""
        return None if self.own_config is None else self.own_file or self.script

    @property
    def legality_context(self) -> LegalityContext:
        """The properties that decide which configurations can train this workload."""
        return LegalityContext(
            global_batch=self.global_batch,
            clips_gradients=self.gradient_clipping is not None,
            drops_inputs_of_adapters=self.adapter_dropout > 0,
            adapters_begin_as_weights=self.adapter_init == "pissa",
            sequence_length=self.sequence_length if self.script is None else None,
            devices=self.devices_per_trial,
            own_precision=self.own_precision,
            own_fusion=self.own_fusion,
            own=None if self.own_config is None else TrainingConfig(**self.own_config),
        )

    def on_devices(self, count: int) -> Self:
        """Returns the workload with another number of devices a trial, which are on one node."""
        return replace(self, devices_per_trial=count, nodes_per_trial=1)

    @property
    def has_random_weights(self) -> bool:
        """Whether training begins with random weights; a user's code may load others."""
        is_users = self.script is not None or is_function_reference(self.model)
        return not self.pretrained and not is_users

    @property
    def has_loss_of_tokens(self) -> bool:
        """Whether the loss is known to be a sum over tokens, the same at any micro batch size.

        That of a user's model or script need not be, nor one that balances experts.
        """
        if self.script is not None or is_function_reference(self.model):
            return False
        return not (self.model_config or {}).get("output_router_logits")

    def learning_rate_of(self, optimizer: str, adapter: str = "none") -> float:
        """Returns the learning rate of an optimizer for full training, or of an adapter."""
        return learning_rate_of(self.learning_rates, optimizer, adapter)

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.sequence_length

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @property
    def fingerprint(self) -> str:
        """Twelve hexadecimal digits of a hash: equal for equal workloads only."""
        return hashlib.sha256(json.dumps(self.identity(), sort_keys=True).encode()).hexdigest()[:12]

    def identity(self) -> dict[str, Any]:
        """Returns `to_dict` without the later settings that are at their defaults.

        The fingerprints of studies from before these settings stay valid. A script that reads no
        other file has the identity that it had when its files were not known.
        """
        settings = {}
        stored = self.to_dict()
        del stored["script_files_after_apply"]
        for name in ("script_files", "packages"):
            stored[name] = stored[name] or None
        for name, value in stored.items():
            if name not in _DEFAULTS_ADDED_LATER or value != _DEFAULTS_ADDED_LATER[name]:
                settings[name] = value
        return settings


def check_adapters(workload: Workload, adapters: Iterable[str]) -> None:
    """Raises InvalidInput where the workload says something of adapters, and none is trained.

    `adapters` are those of the configurations that are to be trained or predicted. A trainer's file
    says it of its own, which an option may leave out.
    """
    of_file = (workload.own_config or {}).get("adapter", "none")
    if any(adapter != "none" for adapter in (of_file, *adapters)):
        return
    for name, default in BESIDE_ADAPTERS.items():
        value, option = getattr(workload, name), option_of(Workload, name)
        if value != default:
            raise InvalidInput(
                f"{option.flag} {option.format.write(value)} is of adapters, and none is trained",
                hint=f"add --adapter lora, name a space with adapters, or leave {option.flag} out",
            )


BESIDE_ADAPTERS: Mapping[str, Any] = {
    "adapter_dropout": 0.0,
    "adapter_alpha": 16,
    "adapter_scaling": "standard",
    "adapter_init": "standard",
    "adapter_rank_pattern": {},
    "adapter_alpha_pattern": {},
    "modules_to_save": (),
    "modules_to_save_dtype": "adapter",
}
"""Settings of trainings with adapters, each with the value that all other trainings have."""

_BLOCK_SIZES = ("layers", "width", "heads")

_DEFAULTS_ADDED_LATER: Mapping[str, Any] = {
    "gradient_clipping": None,
    "devices_per_trial": 1,
    "nodes_per_trial": 1,
    "held_out_split": None,
    "packing": "packed",
    "streaming": False,
    "chat_column": None,
    "prompt_format": None,
    "model_sha256": "",
    "pretrained": False,
    "model_source": None,
    "script": None,
    "script_arguments": (),
    "script_files": None,
    "packages": None,
    "one_rank": False,
    "callback": True,
    "is_injected": False,
    "own_precision": "fp32",
    "own_fusion": "none",
    "own_config": None,
    "own_file": None,
    **BESIDE_ADAPTERS,
}
"""Settings that the first studies did not have, with their defaults."""

DEFAULTS_BY_DEVICE: Mapping[str, Mapping[str, Any]] = {
    # 1.3 M parameters: a trial takes seconds.
    "cpu": {
        "layers": 6,
        "width": 128,
        "heads": 4,
        "sequence_length": 128,
        "global_batch": 8,
        "steps": 40,
        "evaluation_sequences": 64,
    },
    # 114 M parameters and sequences of 1,024 tokens: large enough to occupy a GPU.
    "cuda": {
        "layers": 16,
        "width": 768,
        "heads": 12,
        "sequence_length": 1024,
        "global_batch": 16,
        "steps": 60,
        "evaluation_sequences": 64,
    },
}
"""Settings by type of device, for what neither the command line nor the search space specifies."""


def make_workload(device_type: str, *settings: Mapping[str, Any]) -> Workload:
    """Returns the workload of the device's defaults, overridden by each of `settings` in turn.

    A value of None overrides nothing. A config.json also sets the sizes of the model. Raises
    InvalidInput for unknown or impossible settings.
    """
    merged: dict[str, Any] = dict(DEFAULTS_BY_DEVICE[device_type])
    for given in map(with_model_config, settings):
        if given.get("model") is not None:
            content = given.get("model_config")
            merged["model_config"] = content
            if content is not None:
                merged.update(sizes_of(content))
        merged = overridden(merged, specified(Workload, given))
    defaults = default_learning_rates(device_type, pretrained=merged.get("pretrained", False))
    merged["learning_rates"] = {**defaults, **merged.get("learning_rates", {})}
    if merged.get("tokenizer") == "bpe":
        merged.setdefault("vocab_size", DEFAULT_BPE_VOCABULARY)
    return Workload(**merged)


OF_ONE_DATASET = (
    "dataset_config",
    "dataset_split",
    "held_out_split",
    "text_column",
    "prompt_format",
)
"""Settings that apply to one dataset and are dropped when another one is chosen."""

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
    "nodes_per_trial",
    "own_config",
    "own_file",
    *BESIDE_ADAPTERS,
)
"""The settings on which memory and legality depend; a prediction reads no text and runs no steps.
"""


def overridden(before: Mapping[str, Any], by: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings `before`, overridden by those in `by`.

    `learning_rates` are merged per optimizer. If `by` has another dataset, the splits and columns
    of the previous one are dropped. A column of text takes the place of a format of prompts, and
    the other way round.
    """
    merged = dict(before)
    dataset = before.get("dataset")
    if dataset is not None and by.get("dataset") not in (None, dataset):
        for name in OF_ONE_DATASET:
            merged.pop(name, None)
    for name, other in (("text_column", "prompt_format"), ("prompt_format", "text_column")):
        if by.get(name) is not None:
            merged.pop(other, None)
    merged.update(by)
    rates_before = before.get("learning_rates")
    rates_by = by.get("learning_rates")
    if isinstance(rates_before, Mapping) and isinstance(rates_by, Mapping):
        merged["learning_rates"] = {**rates_before, **rates_by}
    return merged
