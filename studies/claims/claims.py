"""Checks what is commonly claimed about the memory of a training, by predictions without a device.

    python -m studies.claims.claims            # runs what results.json.xz does not have yet
    python -m studies.claims.claims --table    # prints the tables of README.md

Each case is one command, `autotune predict ... --json`, run in the root of the repository; from its
answer results.json.xz keeps what the tables need. A run that is ended continues. Models are written
to `models/` as a config.json; the exercise's own model is `exercise.py`. What cannot be predicted
(DeepSpeed, weights in host memory) is worked out by the formulas at the end of this file, and the
tables call it arithmetic.
"""

import argparse
import json
import os
import platform
import shlex
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from autotune.errors import AutotuneError
from autotune.execution.local import LocalExecutor
from autotune.spec.config import configuration_of
from autotune.spec.model_choice import with_model_config
from autotune.spec.workload_options import WORKLOAD_OPTIONS
from autotune.study.predictions import Forecaster, workload_of
from studies.compressed import read_json, write_json

HERE = Path(__file__).parent
RESULTS = HERE / "results.json.xz"
MODELS_FOLDER = HERE / "models"
REPOSITORY = HERE.parent.parent


def gpt2(*, layers: int, width: int, heads: int, positions: int = 1024) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "vocab_size": 50257,
        "n_layer": layers,
        "n_embd": width,
        "n_head": heads,
        "n_positions": positions,
        # One operator, as the kernels of the trainings that the claims are about.
        "activation_function": "gelu",
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }


MODELS: Mapping[str, Mapping[str, Any]] = {
    "gpt2_1.5b": gpt2(layers=48, width=1600, heads=25),
    "gpt2_1.0b": gpt2(layers=30, width=1600, heads=25),
    "gpt2_30b": gpt2(layers=48, width=7168, heads=56, positions=2048),
    "llama_7b": {
        "model_type": "llama",
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    },
    "llama_4.15b": {
        "model_type": "llama",
        "vocab_size": 32000,
        "hidden_size": 3072,
        "intermediate_size": 8160,
        "num_hidden_layers": 35,
        "num_attention_heads": 24,
        "num_key_value_heads": 24,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    },
}

# -- what is predicted -----------------------------------------------------------------------------

SHORT = "--seq-len 8"
"""So few tokens that weights, gradients and the optimizer's state are nearly all of the memory."""
EXERCISE = (
    "--model studies/claims/exercise.py:build --layers 24 --vocab-size 50257 --seq-len 1024 "
    "--optimizer-fusion foreach"
)
AS_BUILT = f"{EXERCISE} --width 2048 --heads 32"
AS_COMMENTED = f"{EXERCISE} --width 1024 --heads 16"
LONG_GPT2 = "--model studies/claims/models/gpt2_1.5b.json --seq-len 1000 --global-batch 32"
LENGTHS = (512, 1024, 2048, 4096)
DEPTHS = (16, 64)


def cases() -> dict[str, str]:
    """Returns the arguments of `autotune predict` by the name of the case."""
    found: dict[str, str] = {}

    xl = f"--model studies/claims/models/gpt2_1.5b.json {SHORT} --optimizer-fusion kernel"
    for precision in ("fp32", "bf16-mixed", "fp16-mixed", "bf16-true"):
        found[f"states of 1.5 B, {precision}"] = f"{xl} --global-batch 1 --precision {precision}"
    found["states of 1.5 B, fp32, ddp"] = f"{xl} --global-batch 2 --world-size 2"
    found["7 B, fp32"] = (
        f"--model studies/claims/models/llama_7b.json {SHORT} --global-batch 1 "
        "--optimizer-fusion kernel"
    )

    billion = f"--model studies/claims/models/gpt2_1.0b.json {SHORT} --optimizer-fusion kernel"
    for precision in ("fp32", "bf16-mixed"):
        for sharding in ("ddp", "zero1", "zero2", "zero3"):
            found[f"1 B, {precision}, {sharding} on 4"] = (
                f"{billion} --global-batch 4 --world-size 4 --sharding {sharding} "
                f"--precision {precision}"
            )
    for sharding in ("zero2", "zero3"):
        found[f"1 B, bf16-mixed, {sharding} on 64"] = (
            f"{billion} --global-batch 64 --world-size 64 --sharding {sharding} "
            "--precision bf16-mixed"
        )

    for name, model in (("1.42 B", AS_BUILT), ("0.41 B", AS_COMMENTED)):
        single = f"{model} --global-batch 16"
        found[f"exercise, {name}, fp32"] = single
        found[f"exercise, {name}, fp32, attention"] = f"{single} --checkpointing attention"
        found[f"exercise, {name}, fp32, block"] = f"{single} --checkpointing block"
        found[f"exercise, {name}, fp16-mixed"] = f"{single} --precision fp16-mixed"
        found[f"exercise, {name}, fp16-mixed, block"] = (
            f"{single} --precision fp16-mixed --checkpointing block"
        )
    # The lesson's code gives each device 16 sequences.
    for sharding in ("zero2", "zero3"):
        for checkpointing in ("none", "block"):
            found[f"exercise, 1.42 B, bf16-mixed, {checkpointing}, {sharding} on 4"] = (
                f"{AS_BUILT} --global-batch 64 --world-size 4 --sharding {sharding} "
                f"--precision bf16-mixed --checkpointing {checkpointing}"
            )
    found["exercise, profiled"] = (
        f"{AS_BUILT.replace('1024 --opt', '512 --opt')} --global-batch 4 --precision fp16-mixed"
    )
    found["exercise, accumulation 1 of 4"] = f"{AS_COMMENTED} --global-batch 4 --micro-batch 4"
    found["exercise, accumulation 4 of 4"] = f"{AS_COMMENTED} --global-batch 16 --micro-batch 4"

    thirty = (
        "--model studies/claims/models/gpt2_30b.json --seq-len 1024 --checkpointing block "
        "--optimizer-fusion kernel --sharding zero3"
    )
    for precision in ("fp32", "bf16-mixed", "bf16-true"):
        found[f"30 B, {precision}, zero3 on 8"] = (
            f"{thirty} --global-batch 8 --world-size 8 --precision {precision}"
        )
    found["30 B, bf16-mixed, zero3 on 64"] = (
        f"{thirty} --global-batch 64 --world-size 64 --precision bf16-mixed"
    )

    for precision in ("fp16-mixed", "bf16-true"):
        for attention in ("auto", "math"):
            for checkpointing in ("none", "block"):
                found[f"activations, {precision}, {attention}, {checkpointing}"] = (
                    f"{LONG_GPT2} --precision {precision} --attention {attention} "
                    f"--checkpointing {checkpointing}"
                )

    plan = (
        "--model studies/claims/models/llama_4.15b.json --seq-len 2048 --global-batch 16 "
        "--world-size 8 --optimizer-fusion kernel"
    )
    found["plan, fp32"] = f"{plan} --attention math"
    found["plan, + checkpointing"] = f"{plan} --attention math --checkpointing block"
    found["plan, + zero2"] = f"{plan} --attention math --checkpointing block --sharding zero2"
    found["plan, + fused attention"] = f"{plan} --checkpointing block --sharding zero2"
    found["plan, + bf16-mixed"] = (
        f"{plan} --checkpointing block --sharding zero2 --precision bf16-mixed"
    )
    found["plan, + bf16-true"] = (
        f"{plan} --checkpointing block --sharding zero2 --precision bf16-true"
    )
    found["plan, zero3 instead"] = (
        f"{plan} --checkpointing block --sharding zero3 --precision bf16-mixed"
    )
    found["plan, fp32, fused attention alone"] = plan

    for length in LENGTHS:
        for attention in ("math", "flash"):
            found[f"length {length}, {attention}"] = (
                f"--layers 8 --width 1024 --heads 16 --seq-len {length} --global-batch 4 "
                f"--precision bf16-mixed --attention {attention}"
            )
    for layers in DEPTHS:
        for checkpointing in ("none", "sqrt", "block"):
            found[f"{layers} layers, {checkpointing}"] = (
                f"--layers {layers} --width 512 --heads 8 --seq-len 512 --global-batch 8 "
                f"--checkpointing {checkpointing}"
            )
    return found


def command_of(arguments: str) -> str:
    return (
        f"autotune predict --device cuda --compute-capability {COMPUTE_CAPABILITY} "
        f"{arguments} --json"
    )


# -- running it ------------------------------------------------------------------------------------

COMPUTE_CAPABILITY = "8.0"
MOST_HOLDERS = 6
KEPT = (
    "parameters",
    "peak_memory_bytes",
    "upper_bound_bytes",
    "phase",
    "module",
    "operator",
    "bytes_by_category",
    "devices",
    "peak_memory_bytes_by_rank",
    "distinct_ranks",
    "extrapolated_from",
    "check_error_bytes",
)


def write_models() -> None:
    MODELS_FOLDER.mkdir(exist_ok=True)
    for name, content in MODELS.items():
        text = json.dumps(content, indent=2) + "\n"
        (MODELS_FOLDER / f"{name}.json").write_text(text)


def settings_of(arguments: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns what the options set of the workload, and of the configuration."""
    fields = {option.flag: name for name, option in WORKLOAD_OPTIONS.items()}
    fields["--world-size"] = "devices_per_trial"
    words = shlex.split(arguments)
    workload: dict[str, Any] = {}
    configuration: dict[str, Any] = {}
    for flag, text in zip(words[::2], words[1::2], strict=True):
        value = int(text) if text.isdigit() else text
        if flag in fields:
            workload[fields[flag]] = value
        elif flag == "--micro-batch":
            configuration["micro_batch_size"] = value
        else:
            configuration[flag.removeprefix("--").replace("-", "_")] = value
    return with_model_config(workload), configuration


def predict(arguments: str, *, executor: LocalExecutor) -> dict[str, Any]:
    """Returns what the command does, a deep model extrapolated over its depth."""
    settings, configuration = settings_of(arguments)
    workload = workload_of("cuda", settings)
    forecaster = Forecaster(
        executor=executor,
        workload=workload,
        device_type="cuda",
        compute_capability=COMPUTE_CAPABILITY,
        extrapolates="any",
    )
    kept: dict[str, Any] = {"command": command_of(arguments)}
    try:
        config = configuration_of(configuration, workload.legality_context)
        answer = forecaster.predict(config).to_dict()
    except AutotuneError as error:
        return {**kept, "error": str(error)}
    kept |= {key: answer[key] for key in KEPT}
    kept["holders"] = answer["holders"][:MOST_HOLDERS]
    kept["seconds"] = round(answer["seconds"], 1)
    return kept


def run() -> None:
    write_models()
    results = read_results() if RESULTS.exists() else {"about": {}, "cases": {}}
    wanted = cases()
    stored = results["cases"]
    results["cases"] = {name: stored[name] for name in wanted if name in stored}
    with TemporaryDirectory() as folder, LocalExecutor(Path(folder)) as executor:
        for number, (name, arguments) in enumerate(wanted.items()):
            known = results["cases"].get(name)
            if known is not None and known["command"] == command_of(arguments):
                continue
            print(f"{number + 1} of {len(wanted)}: {name}", flush=True)
            done = {**results["cases"], name: predict(arguments, executor=executor)}
            results["cases"] = {name: done[name] for name in wanted if name in done}
            results["about"] = about()
            unsaved = RESULTS.with_suffix(".new")
            write_json(unsaved, results)
            unsaved.replace(RESULTS)


def about() -> dict[str, str]:
    return {
        "command": "python -m studies.claims.claims",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{os.cpu_count()} processors, {platform.machine()}, no GPU",
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
    }


def read_results() -> dict[str, Any]:
    content: dict[str, Any] = read_json(RESULTS)
    return content


# -- arithmetic ------------------------------------------------------------------------------------


def parameters_by_hand() -> dict[str, int]:
    """Returns the parameters of the models by their sizes, to compare with the predictions'."""
    vocabulary = 50257

    def gpt2_of(layers: int, width: int, positions: int) -> int:
        block = 12 * width**2 + 9 * width + 4 * width  # matrices, their biases, two norms
        return (vocabulary + positions) * width + layers * block + 2 * width

    def llama_of(layers: int, width: int, inner: int, words: int) -> int:
        block = 4 * width**2 + 3 * width * inner + 2 * width
        return 2 * words * width + layers * block + width

    def exercise_of(layers: int, width: int, positions: int) -> int:
        return gpt2_of(layers, width, positions) + vocabulary * width  # the head is not tied

    return {
        "states of 1.5 B, fp32": gpt2_of(48, 1600, 1024),
        "1 B, fp32, ddp on 4": gpt2_of(30, 1600, 1024),
        "30 B, fp32, zero3 on 8": gpt2_of(48, 7168, 2048),
        "7 B, fp32": llama_of(32, 4096, 11008, 32000),
        "plan, fp32": llama_of(35, 3072, 8160, 32000),
        "exercise, 1.42 B, fp32": exercise_of(24, 2048, 1024),
        "exercise, 0.41 B, fp32": exercise_of(24, 1024, 1024),
    }


def deepspeed_bytes(devices: int, *, stage: int) -> float:
    """Returns the bytes a parameter of fp16 training with fp32 masters.

    They are 2 for the weight, 2 for the gradient, 12 for the master and two moments. Source:
    section 5 of arXiv:1910.02054.
    """
    weight, gradient, state = 2.0, 2.0, 12.0
    if stage >= 1:
        state /= devices
    if stage >= 2:
        gradient /= devices
    if stage >= 3:
        weight /= devices
    return weight + gradient + state


# -- the tables ------------------------------------------------------------------------------------

Row = tuple[str, str, str, str]
"""Claim, what is claimed, what is predicted or worked out, and what that says of the claim."""


class Found:
    """What was predicted, by the name of the case, in bytes of 10^9 a GB."""

    def __init__(self, stored: Mapping[str, Mapping[str, Any]]) -> None:
        self._stored = stored

    def peak(self, case: str) -> float:
        return float(self._stored[case]["peak_memory_bytes"])

    def of(self, case: str, *categories: str) -> float:
        held = self._stored[case]["bytes_by_category"]
        return float(sum(held[category] for category in categories))

    def parameters(self, case: str) -> int:
        return int(self._stored[case]["parameters"])

    def each(self, case: str, *categories: str) -> str:
        """Returns bytes a parameter, of the categories or of the whole peak."""
        size = self.of(case, *categories) if categories else self.peak(case)
        return f"{size / self.parameters(case):.1f}"

    def gb(self, case: str, *categories: str) -> str:
        return gb(self.of(case, *categories) if categories else self.peak(case))


def gb(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:.1f}"


STATES = ("parameters", "gradients", "optimizer_state")


def tables(stored: Mapping[str, Mapping[str, Any]]) -> dict[str, list[Row]]:
    found = Found(stored)
    return {
        "Bytes a parameter": _of_states(found),
        "ZeRO": _of_zero(found),
        "The exercise, as its code builds it": _of_exercise(found),
        "Activations": _of_activations(found),
        "From 136 GB to 66 GB": _of_plan(found),
        "Attention and the length": _of_lengths(found),
        "Checkpointing": _of_checkpointing(found),
    }


def _of_states(found: Found) -> list[Row]:
    plain, mixed, true = (
        f"states of 1.5 B, {precision}" for precision in ("fp32", "bf16-mixed", "bf16-true")
    )
    ddp = "1 B, bf16-mixed, ddp on 4"
    master_bytes = deepspeed_bytes(1, stage=0)
    return [
        (
            "Blog, fp16 weights and gradients, fp32 masters and moments",
            "16 bytes",
            f"{master_bytes:.0f} (arithmetic: 2 + 2 + 12)",
            "True of DeepSpeed and apex: it is the sum of its parts.",
        ),
        (
            "Lesson, fp32 Adam",
            "16 bytes",
            f"{found.each(plain, *STATES)}",
            "True: 4 + 4 + 8. The rest is rounding: torch's allocator gives large tensors whole "
            "blocks of 2 MiB.",
        ),
        (
            "the same of autocast (bf16-mixed, fp16-mixed)",
            "16 bytes",
            f"{found.each(mixed, *STATES)} at the step; {found.each(ddp)} with ddp",
            "Also 16, by other parts: 4 + 4 + 8 and no second copy of the weights at the step. "
            "Between forward and backward there is one, 2 bytes more, which is the peak where the "
            "gradients stay allocated, as with ddp.",
        ),
        (
            "16-bit throughout (bf16-true)",
            "",
            f"{found.each(true, *STATES)}",
            "Not claimed, for comparison: 2 + 2 + 4.",
        ),
        (
            "Notes, Adam's state",
            "12 bytes",
            f"{found.each(plain, 'optimizer_state')}",
            "Only with a separate fp32 master, as DeepSpeed has. In fp32 and autocast the weight "
            "is the master, and the state 8.",
        ),
        (
            "Lesson, gradients in mixed precision",
            "4 (text) and 2 (its table)",
            f"{found.each(mixed, 'gradients')}",
            "The two contradict each other: 4 with autocast, as its code does, 2 with DeepSpeed.",
        ),
        (
            "Blog, GPT-2 of 1.5 B: fp16 weights, all states",
            "3 GB, at least 24 GB",
            f"{found.gb(true, 'parameters')} GB, {found.gb(mixed, *STATES)} GB",
            f"True ({found.parameters(mixed) / 1e6:,.1f} M parameters).",
        ),
        (
            "Lesson, weights of 7 B in fp32; with gradients and Adam",
            "28 GB; well over 100 GB",
            f"{found.gb('7 B, fp32', 'parameters')} GB; {found.gb('7 B, fp32')} GB",
            f"True (Llama's 7 B are {found.parameters('7 B, fp32') / 1e9:.2f} B), before any "
            "activation.",
        ),
        (
            "Blog, flat fp32 buffer to all-reduce 1.5 B gradients",
            "6 GB",
            f"{gb(found.peak('states of 1.5 B, fp32, ddp') - found.peak(plain))} GB more than on "
            "one device",
            "True of one flat buffer (4 bytes a parameter), which nobody needs: DDP reduces "
            "buckets of 25 MiB, and with `gradient_as_bucket_view` they are the gradients.",
        ),
    ]


def _of_zero(found: Found) -> list[Row]:
    on_4 = {stage: f"1 B, fp32, {stage} on 4" for stage in ("ddp", "zero1", "zero2", "zero3")}
    mixed = {stage: f"1 B, bf16-mixed, {stage} on 4" for stage in on_4}
    ddp, zero2, zero3 = (f"30 B, {p}, zero3 on 8" for p in ("fp32", "bf16-mixed", "bf16-true"))
    less = {stage: found.peak(on_4["ddp"]) / found.peak(case) for stage, case in on_4.items()}
    many = {
        stage: found.peak(mixed["ddp"]) / found.peak(f"1 B, bf16-mixed, {stage} on 64")
        for stage in ("zero2", "zero3")
    }
    by_arithmetic = ", ".join(f"{16 / deepspeed_bytes(4, stage=stage):.1f}x" for stage in (1, 2, 3))
    predicted = ", ".join(f"{less[stage]:.1f}x" for stage in ("zero1", "zero2", "zero3"))
    whole_state, part_of_state = (
        found.of(on_4[stage], "optimizer_state") for stage in ("ddp", "zero2")
    )
    return [
        (
            "Lesson, Adam's state of 1 B on each of 4 GPUs: DDP, stage 1",
            "8 GB, 2 GB",
            f"{found.gb(on_4['ddp'], 'optimizer_state')} GB, "
            f"{found.gb(on_4['zero1'], 'optimizer_state')} GB",
            "True: an Nth. ZeroRedundancyOptimizer deals out whole weights, so that ranks differ.",
        ),
        (
            "Lesson, 1 B in mixed precision with DDP",
            "18 GB",
            f"16.0 GB (arithmetic), {found.gb(mixed['ddp'])} GB with autocast",
            "Its own rows (6 of weights, 2 of gradients, 8 of state) add up to 16.",
        ),
        (
            "Lesson, the same with stage 2 on 4 GPUs",
            "8.5 GB (weights 4 + 2, gradients 0.5, state 2)",
            f"{deepspeed_bytes(4, stage=2):.1f} GB (arithmetic, DeepSpeed), "
            f"{found.gb(mixed['zero2'])} GB (FSDP2, bf16-mixed), {found.gb(on_4['zero2'])} GB "
            "(FSDP2, fp32)",
            "Too high: the rows add up, but DeepSpeed divides the fp32 masters, too, from stage 1 "
            "on.",
        ),
        (
            "Notes, ZeRO-1, 2 and 3 reduce memory",
            "4x, 8x, Nx",
            f"on 4 devices {by_arithmetic} (arithmetic, DeepSpeed); {predicted} (fp32); on 64 "
            f"{many['zero2']:.1f}x and {many['zero3']:.1f}x for stages 2 and 3 "
            "(bf16-mixed)",
            "4x and 8x are limits for many devices, and of DeepSpeed's 2 + 2 + 12 bytes; of "
            "4 + 4 + 8 stage 1 can reach 2x. Nx is of weights, gradients and state only: the "
            "vocabulary's gathered matrix and its gradients stay whole.",
        ),
        (
            "Notes, optimizer state with ZeRO-2",
            "8x less",
            f"{whole_state / part_of_state:.1f}x on 4 devices",
            "Wrong: the state is an Nth in every stage. 8x is the limit of the total.",
        ),
        (
            "Lesson, 30 B with DDP",
            "120 GB",
            "480 GB (arithmetic: 16 bytes a parameter)",
            "120 GB are the fp32 weights alone.",
        ),
        (
            "Lesson, 30 B by stage 3 on 8 GPUs of 16 GB",
            "fits",
            f"{found.gb(ddp)} GB a GPU (fp32), {found.gb(zero2)} GB (bf16-mixed), "
            f"{found.gb(zero3)} GB (bf16-true)",
            "Wrong: an eighth of 480 GB is 60 GB. One sequence of 1,024 tokens a GPU, every block "
            f"checkpointed. On 64 GPUs it is {found.gb('30 B, bf16-mixed, zero3 on 64')} GB, "
            "before the CUDA context. On 8, weights, gradients and state would have to be in host "
            "memory.",
        ),
    ]


def _of_exercise(found: Found) -> list[Row]:
    built, small = "exercise, 1.42 B", "exercise, 0.41 B"
    count = found.parameters(f"{built}, fp32")
    tied = count - 50257 * 2048
    block = f"{small}, fp32, block"
    zero = f"{built}, bf16-mixed, {{}}, {{}} on 4"
    zero3 = zero.format("block", "zero3")
    moved = found.of(zero3, "parameters", "gradients", "optimizer_state")
    states = found.of(f"{built}, fp32", "parameters", "optimizer_state") / 3 * 4
    without_state = found.peak(block) - found.of(block, "optimizer_state")
    return [
        (
            "parameters, in fp32, with Adam",
            "350 M, 1.4 GB, 5.6 GB",
            f"{count / 1e6:,.1f} M, {found.gb(f'{built}, fp32', 'parameters')} GB, {gb(states)} GB",
            f"Wrong: four times as many. (With a tied head it would be {tied / 1e6:,.1f} M, but "
            "the code does not tie it.) 350 M is 24 layers of 1,024; a width of 1,024 in this code "
            f"is {found.parameters(block) / 1e6:,.1f} M.",
        ),
        (
            "no technique, 16 x 1,024 tokens, fp32",
            "OOM (> 24 GB)",
            f"{found.gb(f'{built}, fp32')} GB",
            f"True, also for the smaller model ({found.gb(f'{small}, fp32')} GB): 51.5 GB are "
            "softmaxes of attention, which `nn.MultiheadAttention` keeps because it returns them.",
        ),
        (
            "+ checkpointing",
            "14 GB",
            f"{found.gb(f'{built}, fp32, block')} GB; at 0.41 B {found.gb(block)} GB",
            f"Not possible as built: weights, gradients and Adam alone are {gb(states)} GB, and "
            "AdamW's default on CUDA, foreach, adds 5.7 GB for a moment, so that it is out of "
            "memory on 24 GB. At 0.41 B it holds of the first step, which is what the code "
            f"measures: Adam's state, {found.gb(block, 'optimizer_state')} GB, is made after its "
            f"backward pass, which leaves {gb(without_state)} GB.",
        ),
        (
            "+ mixed precision (fp16)",
            "9 GB",
            f"{found.gb(f'{built}, fp16-mixed, block')} GB; at 0.41 B "
            f"{found.gb(f'{small}, fp16-mixed, block')} GB",
            "Wrong: nothing is saved. The peak is at the loss, three tensors of 3.3 GB with 50,257 "
            "fp32 numbers for each token, which autocast keeps in fp32.",
        ),
        (
            "+ ZeRO-2 on several GPUs",
            "6 GB",
            f"on 4, FSDP2 in bf16-mixed: {found.gb(zero.format('block', 'zero2'))} GB "
            f"checkpointed, {found.gb(zero.format('none', 'zero2'))} GB as its code is",
            "Wrong at any number of GPUs, also by DeepSpeed's fp16: the code gives each 16 "
            "sequences, whose loss takes 4.9 GB in fp16, 9.9 GB in fp32, beside 2.8 GB of fp16 "
            "weights (arithmetic). And its ZeRO model is not the checkpointed one.",
        ),
        (
            "+ ZeRO-3 and CPU offload",
            "3 GB",
            f"{found.gb(zero3)} GB on 4 without offload; {gb(found.peak(zero3) - moved)} GB if "
            "nothing of weights, gradients and state stayed (arithmetic)",
            "Wrong for the same reason, 4.9 GB at least in fp16: offload does not touch the "
            "logits. A chunked loss would.",
        ),
        (
            "activations of 350 M, 16 x 1,024 tokens",
            "10 to 20 GB",
            f"{found.gb(f'{small}, fp32', 'activations')} GB (fp32), "
            f"{found.gb(f'{small}, fp16-mixed', 'activations')} GB (fp16-mixed)",
            "Too low (here at 0.41 B): 25.8 GB of the first are softmaxes.",
        ),
        (
            "profile of 4 x 512 tokens: one score matrix of a layer, of 24",
            "64 MB, over 1.5 GB",
            f"{gb(24 * 4 * 32 * 512 * 512 * 2)} GB (arithmetic); the peak, "
            f"{found.gb('exercise, profiled')} GB, is in the optimizer's step",
            "The product is right. But CUDA's autocast computes the softmax in fp32, and "
            "what is kept is 128 MB and a copy of 64 MB (arithmetic). With so few tokens "
            "attention is not the peak.",
        ),
    ]


def _of_activations(found: Found) -> list[Row]:
    def case(precision: str, attention: str, checkpointing: str = "none") -> str:
        return f"activations, {precision}, {attention}, {checkpointing}"

    def activations(*words: str) -> str:
        # The log-softmax of the logits, which no estimate by layers has.
        return gb(found.of(case(*words), "activations") - 4 * 32 * 1000 * 50257)

    one, four = (found.peak(f"exercise, accumulation {steps} of 4") for steps in (1, 4))
    estimate = 12 * 1600 * 32 * 1000 * 48 * 2
    return [
        (
            "Blog, GPT-2 of 1.5 B, 32 x 1,000 tokens",
            "60 GB",
            f"{gb(estimate)} GB (arithmetic: 12 x width x batch x length x layers x 2 bytes, "
            f"arXiv:1910.02054); {activations('bf16-true', 'auto')} GB (bf16-true), "
            f"{activations('fp16-mixed', 'auto')} GB (fp16-mixed)",
            "Low, and only where attention's scores are not kept: a block keeps 16 numbers of 16 "
            f"bits for each width, not 12. With them it is {activations('bf16-true', 'math')} GB.",
        ),
        (
            "Blog, the same, checkpointed",
            "8 GB",
            f"{activations('bf16-true', 'auto', 'block')} GB (bf16-true), "
            f"{activations('fp16-mixed', 'auto', 'block')} GB (fp16-mixed)",
            "Between the two: one input a block, in 16 or 32 bits. Of the peak, "
            f"{found.gb(case('bf16-true', 'auto', 'block'))} GB, 19.3 GB are the loss's, which "
            "neither figure has.",
        ),
        (
            "Lesson, notes, mixed precision and activations",
            "half",
            f"{found.gb('exercise, 1.42 B, fp16-mixed', 'activations')} of "
            f"{found.gb('exercise, 1.42 B, fp32', 'activations')} GB (the exercise)",
            "Not quite: the residual stream and the loss stay in fp32. On CUDA it is less, because "
            "autocast there computes softmax and LayerNorm in fp32, too; a softmax of attention is "
            "then kept with 6 bytes a number instead of 4 (arithmetic).",
        ),
        (
            "Notes, accumulation needs no memory",
            "none",
            f"{gb(four - one)} GB more with 4 micro batches of 4 than with one",
            "Not quite: the gradients of the earlier ones are there during the next forward pass.",
        ),
    ]


def _of_plan(found: Found) -> list[Row]:
    steps = (
        ("plan, fp32", "no technique (ddp, fp32, scores kept)", "136 GB"),
        ("plan, + checkpointing", "+ checkpointing", "121 GB"),
        ("plan, + zero2", "+ ZeRO-2", "86 GB"),
        ("plan, + fused attention", "+ flash attention", "74 GB"),
        ("plan, + bf16-mixed", "+ BF16", "66 GB"),
    )
    verdicts = {
        "plan, fp32": "The states are 66.4 GB; two sequences of 2,048 tokens a GPU (which the "
        "claim does not tell) make up the rest.",
        "plan, + checkpointing": "Claimed 15 GB less. It removes nearly all activations.",
        "plan, + zero2": "Claimed 35 GB less, which would be stage 2 on 2 to 3 devices.",
        "plan, + fused attention": "Claimed 12 GB less. After checkpointing only one block's "
        "scores are left to save.",
        "plan, + bf16-mixed": "Claimed 8 GB less, which is half of the weights.",
    }
    rows = []
    before = 0.0
    for case, step, claimed in steps:
        peak = found.peak(case)
        change = f" ({gb(before - peak)} less)" if before else ""
        rows.append((step, claimed, f"{gb(peak)} GB{change}", verdicts[case]))
        before = peak
    rows.append(
        (
            "bf16-true instead; ZeRO-3 instead",
            "",
            f"{found.gb('plan, + bf16-true')} GB; {found.gb('plan, zero3 instead')} GB",
            "Not claimed. 66 GB is the states alone at 16 bytes without any sharding: the plan "
            "needs far less, or fewer GPUs.",
        )
    )
    rows.append(
        (
            "flash attention first, without the others",
            "124 GB",
            f"{found.gb('plan, fp32, fused attention alone')} GB",
            "What a technique saves depends on those before it: the savings do not add up.",
        )
    )
    return rows


def _of_lengths(found: Found) -> list[Row]:
    rows = []
    scores = 0.0
    for length in LENGTHS:
        math, flash = (
            found.of(f"length {length}, {kernel}", "activations") for kernel in ("math", "flash")
        )
        growth = f", {(math - flash) / scores:.1f}x those of half the length" if scores else ""
        scores = math - flash
        by_hand = 8 * 4 * 16 * length**2
        rows.append(
            (
                f"{length:,} tokens",
                "batch x heads x length^2",
                f"{gb(math)} GB kept with the scores, {gb(flash)} GB by flash",
                f"The scores and what belongs to them: {scores / by_hand:.1f} bytes for each of "
                f"layers x batch x heads x length^2{growth}.",
            )
        )
    last_math, last_flash = (
        found.of(f"length {LENGTHS[-1]}, {kernel}", "activations") for kernel in ("math", "flash")
    )
    rows.append(
        (
            "Notes, FlashAttention's memory",
            "40x less",
            f"{last_math / last_flash:.1f}x less activations at {LENGTHS[-1]:,} tokens",
            "The factor has no length in it and so no meaning: without scores memory is linear in "
            "the length, and the ratio grows with it.",
        )
    )
    return rows


def _of_checkpointing(found: Found) -> list[Row]:
    built = "exercise, 1.42 B, fp32"
    share = (found.peak(built) - found.peak(f"{built}, attention")) / (
        found.peak(built) - found.peak(f"{built}, block")
    )
    less = 1 - found.of(f"{built}, block", "activations") / found.of(built, "activations")
    peak_less = 1 - found.peak(f"{built}, block") / found.peak(built)

    def growth(checkpointing: str) -> str:
        of_16, of_64 = (
            found.of(f"{layers} layers, {checkpointing}", "activations") for layers in DEPTHS
        )
        return f"{of_64 / of_16:.1f}x"

    return [
        (
            "Lesson, attention alone of what whole blocks save",
            "60 to 80 %",
            f"{100 * share:.0f} % (the exercise)",
            "True where attention keeps its scores.",
        ),
        (
            "Lesson, notes, activations that checkpointing saves",
            "40 to 60 %, 30 to 50 %",
            f"{100 * less:.0f} % of the activations at the peak, {100 * peak_less:.0f} % of the "
            "peak (the exercise)",
            "Too low for blocks; every second block would be half.",
        ),
        (
            "Lecture, lesson, Forgather, N layers in segments of sqrt(N)",
            "O(sqrt(N))",
            f"from 16 to 64 layers {growth('sqrt')}, without checkpointing {growth('none')}",
            "True. Yet checkpointing each block needs less: "
            f"{found.gb('64 layers, block')} GB against {found.gb('64 layers, sqrt')} GB of 64 "
            "layers, because a block keeps some twenty times its input, which K = sqrt(N) leaves "
            "out of the count.",
        ),
    ]


def as_markdown(stored: Mapping[str, Mapping[str, Any]]) -> str:
    lines = []
    for heading, rows in tables(stored).items():
        lines += [f"## {heading}", "", "| claim | claimed | predicted | |", "|---|---|---|---|"]
        lines += [f"| {' | '.join(row)} |" for row in rows]
        lines.append("")
    lines += ["## Commands", ""]
    lines += [
        f"Each begins with `{command_of('...').removesuffix(' ... --json')}` and ends with "
        "`--json`.",
        "",
    ]
    lines += ["| case | arguments | peak, GB | ranks |", "|---|---|---|---|"]
    for name, arguments in cases().items():
        ranks = stored[name]["distinct_ranks"] if stored[name]["devices"] > 1 else ""
        peak = gb(stored[name]["peak_memory_bytes"])
        lines.append(f"| {name} | `{arguments}` | {peak} | {ranks} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", action="store_true", help="print the tables only")
    if parser.parse_args().table:
        print(as_markdown(read_results()["cases"]), end="")
    else:
        run()


if __name__ == "__main__":
    main()
