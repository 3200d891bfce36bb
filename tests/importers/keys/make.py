"""Writes the keys of trainers that no test can import: `python make.py TARGET FOLDER`.

FOLDER has the files of the package, which is not installed:

    pip download --no-deps torchtitan==0.2.2 && unzip torchtitan-*.whl -d folder
    pip download --no-deps axolotl==0.19.0 && unzip axolotl-*.whl -d folder
    pip download --no-deps llamafactory==0.9.5 && unzip llamafactory-*.whl -d folder

A table is `{"package": "torchtitan 0.2.2", "keys": {"training.seq_len": 2048, ...}}`: every key
that the classes declare, with its default, and null for one without or one that is no literal.
"""

import ast
import json
import sys
from pathlib import Path

HERE = Path(__file__).parent


def classes_in(folder):
    """Returns {name: (names of the bases, {field: (annotation, default)}, classes within)}."""
    found = {}
    for file in sorted(folder.rglob("*.py")):
        _collect(ast.parse(file.read_text()).body, found)
    return found


def _collect(body, found, within=""):
    for node in body:
        if isinstance(node, ast.ClassDef):
            name = f"{within}{node.name}"
            bases = [ast.unparse(base).partition("[")[0] for base in node.bases]
            fields = {
                one.target.id: (ast.unparse(one.annotation), _default(one.value))
                for one in node.body
                if isinstance(one, ast.AnnAssign) and "init=False" not in ast.unparse(one)
            }
            found[name] = (bases, fields)
            _collect(node.body, found, f"{name}.")


def _default(value):
    if isinstance(value, ast.Call):
        arguments = {one.arg: one.value for one in value.keywords}
        if "default_factory" in arguments and isinstance(arguments["default_factory"], ast.Lambda):
            return _default(arguments["default_factory"].body)
        if ast.unparse(arguments.get("default_factory", ast.Constant(None))) == "list":
            return []
        return _default(arguments.get("default"))
    try:
        return ast.literal_eval(value) if value is not None else None
    except ValueError:
        return None


def fields_of(name, classes):
    """Returns {field: default} of a class and of those that it inherits from."""
    if name not in classes:
        return {}
    bases, own = classes[name]
    inherited = {}
    for base in bases:
        inherited |= fields_of(base, classes)
    return inherited | {field: default for field, (_, default) in own.items()}


def nested(name, classes, prefix=""):
    """Returns {key: default} of a class whose fields are of classes within it, or of others."""
    keys = {}
    for field, (annotation, default) in classes[name][1].items():
        inner = next((one for one in (annotation, f"{name}.{annotation}") if one in classes), None)
        if inner is None:
            keys[f"{prefix}{field}"] = default
        else:
            keys |= nested(inner, classes, f"{prefix}{field}.")
    return keys


def torchtitan(folder):
    return nested("JobConfig", classes_in(folder / "torchtitan/config"))


def axolotl(folder):
    keys = fields_of("AxolotlInputConfig", classes_in(folder / "axolotl/utils/schemas"))
    for file in sorted((folder / "axolotl/integrations").rglob("args.py")):
        plugins = {}
        _collect(ast.parse(file.read_text()).body, plugins)
        for name in plugins:
            if name.endswith("Args"):
                keys |= fields_of(name, plugins)
    return keys


def llamafactory(folder):
    classes = classes_in(folder / "llamafactory/hparams")
    keys = {}
    for name in ("Model", "Data", "Training", "Finetuning", "Generating"):
        keys |= fields_of(f"{name}Arguments", classes)
    return keys


TARGETS = {
    "torchtitan": ("torchtitan 0.2.2", torchtitan),
    "axolotl": ("axolotl 0.19.0", axolotl),
    "llamafactory": ("llamafactory 0.9.5", llamafactory),
}

if __name__ == "__main__":
    target, folder = sys.argv[1:]
    package, read = TARGETS[target]
    table = {"package": package, "keys": dict(sorted(read(Path(folder)).items()))}
    (HERE / f"{target}.json").write_text(json.dumps(table, indent=1) + "\n")
    print(f"{target}: {len(table['keys'])} keys of {package}")
