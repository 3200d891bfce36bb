"""The code of a workload is every file that its model or script imports or reads, however spread.

The contract runs over a table of layouts: whatever computes belongs to the workload, so that its
change prevents reuse and ends a continued study; whatever does not is none of its files.
"""

import re
from dataclasses import dataclass, field

import numpy
import pytest
import torch
from safetensors.torch import save_file

from autotune.errors import StudyMismatch
from autotune.execution.local import LocalExecutor
from autotune.spec.script_files import check_files_unchanged, files_of
from autotune.spec.user_code import sha256_of
from autotune.spec.workload import make_workload
from autotune.study.opening.reuse import are_comparable
from tests.building.studies import definition

NETWORK = """
import os
import torch
from torch import nn
os.chdir(os.path.dirname(__file__))
{imports}
class Network(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens):
        {forward}
        return self.head(self.embedding(tokens))

def make():
    {build}
    return Network(width)
"""
SCRIPT = (
    NETWORK
    + """
import autotune
model = make()
model, optimizer = autotune.apply(model, torch.optim.SGD(model.parameters()))
"""
)
UNRELATED = {
    "README.md": "about",
    "unused.py": "",
    "unused.json": "{}",
    "unused.pt": "",
    "package/unused.py": "",
}
WIDTH = "width = 8\n"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the code of a model is spread over files; `reads` are those that compute."""

    files: dict[str, str] = field(default_factory=dict)
    reads: tuple[str, ...]
    imports: str = ""
    build: str = "pass"
    forward: str = "pass"


LAYOUTS = {
    "a file beside it": Layout(
        imports="from sizes import width", files={"sizes.py": WIDTH}, reads=("sizes.py",)
    ),
    "through another file": Layout(
        imports="from layers import width",
        files={"layers.py": "from sizes import width", "sizes.py": WIDTH},
        reads=("layers.py", "sizes.py"),
    ),
    "a package with relative imports": Layout(
        imports="from package import width",
        files={
            "package/__init__.py": "from .inner.sizes import width",
            "package/inner/__init__.py": "",
            "package/inner/sizes.py": WIDTH,
        },
        reads=("package/__init__.py", "package/inner/__init__.py", "package/inner/sizes.py"),
    ),
    "a namespace package": Layout(
        imports="from package.sizes import width",
        files={"package/sizes.py": WIDTH},
        reads=("package/sizes.py",),
    ),
    "an import by name": Layout(
        build="import importlib; width = importlib.import_module('sizes').width",
        files={"sizes.py": WIDTH},
        reads=("sizes.py",),
    ),
    "an import inside the function": Layout(
        build="from sizes import width", files={"sizes.py": WIDTH}, reads=("sizes.py",)
    ),
    "an executed file": Layout(
        build="width = __import__('runpy').run_path('sizes')['width']",
        files={"sizes": WIDTH},
        reads=("sizes",),
    ),
    "a module of a folder elsewhere": Layout(
        imports="import sys; sys.path.insert(0, '../elsewhere'); from sizes import width",
        files={"../elsewhere/sizes.py": WIDTH},
        reads=("../elsewhere/sizes.py",),
    ),
    "a package installed from a folder": Layout(
        imports="import sys; sys.path.insert(0, '../site-packages'); from own.sizes import width",
        files={
            "../site-packages/own/sizes.py": WIDTH,
            "../site-packages/own-1.0.dist-info/METADATA": "Name: own\nVersion: 1.0\n",
            "../site-packages/own-1.0.dist-info/RECORD": "own/sizes.py,,\n",
            "../site-packages/own-1.0.dist-info/direct_url.json": '{"dir_info": {}}',
        },
        reads=("../site-packages/own/sizes.py",),
    ),
    "json": Layout(
        build="import json; width = json.load(open('sizes.json'))['width']",
        files={"sizes.json": '{"width": 8}'},
        reads=("sizes.json",),
    ),
    "yaml": Layout(
        build="import yaml; width = yaml.safe_load(open('sizes.yaml'))['width']",
        files={"sizes.yaml": "width: 8"},
        reads=("sizes.yaml",),
    ),
    "text": Layout(
        build="import pathlib; width = int(pathlib.Path('sizes.txt').read_text())",
        files={"sizes.txt": "8"},
        reads=("sizes.txt",),
    ),
    "tensors of torch": Layout(build="width = len(torch.load('sizes.pt'))", reads=("sizes.pt",)),
    "arrays of numpy": Layout(
        build="import numpy; width = len(numpy.load('sizes.npy', mmap_mode='r'))",
        reads=("sizes.npy",),
    ),
    "safetensors": Layout(
        build="from safetensors.torch import load_file; "
        "width = len(load_file('sizes.safetensors')['x'])",
        reads=("sizes.safetensors",),
    ),
}
LATE = Layout(
    build="width = 8", forward="import sizes", files={"sizes.py": ""}, reads=("sizes.py",)
)


@pytest.fixture
def project(tmp_path, monkeypatch):
    """The current folder, with files that no layout reads."""
    folder = tmp_path / "project"
    for name, text in UNRELATED.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture(scope="module")
def executor(tmp_path_factory, one_trial_server):
    with LocalExecutor(tmp_path_factory.mktemp("work")) as started:
        yield started


def write(layout, project, *, source):
    (project / "main.py").write_text(
        source.format(imports=layout.imports, build=layout.build, forward=layout.forward)
    )
    for name, text in layout.files.items():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(text)
    if "sizes.pt" in layout.reads:
        torch.save(torch.zeros(8), project / "sizes.pt")
    if "sizes.npy" in layout.reads:
        numpy.save(project / "sizes.npy", numpy.zeros(8))
    if "sizes.safetensors" in layout.reads:
        save_file({"x": torch.zeros(8)}, project / "sizes.safetensors")


def change(file):
    """Change a file so that it can still be read."""
    content = file.read_bytes()
    if file.suffix == ".safetensors":
        file.write_bytes(content[:-1] + b"1")
    else:
        file.write_bytes(content + b"\n")


def examined(project, executor, *, source):
    settings = {"model": f"{project}/main.py:make", "steps": 24, "text_sha256": "f" * 64}
    if source == SCRIPT:
        settings = {"script": f"{project}/main.py", "steps": 24}
    settings["model_sha256"] = sha256_of(project / "main.py")
    workload, _ = executor.examine(make_workload("cpu", settings), {}, device="cpu")
    return workload


FORMS = [
    pytest.param(
        layout,
        source,
        id=f"{form}-{name}",
        marks=() if form == "model" or name in ("an executed file", "text") else pytest.mark.slow,
    )
    for form, source in (("model", NETWORK), ("script", SCRIPT))
    for name, layout in LAYOUTS.items()
]


@pytest.mark.parametrize(("layout", "source"), FORMS)
def test_every_file_that_computes_belongs_to_the_workload_and_no_other(
    layout, source, project, executor
):
    write(layout, project, source=source)
    workload = examined(project, executor, source=source)
    assert set(files_of(workload)) == {*layout.reads}
    for name in UNRELATED:
        (project / name).write_text("changed")
    check_files_unchanged(workload)
    for name in layout.reads:
        before = (project / name).read_bytes()
        change(project / name)
        with pytest.raises(StudyMismatch, match=f"^{re.escape(name)} has changed since"):
            check_files_unchanged(workload)
        (project / name).write_bytes(before)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [LAYOUTS["through another file"], LAYOUTS["json"], LAYOUTS["tensors of torch"], LATE],
    ids=["Python", "json", "tensors", "an import in the forward pass"],
)
def test_results_are_reused_until_a_file_that_computes_changes(layout, project, executor):
    write(layout, project, source=NETWORK)
    earlier = examined(project, executor, source=NETWORK)
    for name in UNRELATED:
        (project / name).write_text("changed")
    again = examined(project, executor, source=NETWORK)
    assert are_comparable(
        definition("earlier", workload=earlier), definition("new", workload=again)
    )
    for name in layout.reads:
        change(project / name)
        changed = examined(project, executor, source=NETWORK)
        assert not are_comparable(
            definition("earlier", workload=earlier), definition("new", workload=changed)
        )
        earlier = changed


def install(project, name, *, version, source):
    """Install a package as pip does, with this release and source of its only module."""
    module = name.replace("-", "_")
    folder = project.parent / "site-packages"
    (folder / module).mkdir(parents=True, exist_ok=True)
    (folder / module / "__init__.py").write_text(source)
    information = folder / f"{module}-1.dist-info"
    information.mkdir(exist_ok=True)
    (information / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    (information / "RECORD").write_text(f"{module}/__init__.py,,\n")


def test_of_installed_packages_the_version_counts_of_those_that_compute(project, executor):
    install(project, "words-of-mine", version="1.0", source="width = 8")
    install(project, "kernels-of-mine", version="1.0", source="import torch")
    imports = "import sys; sys.path.insert(0, '../site-packages'); import kernels_of_mine"
    layout = Layout(imports=imports, build="from words_of_mine import width", reads=())
    write(layout, project, source=NETWORK)
    workload = examined(project, executor, source=NETWORK)
    assert (workload.packages, files_of(workload)) == ({"kernels-of-mine": "1.0"}, {})
    study = definition("earlier", workload=workload)
    for name, source, is_reused in (
        ("words-of-mine", "width = 8", True),
        ("kernels-of-mine", "import torch", False),
    ):
        install(project, name, version="1.1", source=source)
        again = examined(project, executor, source=NETWORK)
        assert are_comparable(study, definition("new", workload=again)) == is_reused
