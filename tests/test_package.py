"""The installed package works without the checkout."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import autotune

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The built wheel, unpacked into an empty folder."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(folder),
        str(ROOT),
    ]
    subprocess.run([sys.executable, "-m", "pip", *build], check=True, capture_output=True)
    (wheel,) = folder.glob("autotune-*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


def run(code: str, *, site: Path, cwd: Path) -> str:
    """Returns the output of `code` in a new process that imports the package of the wheel."""
    prelude = f"import sys; sys.path.insert(0, {str(site)!r})\n"
    ran = subprocess.run(
        [sys.executable, "-P", "-c", prelude + code],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=True,
    )
    return ran.stdout.strip()


@pytest.mark.slow
def test_the_wheel_finds_the_named_search_spaces_from_another_folder(installed, tmp_path):
    code = "from autotune.spec import space_content as s\nprint(s.__file__, *s.named_spaces())"
    file, *names = run(code, site=installed, cwd=tmp_path).split()
    assert Path(file).is_relative_to(installed)
    assert names == [path.stem for path in sorted((ROOT / "search_spaces").glob("*.toml"))]


def test_the_wheel_holds_every_module(installed):
    packaged = {path.relative_to(installed) for path in (installed / "autotune").rglob("*.py")}
    assert packaged == {path.relative_to(ROOT) for path in (ROOT / "autotune").rglob("*.py")}


def test_the_wheel_holds_neither_tests_nor_studies(installed):
    folders = {path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")}
    assert folders == {"autotune"}


def test_the_wheel_holds_the_files_of_the_report(installed, tmp_path):
    folder = ROOT / "autotune" / "reporting"
    kept = {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*.*")
        if path.suffix not in (".py", ".pyc")
    }
    code = (
        "from pathlib import Path\n"
        "import autotune.reporting as reporting\n"
        "folder = Path(reporting.__file__).parent\n"
        "found = (path for path in folder.rglob('*.*') if path.suffix not in ('.py', '.pyc'))\n"
        "print(*(path.relative_to(folder).as_posix() for path in found))"
    )
    assert set(run(code, site=installed, cwd=tmp_path).split()) == kept
    assert {"report/trials.js", "report/templates/page.html", "templates/study_page.html"} <= kept


WITHOUT_EXTRAS = """
import importlib, pkgutil, sys, tomllib
from packaging.requirements import Requirement
extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]
names = {Requirement(one).name.replace("-", "_") for extra in extras.values() for one in extra}
sys.modules |= dict.fromkeys(names)
import autotune.api, autotune.cli, autotune.predictor
for package in (autotune.cli, autotune.predictor):
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
import autotune.execution.process.answers
"""


def test_commands_predictions_and_trials_import_no_package_of_an_extra():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTRAS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_no_function_has_the_name_of_a_module_that_would_take_its_place():
    modules = {path.stem for path in (Path(autotune.__file__).parent).iterdir()}
    assert modules.isdisjoint(autotune.__all__)


def test_no_two_test_files_share_a_name():
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
