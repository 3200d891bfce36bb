"""What an exporter writes is read back as the configuration that it was written from."""

import pytest

from autotune.exporters import TARGETS
from autotune.exporters.trainer_keys import closest_config
from autotune.importers.registry import import_files
from autotune.spec.config import DEPENDENT_FIELDS, TECHNIQUES
from tests.exporters.recipes import (
    ON_SEVERAL_DEVICES,
    configurations,
    recipe,
    recipe_on_devices,
)

FILES = {
    "axolotl": "axolotl.yaml",
    "trl": "sft.yaml",
    "transformers": "training_args.json",
    "torchtitan": "autotune.toml",
    "lightning": "lightning.yaml",
    "llamafactory": "llamafactory.yaml",
}
"""{exporter: the file that its trainer reads}."""
VERSIONS = {"torchtitan": "0.2"}
OF_THE_FILE = {
    "axolotl": ("allocator", "attention", "memory_budget"),
    "trl": ("allocator", "attention", "memory_budget"),
    "transformers": (
        *("allocator", "memory_budget", "attention"),
        # Its JSON alone has no key for these.
        *("adapter", "adapter_rank", "adapter_targets", "base_weights", "loss"),
        "activation_offload",
    ),
    "torchtitan": ("allocator", "attention"),
    "lightning": ("allocator", "loss", "activation_offload", "micro_batch_size"),
    "llamafactory": ("allocator", "attention", "memory_budget"),
}
"""{exporter: techniques that the command, the environment or other files express}."""
PRECISIONS_BESIDE = {
    "transformers": ("bf16-true", "bf16-stochastic", "fp8"),
    "torchtitan": ("tf32",),
}
"""{exporter: precisions that other files of the export set}."""
OPTIONS = {"model": "gpt", "sequence_length": 128}

CASES = {
    **{name: recipe(config, device_type="cuda") for name, config in configurations().items()},
    **{name: recipe_on_devices(name) for name in ON_SEVERAL_DEVICES},
}
SAMPLE = tuple(CASES)[::6]
EXPORTERS = tuple(name for name in FILES if name in TARGETS)


def _check(exporter, name, folder):
    of = CASES[name]
    target = TARGETS[exporter]
    export = target.write(of, VERSIONS.get(exporter, target.versions[0]))
    for file, text in export.files.items():
        (folder / file).write_text(text)
    options = {
        **OPTIONS,
        "global_batch": of.workload.global_batch,
        "devices_per_trial": of.workload.devices_per_trial,
    }
    for entry in export.unsupported:
        if entry.setting == "devices_per_trial":
            options["devices_per_trial"] = entry.instead
    files = [file for file in (FILES[exporter], "accelerate_config.yaml") if file in export.files]
    found = import_files([folder / file for file in files], options)
    # A file may have what its own trainer takes for something that trials do otherwise.
    not_said = {entry.setting for entry in export.unsupported} | set(OF_THE_FILE[exporter])
    if exporter == "transformers":  # what its JSON lacks, its code does
        not_said |= set(closest_config(of)[1])
    if of.config.precision in PRECISIONS_BESIDE.get(exporter, ()):
        not_said.add("precision")
    not_said |= {field for one in not_said for field in DEPENDENT_FIELDS.get(one, ())}
    expected = {field: getattr(of.config, field) for field in TECHNIQUES if field not in not_said}
    assert {field: found.config[field] for field in expected} == expected


@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("name", SAMPLE)
def test_an_export_is_read_back_as_its_configuration(exporter, name, tmp_path):
    _check(exporter, name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("name", CASES)
def test_every_export_is_read_back_as_its_configuration(exporter, name, tmp_path):
    _check(exporter, name, tmp_path)
