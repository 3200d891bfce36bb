"""What autotune itself reads in an export: its file by the importer of the trainer.

What a command, its environment and the launcher make of the process is read beside the file.
"""

import re
import tempfile
from pathlib import Path

from autotune.exporters.accelerate_config import FILE as ACCELERATE
from autotune.exporters.into.dialects import DIALECTS
from autotune.exporters.launch import PROCESS_SETTINGS
from autotune.importers.registry import TRAINERS, import_files
from autotune.importers.several_devices import COPY
from autotune.spec.config import CHOICES, TrainingConfig
from tests.exporters.readers.adapters import NOTHING_BESIDE
from tests.exporters.readers.launcher import allocator_of, process_settings

OPTIONS = {
    "lightning": {"model": "gpt", "sequence_length": 128, "global_batch": 1024},
    "transformers": {"model": "gpt", "sequence_length": 128},
}
"""{trainer: what its files leave to code of the user}. Of a named model nothing is looked up."""
_ALONE = "one device has nothing to share out"
_NOT_TAKEN = {
    # Their reasons are what trials do, and what the exporter writes.
    "axolotl": {"fp8_config", "bnb_config_kwargs"},
    "lightning": {"trainer.callbacks"},  # the exporter's own is read all the same
    "trl": {"assistant_only_loss", "completion_only_loss"},
    "torchtitan": {"training.dataset"},  # its default, which the user replaces
}
"""{trainer: keys that the importer names as not taken over, though they are as in a trial}."""
_NOT_EXPRESSED = {
    "axolotl": {"optimizer"},
    "torchtitan": {"activation_checkpoint.selective_ac_option"},
}
"""{trainer: keys by which an exporter writes what is nearest, and says so}."""
_DEFAULTS = TrainingConfig()


def read(trainer, export):
    """Returns {setting: value} of the files; those that no importer reads are not in it."""
    files = [name for name in (DIALECTS[trainer].file, ACCELERATE) if name in export.files]
    options = {**OPTIONS.get(trainer, {"model": "gpt"}), **_processes(export)}
    with tempfile.TemporaryDirectory() as folder:
        for name, text in export.files.items():
            Path(folder, name).write_text(text)
        found = import_files([Path(folder, name) for name in files], options)
    assert found.trainer == TRAINERS[trainer].table.title
    config, workload = dict(found.config), found.workload
    known = _NOT_TAKEN.get(trainer, set()) | _NOT_EXPRESSED.get(trainer, set())
    for one in found.not_taken:
        if one.why.startswith(_ALONE):
            config["engine"] = "deepspeed"  # the file asks for it, and is told why it is not done
        assert one.key in known or one.why.startswith((_ALONE, COPY)), (one.key, one.why)
    return {
        **config,
        **_of_the_process(trainer, export, config),
        **_beside_adapters(config, workload),
        "learning_rate": next(iter(workload["learning_rates"].values())),
        "gradient_clipping": workload.get("gradient_clipping"),
        "devices_per_trial": workload.get("devices_per_trial", 1),
        **{name: workload.get(name) for name in ("schedule", "seed")},
        **{name: workload.get(name) for name in ("sequence_length", "global_batch")},
    }


def _beside_adapters(config, workload):
    if config["adapter"] == "none":
        return NOTHING_BESIDE
    done = {name: workload.get(name, value) for name, value in NOTHING_BESIDE.items()}
    if config["base_weights"] == "trained":  # in the format of adapters
        done["modules_to_save_dtype"] = "adapter"
    return {**done, "modules_to_save": tuple(done["modules_to_save"])}


def _processes(export):
    """Returns the option for the number of devices, where the command says it."""
    said = re.search(r"nproc.per.node[= ](\d+)", export.command)
    return {"devices_per_trial": int(said[1])} if said else {}


def _of_the_process(trainer, export, config):
    """Returns what the launcher and the environment make of a file's settings."""
    process = process_settings(export)
    done = {
        name: process[name]
        for name in PROCESS_SETTINGS
        if process[name] != getattr(_DEFAULTS, name)
    }
    variables = dict(re.findall(r"\b(PYTORCH_\w+)=(\S+) ", export.command))
    if variables:
        done["allocator"] = allocator_of(variables)
    if process["tf32"] and trainer == "torchtitan":  # which has no key for it
        assert config["precision"] == "fp32"
        done["precision"] = "tf32"
    elif process["tf32"]:
        assert re.search(r"\btf32\b.{,2} true", export.files[DIALECTS[trainer].file])
    return done


def merged(*parts):
    """Returns the settings of all parts, which must agree where two of them have a setting."""
    done = {}
    for part in parts:
        for setting, value in part.items():
            assert done.setdefault(setting, value) == value, setting
    return done


def as_read(trainer, expected):
    """Returns the settings as importers have them, whose values are those of trials."""
    done = {setting: _nearest(setting, value) for setting, value in expected.items()}
    if trainer == "llamafactory" and str(expected["precision"]).endswith("adapters in fp32"):
        # Of trials bf16-mixed over weights in bfloat16 is nearest, here without autocast.
        done["precision"] = "bf16-mixed"
        done["base_weights"] = done["base_weights"].replace("trained", "bf16")
    if done.get("base_weights") in ("bf16", "fp16"):
        of_autocast = {"bf16-mixed": "bf16", "fp16-mixed": "fp16"}
        done["base_weights"] = of_autocast.get(done.get("precision"), "trained")
    return done


def _nearest(setting, instead):
    """Returns the value of a technique with which the words for what is done instead begin.

    As bf16-mixed of "bf16-mixed by FSDP2".
    """
    if not isinstance(instead, str):
        return instead
    if instead.endswith("with a float32 copy"):
        return "bf16-mixed"
    if setting == "gradient_reduction":
        instead = instead.replace("fp16", "bf16")  # the 16 bits that trials have
    values = sorted((str(value) for value in CHOICES.get(setting, ())), key=len)
    return next((value for value in reversed(values) if instead.startswith(value)), instead)
