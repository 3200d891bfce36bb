"""Writes `autotune_trainer.py`: a Trainer that does what the trial did, in a file without autotune.

The file consists of modules of `autotune.shipped`, as far as the configuration uses them, and of
definitions for the configuration.
"""

from collections.abc import Mapping
from typing import Any

from autotune.exporters import launch
from autotune.exporters.adapters import (
    base_dtype,
    is_quantized,
    storage_dtype,
    torchao_class,
)
from autotune.exporters.bundle import Part, code, joined, shipped
from autotune.exporters.promise import is_promised, literal_lines
from autotune.exporters.pytorch.techniques import (
    CONVERSIONS,
    KEEPING_LINES,
    adapter_constants,
    adding_lines,
    kept_parts,
    returning,
    technique_modules,
)
from autotune.exporters.recipe import Recipe, in_docstring
from autotune.exporters.script_lines import imported_optimizer, parameters_of
from autotune.exporters.transformers.training_script import arguments_of_sequences
from autotune.spec.config import SELECTIVE, TrainingConfig
from autotune.spec.setting import NO_LIMIT
from autotune.spec.workload import Workload

FILE = "autotune_trainer.py"


def trainer_code(
    recipe: Recipe, keys: Mapping[str, Any], *, version: str, trial: Mapping[str, Any]
) -> str:
    """Returns the text of the file.

    `keys` are those of TrainingArguments; the code makes the settings that they do not make.
    `trial` is what the training is compared with.
    """
    config = recipe.config
    by_keys = "gradient_checkpointing_kwargs" in keys or "activation_checkpointing_kwargs" in keys
    parts = [
        _settings(recipe, keys),
        shipped(*_modules(config, by_keys=by_keys, version=version)),
        *([_sequences(recipe.workload)] if recipe.workload.script is None else []),
        _arguments(config),
        *kept_parts(recipe),
        _prepare_model(recipe, by_keys=by_keys, version=version),
        _make_optimizer(recipe),
        *([_promise(trial)] if is_promised(recipe) else []),
        _trainer(recipe),
    ]
    before_torch = "\n".join(launch.before_torch(config))
    environment = f"import os\n\n{before_torch}\n\n" if before_torch else ""
    future = "from __future__ import annotations"
    return f"{_docstring(recipe)}\n\n{future}\n\n{environment}{joined(parts)}"


def _modules(config: TrainingConfig, *, by_keys: bool, version: str) -> list[str]:
    """Returns the modules of `autotune.shipped` that the file needs.

    `by_keys`: the keys of TrainingArguments do the checkpointing.
    """
    in_code = "none" if by_keys else config.checkpointing
    needed = {
        "trainer.weights": not is_quantized(config),
        "blocks": _needs_blocks(config, by_keys=by_keys) or config.adapter != "none",
        "adapters": config.adapter != "none",
        "experts": config.adapter_targets == "experts",
        "trainer.loss": config.loss == "chunked",
        "checkpointing": in_code != "none",
        "segments": in_code == "sqrt",
        "compiling": in_code != "none" and config.compile != "none",
        "selective": in_code in SELECTIVE,
        "trainer.causal_flag": _needs_causal_flag(config, version),
        "schedule": True,
    }
    modules = [module for module, is_needed in needed.items() if is_needed]
    return [*technique_modules(config), *modules]


def _needs_blocks(config: TrainingConfig, *, by_keys: bool) -> bool:
    checkpoints_in_code = config.checkpointing != "none" and not by_keys
    changes_blocks = config.precision in CONVERSIONS or config.feed_forward == "tiled"
    changes_blocks |= config.activation_budget != NO_LIMIT
    return checkpoints_in_code or config.compile == "block" or changes_blocks


def _needs_causal_flag(config: TrainingConfig, version: str) -> bool:
    """Returns whether `keep_causal_flag` is needed; 4.57 makes masks by another interface."""
    return config.compile != "none" and version != "4.57"


def _docstring(recipe: Recipe) -> str:
    if recipe.workload.script is not None:
        return f'''"""A Trainer with every technique of {in_docstring(recipe.origin)}.

    {recipe.config.describe()}

Import it first in your training script, because the import makes settings of the process:

    from autotune_trainer import AutotuneTrainer, training_arguments

    arguments = training_arguments("trainer_output")
    AutotuneTrainer(model=model, args=arguments, train_dataset=data).train()

{_measured_on(recipe)}
"""'''
    length = recipe.workload.sequence_length
    data = f"sequences({arguments_of_sequences(recipe.workload)})"
    return f'''"""A Trainer with every technique of {in_docstring(recipe.origin)}.

    {recipe.config.describe()}

Import it first in your training script, because the import makes settings of the process:

    from autotune_trainer import AutotuneTrainer, model_kwargs, sequences, training_arguments

    model = AutoModelForCausalLM.from_pretrained("...", **model_kwargs())
    data = {data}  # {length} tokens each; or your dataset
    arguments = training_arguments("trainer_output")
    AutotuneTrainer(model=model, args=arguments, train_dataset=data).train()

`train.py` next to it is such a script. {_measured_on(recipe)}
"""'''


def _measured_on(recipe: Recipe) -> str:
    if recipe.devices > 1:
        return f"""It must run in {recipe.devices} processes, such as torchrun starts: with
another number of them the global batch is another one."""
    return """Measured on one device. On N devices the global batch
is N times as large, unless gradient_accumulation_steps is divided by N."""


def _settings(recipe: Recipe, keys: Mapping[str, Any]) -> Part:
    """Returns the settings of the process and the constants."""
    config = recipe.config
    lines = ["from typing import Any", "import torch"]
    process = launch.with_torch(config)
    lines += [f"import {name}" for name in launch.CONFIG_MODULES if name in "".join(process)]
    if process:
        lines += ["# Settings of the process.", *process, ""]
    if recipe.workload.script is None:
        lines.append(f"SEQUENCE_LENGTH = {recipe.workload.sequence_length}")
    lines.append(f"WEIGHTS_DTYPE = torch.{base_dtype(config)}")
    if config.adapter != "none":
        lines.append(adapter_constants(config, recipe.workload))
    lines.append(f"SCHEDULE = {_literal(recipe.workload.schedule)}")
    lines.append("SETTINGS = {")
    lines += [f"    {_literal(name)}: {_literal(value)}," for name, value in keys.items()]
    lines.append("}")
    return code("\n".join(lines))


def _literal(value: Any) -> str:
    return repr(value).replace("'", '"')


# -- definitions written for this configuration ----------------------------------------------------


def _sequences(workload: Workload) -> Part:
    if workload.learns_answers:
        return _sequences_with_answers(workload)
    kind = f"{workload.packing}_sequences"
    return code(f'''
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from autotune.shipped.trainer.{workload.packing} import {kind}

def sequences(texts: Iterable[str], encode: Callable[[str], Sequence[int]]) -> list[dict[str, Any]]:
    """Returns a training set for Trainer; `encode` returns the tokens of a text."""
    return {kind}(texts, encode, SEQUENCE_LENGTH)''')


def _sequences_with_answers(workload: Workload) -> Part:
    kind = f"{workload.packing}_conversations"
    format = workload.prompts
    if format is not None and not format.makes_messages:
        return code(f'''
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from autotune.shipped.trainer.conversations import {kind}
from autotune.shipped.trainer.prompts import answered_prompts

PROMPT_FORMAT: dict[str, Any] = {format.to_dict()!r}

def sequences(
    rows: Iterable[Any],
    encode: Callable[[str], Sequence[int]],
    *,
    beginning: Sequence[int] = (),
    ending: Sequence[int] = (),
) -> list[dict[str, Any]]:
    """Returns a training set for Trainer: rows are put into prompts, and the answers learned.

    `encode` returns the tokens of a text alone; `beginning` and `ending` are put around each row.
    """
    prompts = answered_prompts(rows, PROMPT_FORMAT, encode, beginning=beginning, ending=ending)
    return {kind}(prompts, SEQUENCE_LENGTH)''')
    imports = "from autotune.shipped.chat_template import Message, conversation_of"
    messages = f'conversation_of(row[{workload.chat_column!r}], system=row.get("system"))'
    if format is not None:
        imports += "\nfrom autotune.shipped.prompts import messages_of"
        imports += f"\n\nPROMPT_FORMAT: dict[str, Any] = {format.to_dict()!r}"
        messages = "conversation_of(made) if (made := messages_of(row, PROMPT_FORMAT)) else []"
    learns_all = format is not None and format.learned == "all"
    return code(f'''
from collections.abc import Iterable
from typing import Any
from autotune.shipped.trainer.conversations import answered_conversations, {kind}
{imports}

def messages_in(row: Any) -> list[Message]:
    """Returns the messages of a row, none for one without an answer."""
    return {messages}

def sequences(rows: Iterable[Any], tokenizer: Any) -> list[dict[str, Any]]:
    """Returns a training set for Trainer: the answers in `rows` are learned, nothing else."""
    conversations = answered_conversations(rows, tokenizer, messages_in, learns_all={learns_all})
    return {kind}(conversations, SEQUENCE_LENGTH)''')


def _arguments(config: TrainingConfig) -> Part:
    functions = "`from_pretrained` and `from_config`"
    imports = "from typing import Any\nfrom transformers import TrainingArguments"
    if is_quantized(config):
        functions = "`from_pretrained`"
        name = "BitsAndBytesConfig" if config.base_weights == "nf4" else "TorchAoConfig"
        imports += f"\nfrom transformers import {name}"
    return code(f'''{imports}

def model_kwargs() -> dict[str, Any]:
    """Returns arguments for {functions}."""
{_model_kwargs(config)}


{_TRAINING_ARGUMENTS}''')


def _model_kwargs(config: TrainingConfig) -> str:
    if not is_quantized(config):
        return '    return {"dtype": WEIGHTS_DTYPE, "attn_implementation": "sdpa"}'
    returned = """\
    return {
        "dtype": WEIGHTS_DTYPE,
        "attn_implementation": "sdpa",
        "quantization_config": quantization,
    }"""
    if config.base_weights == "nf4":
        packed_in = storage_dtype(config)
        storage = "\n        bnb_4bit_quant_storage=WEIGHTS_DTYPE," if packed_in is not None else ""
        return f"""\
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=WEIGHTS_DTYPE,{storage}
    )
{returned}"""
    name = torchao_class(config)
    return f"""\
    from torchao.quantization import {name}

    quantization = TorchAoConfig({name}())
{returned}"""


_TRAINING_ARGUMENTS = '''\
def training_arguments(output_dir: str, **changes: Any) -> TrainingArguments:
    """Returns these settings with your `changes`."""
    return TrainingArguments(output_dir=output_dir, **{**SETTINGS, **changes})'''


def _prepare_model(recipe: Recipe, *, by_keys: bool, version: str) -> Part:
    config, workload = recipe.config, recipe.workload
    lines = []
    if not is_quantized(config):
        lines.append("set_weights_dtype(model, WEIGHTS_DTYPE)")
    if config.adapter != "none":
        lines += [*_FIND_BLOCKS, *_adapter_lines(config, workload)]
        if config.offload == "frozen":
            lines.append("keep_frozen_on_host(model, list(found.blocks), device)")
    elif _needs_blocks(config, by_keys=by_keys):
        lines += _FIND_BLOCKS
    if version == "4.57":  # later ones do so by themselves
        lines.append("model.config.use_cache = False  # recomputation would fill it twice")
    if _needs_causal_flag(config, version):
        lines.append("keep_causal_flag()")
    if config.loss == "chunked":
        lines.append("use_chunked_loss(model, chunked_token_loss)")
    if config.precision in CONVERSIONS:
        lines += ["for block in found.blocks:", f"    {CONVERSIONS[config.precision]}"]
    if config.feed_forward == "tiled":
        lines.append("tile_blocks(found.blocks, found.attention_name)")
    if config.activation_budget != NO_LIMIT:
        lines += [line.format(blocks="found.blocks") for line in KEEPING_LINES]
    if not by_keys:
        lines += _checkpointing_lines(config)
    recomputes = config.checkpointing != "none" and not by_keys
    compiled = "compile_in_place({})" if recomputes else "{}.compile(dynamic=False)"
    if config.compile == "block":
        lines += ["for block in found.blocks:", f"    {compiled.format('block')}"]
    if config.checkpointing == "sqrt" and not by_keys:
        lines += _SEGMENT_LINES  # a segment runs compiled blocks and is not one graph itself
    if config.compile == "model":
        lines.append(compiled.format("model"))
    body = "\n".join(f"    {line}" for line in [*lines, "return model"])
    device = ", device: Any" if config.offload == "frozen" else ""
    return code(f'''from typing import Any

def prepare_model(model: Any{device}) -> Any:
    """Applies in place, in the order of the trial, what TrainingArguments have no key for.

    AutotuneTrainer calls it.
    """
{body}''')


_FIND_BLOCKS = (
    "found = find_blocks(model)",
    'assert found is not None, "the model has no list of blocks of one class"',
)


def _adapter_lines(config: TrainingConfig, workload: Workload) -> list[str]:
    lines = ["parts = list(found.blocks)"]
    if config.adapter_targets == "attention":
        lines = [
            'assert found.attention_name is not None, "the blocks have no attention module"',
            "parts = [getattr(block, found.attention_name) for block in found.blocks]",
        ]
    if config.adapter_targets == "experts":
        lines.append("experts = expert_weights(model, parts)")
    return [
        *lines,
        "layers = linear_layers(model, parts)",
        *adding_lines(config, workload),
    ]


_SEGMENT_LINES = (
    'kinds = set(getattr(model.config, "layer_types", None) or ())',
    'assert len(kinds) <= 1, "blocks with different arguments cannot share a segment"',
    "recompute_segments(list(found.blocks))",
)


def _checkpointing_lines(config: TrainingConfig) -> list[str]:
    match config.checkpointing:
        case "none" | "sqrt":
            return []
        case "attention":
            return [
                'assert found.attention_name is not None, "the blocks have no attention module"',
                "for block in found.blocks:",
                "    recompute(getattr(block, found.attention_name))",
            ]
        case "selective":
            return [
                "for block in found.blocks:",
                "    recompute(block, context_fn=selective_contexts)",
            ]
        case "selective-2":
            return [
                "for block in found.blocks:",
                "    recompute(block, context_fn=alternating_contexts)",
            ]
        case "save-attention":
            return [
                "for block in found.blocks:",
                "    recompute(block, context_fn=attention_contexts)",
            ]
    every = {"block": 1, "every-2": 2, "every-4": 4}[config.checkpointing]
    return [
        f"for block in list(found.blocks)[::{every}]:",
        "    recompute(block)",
    ]


def _make_optimizer(recipe: Recipe) -> Part:
    config = recipe.config
    name, import_class = imported_optimizer(recipe)
    imports = f"    {import_class}\n\n" if import_class else ""
    made = _call(name, *_optimizer_arguments(recipe))
    body = f"    {returning(made, config)}"
    if config.precision == "bf16-stochastic":
        make_exact = f"    return {made}".replace("\n", "\n    ")
        arguments = (
            "parameters",
            "make_exact",
            "learning_rate=learning_rate",
            f"seed={recipe.workload.seed}",
        )
        rounded = _call("StochasticallyRounded", *arguments)
        body = f"""
    def make_exact(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    {make_exact}

    {returning(rounded, config)}"""
    return code(f'''from collections.abc import Sequence
from typing import Any
import torch
from torch import nn

def make_optimizer(
    parameters: Sequence[Any], *, learning_rate: float, weight_decay: float
) -> torch.optim.Optimizer:
    """Makes the trial's optimizer."""
{imports}{body}''')


def _call(function: str, *arguments: str) -> str:
    """Returns a call with one argument per line, for the body of a function."""
    lines = "".join(f"        {argument},\n" for argument in arguments)
    return f"{function}(\n{lines}    )"


def _optimizer_arguments(recipe: Recipe) -> list[str]:
    """Returns the arguments as in `autotune/techniques/optimizer.py`."""
    flags = recipe.optimizer.flags(recipe.config.optimizer_fusion)
    settings: dict[str, object] = {"lr": "learning_rate", **recipe.optimizer.arguments, **flags}
    if "weight_decay" in settings:
        settings["weight_decay"] = "weight_decay"
    return ["parameters", *(f"{name}={value}" for name, value in settings.items())]


_TRAINER = '''
from typing import Any
import torch
from transformers import Trainer, TrainingArguments

class AutotuneTrainer(Trainer):
    """Trainer with the trial's techniques, optimizer and schedule.

    An optimizer or schedule that you choose in the arguments is made by Trainer as usual.
    """

    def __init__(self, model: Any, args: TrainingArguments | None = None, **others: Any) -> None:
        if args is None:
            args = training_arguments("trainer_output")
        super().__init__(prepare_model({prepared}), args, **others){promise}

    def create_optimizer(self, *args: Any) -> torch.optim.Optimizer:
        if self.optimizer is not None or self.args.optim != SETTINGS["optim"]:
            return super().create_optimizer(*args)
        model = self.model
        parameters = {parameters}
        {optimizer}
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        is_changed = self.args.lr_scheduler_type != SETTINGS["lr_scheduler_type"]
        if self.lr_scheduler is not None or is_changed:
            return super().create_scheduler(num_training_steps, optimizer)
        warmup_steps = self.args.get_warmup_steps(num_training_steps)

        def factor(step: int) -> float:
            return scheduled_rate(
                step,
                rate=1.0,
                steps=num_training_steps,
                warmup_steps=warmup_steps,
                schedule=SCHEDULE,
            )

        optimizer = optimizer or self.optimizer
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        self._created_lr_scheduler = True
        return self.lr_scheduler'''

_TRAINED = "[parameter for parameter in model.parameters() if parameter.requires_grad]"
_WATCH = """
        if watch is not None:
            watch(self, TRIAL)"""

_OWN_LOSS = '''

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Weighs the loss of a micro batch by its share of the labels, as the trial did.

        Trainer would add the balance of the experts once for each micro batch.
        """
        found = super().compute_loss(model, inputs, return_outputs)
        if num_items_in_batch is None:
            return found
        share = (inputs["labels"][:, 1:] != -100).sum() / num_items_in_batch
        if self.args.average_tokens_across_devices:
            share = share * self.accelerator.num_processes
        return (found[0] * share, found[1]) if return_outputs else found * share'''

_OFFLOAD = """

    def compute_loss_context_manager(self) -> Any:
        contexts = super().compute_loss_context_manager()
        contexts.enter_context(offloaded(self.model))
        return contexts"""


_MAKE = """self.optimizer = make_optimizer(
            parameters, learning_rate=self.args.learning_rate, weight_decay=self.args.weight_decay
        )"""
_MAKE_IN_BACKWARD = f"""\
micro_batches = self.args.world_size * self.args.gradient_accumulation_steps
        assert micro_batches == 1, "use one device and no gradient accumulation"
        # Each gradient is used before the norm of all gradients is known.
        assert not self.args.max_grad_norm, "gradients cannot be clipped: set max_grad_norm to 0"
        {_MAKE}
        step_in_backward(self.optimizer)"""


def _promise(trial: Mapping[str, Any]) -> Part:
    """Returns what the file has of `autotune_promise.py`, which is beside it."""
    lines = literal_lines("TRIAL: dict[str, Any]", trial)
    return code("\n".join(["from typing import Any", *lines, *_IMPORT_OF_PROMISE]))


_IMPORT_OF_PROMISE = (
    "try:",
    "    from autotune_promise import watch",
    "except ImportError:  # without that file nothing is compared with the trial",
    "    watch = None",
)


def _trainer(recipe: Recipe) -> Part:
    in_backward = recipe.config.optimizer_fusion == "backward"
    text = _TRAINER.replace("{optimizer}", _MAKE_IN_BACKWARD if in_backward else _MAKE)
    text = text.replace("{parameters}", parameters_of(recipe, otherwise=_TRAINED))
    prepared = "model, args.device" if recipe.config.offload == "frozen" else "model"
    text = text.replace("{prepared}", prepared)
    text = text.replace("{promise}", _WATCH if is_promised(recipe) else "")
    if recipe.workload.script is None and not recipe.workload.has_loss_of_tokens:
        text += _OWN_LOSS
    if recipe.config.activation_offload == "cpu":
        text += _OFFLOAD
    return code(text)
