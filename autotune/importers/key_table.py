"""The keys of a trainer's version: which are taken over, which have no effect, and the others.

    title = "axolotl 0.19"
    source = "axolotl 0.19.0, axolotl/utils/schemas/config.py"

    [taken]                 # with the trainer's default
    micro_batch_size = 1
    [taken_without_default]
    keys = ["base_model"]
    [renamed]               # what earlier versions called it
    eval_batch = "eval_batch_size"
    [no_effect]             # on memory and speed, by what they are about
    "where results go" = ["output_dir", "wandb_project"]
    [not_taken]             # with the reason
    neftune_noise_alpha = "autotune adds no noise to embeddings"
    [entries]               # the keys of each table in a list
    datasets = ["path", "type"]
    [inner.model_init_kwargs]  # of a table that is the value of a key, with the reason; "": read
    dtype = ""              # or without effect
    use_kernels = "trials have the model's own layers"

Together they are every key that the version has. A key of a table within the file is written with
its table: "training.seq_len".
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from typing import Any


@dataclass(frozen=True, kw_only=True)
class KeyTable:
    """The keys of one version of a trainer."""

    title: str
    """Trainer and version."""
    source: str
    """Where the keys and their defaults are stated."""
    defaults: Mapping[str, Any]
    """{key that is taken over: its default, None for none}."""
    no_effect: Mapping[str, str]
    """{key without effect on memory and speed: what it is about}."""
    not_taken: Mapping[str, str]
    """{key that is not taken over: the reason}."""
    renamed: Mapping[str, str]
    """{key of an earlier version: what it is called now}."""
    entries: Mapping[str, frozenset[str]]
    """{key of a list of tables: the keys that these have}."""
    inner: Mapping[str, Mapping[str, str]]
    """{key whose value is a table: {key in it: why it is not taken over, or ""}}."""

    @cached_property
    def sections(self) -> frozenset[str]:
        """Every table whose keys are known: `training` for `training.seq_len`."""
        return frozenset(
            key[:end] for key in self.keys for end in range(len(key)) if key[end] == "."
        )

    @cached_property
    def keys(self) -> frozenset[str]:
        """Every key that the version has, and those of earlier versions."""
        return frozenset((*self.defaults, *self.no_effect, *self.not_taken, *self.renamed))


def load_table(name: str) -> KeyTable:
    """Returns the table of that name; what it `extends` comes first, and it changes that."""
    text = resources.files(__package__).joinpath("keys", f"{name}.toml").read_text("utf-8")
    content = tomllib.loads(text)
    own = KeyTable(
        title=content["title"],
        source=content["source"],
        defaults={
            **dict.fromkeys(content.get("taken_without_default", {}).get("keys", ())),
            **content.get("taken", {}),
        },
        no_effect={
            key: about for about, keys in content.get("no_effect", {}).items() for key in keys
        },
        not_taken=content.get("not_taken", {}),
        renamed=content.get("renamed", {}),
        entries={key: frozenset(names) for key, names in content.get("entries", {}).items()},
        inner=content.get("inner", {}),
    )
    if "extends" not in content:
        return own
    extended = load_table(content["extends"])

    def merged(before: Mapping[str, Any], by: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in before.items() if key not in own.keys} | dict(by)

    return KeyTable(
        title=own.title,
        source=f"{own.source}; {extended.source}",
        defaults=merged(extended.defaults, own.defaults),
        no_effect=merged(extended.no_effect, own.no_effect),
        not_taken=merged(extended.not_taken, own.not_taken),
        renamed=merged(extended.renamed, own.renamed),
        entries={**extended.entries, **own.entries},
        inner={
            key: {**extended.inner.get(key, {}), **own.inner.get(key, {})}
            for key in (*extended.inner, *own.inner)
        },
    )
