"""Which files of a user's script are found to belong to its study, by running it."""

import hashlib
import json
import py_compile
import subprocess
import sys
import textwrap

import pytest

from autotune.spec.script_files import MOST_IN_A_FOLDER, digest_of

WATCH = """
import json, runpy, sys
from autotune.spec.workload import make_workload
from autotune.spec.file_watch import watch_files

sys.path.insert(0, sys.argv[2])
watch = watch_files(make_workload("cpu", {"script": sys.argv[1]}))
runpy.run_path(sys.argv[1], init_globals={"apply": watch.found_until_apply})
print(json.dumps([watch.found_until_apply(), watch.found_after_apply()]))
"""


@pytest.fixture
def found_by(tmp_path):
    """found_by(source) runs a script in a folder; returns its files until apply and later ones."""
    folder = tmp_path / "project"
    folder.mkdir()

    def run(source, **files):
        for name, text in files.items():
            (folder / f"{name}.py").write_text(text)
        script = folder / "train.py"
        script.write_text(textwrap.dedent(source))
        ran = subprocess.run(
            [sys.executable, "-c", WATCH, str(script), str(folder)],
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
        )
        return json.loads(ran.stdout.splitlines()[-1])

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    "source",
    [
        "exec(open('inner.py').read())",
        "import pathlib; exec(compile(pathlib.Path('inner.py').read_text(), 'config', 'exec'))",
        "import inner, sys; del sys.modules['inner']",
    ],
)
def test_a_file_that_is_imported_or_executed_is_found_with_its_hash(source, found_by):
    inner = "width = 128\n"
    assert found_by(source, inner=inner)[0] == {
        "inner.py": hashlib.sha256(inner.encode()).hexdigest()
    }


def test_an_imported_file_is_found_where_its_bytecode_is_cached(found_by, tmp_path):
    first = found_by("import inner", inner="width = 128")
    assert py_compile.compile(str(tmp_path / "project" / "inner.py"))
    assert found_by("import inner") == first


def test_configuration_data_and_executed_files_of_any_name_are_found(found_by, tmp_path):
    for name in ("settings.json", "settings.yaml", "notes.txt", "recipe"):
        (tmp_path / "project" / name).write_text("{}")
    files, _ = found_by("""
        import runpy
        for name in ("settings.json", "settings.yaml", "notes.txt"):
            open(name).read()
        runpy.run_path("recipe")
    """)
    assert set(files) == {"settings.json", "settings.yaml", "notes.txt", "recipe"}


def test_libraries_hidden_folders_and_temporary_files_are_not_found(found_by, tmp_path):
    for place in ("site-packages", ".cache"):
        folder = tmp_path / "project" / place
        folder.mkdir()
        (folder / "of_others.py").write_text("")
    (tmp_path / "elsewhere.py").write_text("")
    files, _ = found_by("""
        import json.tool, wsgiref.util, autotune.units
        for file in ("site-packages/of_others.py", ".cache/of_others.py", "../elsewhere.py"):
            exec(open(file).read())
    """)
    assert files == {}


def test_what_the_script_writes_may_change(found_by):
    """A file that is made once and read from then on is one of the study's from the first run."""
    files, _ = found_by("""
        import os
        open("made.json", "w").write("1")
        open("made.json").read()
        open("new.json.part", "w").write("2")
        os.replace("new.json.part", "renamed.json")
        open("renamed.json").read()
        open("runs.json", "a").close()
    """)
    assert files == {"made.json": "", "renamed.json": ""}


def test_a_file_that_is_read_and_written_after_apply_is_reported_as_written(found_by, tmp_path):
    (tmp_path / "project" / "runs.json").write_text("0")
    until_apply, later = found_by(
        """
        open("runs.json").read()
        apply()
        import late
        open("runs.json", "w").write("1")
    """,
        late="",
    )
    assert set(until_apply) == {"runs.json"}
    assert later == {"late.py": hashlib.sha256(b"").hexdigest(), "runs.json": ""}


def test_a_folder_of_many_files_counts_by_their_names_and_sizes(found_by, tmp_path):
    files, _ = found_by(f"""
        import os
        os.mkdir("texts")
        os.system("for i in $(seq {MOST_IN_A_FOLDER + 1}); do echo 1 > texts/$i.json; done")
        for name in os.listdir("texts"):
            open("texts/" + name).read()
    """)
    assert set(files) == {"texts/"}
    folder = tmp_path / "project" / "texts"
    (folder / "README.md").write_text("about")
    assert digest_of(folder) == files["texts/"]
    (folder / "1.json").write_text("longer")
    assert digest_of(folder) != files["texts/"]
