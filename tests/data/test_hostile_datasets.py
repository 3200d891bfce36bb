"""No folder that calls itself a dataset makes its reader open a file or a URL outside of it."""

import http.server
import io
import json
import tarfile
import threading
import zipfile

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from autotune.data.dataset_card import checked_configs
from autotune.data.rows import columns_of
from autotune.data.sources import read_documents
from autotune.errors import InvalidDataset
from autotune.spec.workload import make_workload

SECRET = "a line of somebody else's file"
CONFIG = "mine"


def write_card(folder, data_files=None, *, file="README.md", **others):
    """Writes the configuration CONFIG; the folder has a file of its own as well."""
    config = {"config_name": CONFIG, "data_files": data_files, **others}
    text = json.dumps({"configs": [{k: v for k, v in config.items() if v is not None}]})
    (folder / file).write_text(f"---\n{text}\n---\n" if file == "README.md" else text)
    (folder / "own.txt").write_text("a line of its own\n" * 50)
    return CONFIG


def of_split(path):
    return [{"split": "train", "path": path}]


def write_saved(folder, *, name="data-00000-of-00001.arrow"):
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict({"text": ["own"] * 50}).save_to_disk(folder)
    state = json.loads((folder / "state.json").read_text())
    state["_data_files"] = [{"filename": name}]
    (folder / "state.json").write_text(json.dumps(state))


def saved_elsewhere(folder, secret):
    write_saved(folder, name=str(secret / "saved" / "data-00000-of-00001.arrow"))


def saved_above(folder, secret):
    write_saved(folder, name="../secret/saved/data-00000-of-00001.arrow")


def split_saved_above(folder, secret):
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": ["../secret/saved"]}))


def zipped(folder, secret):
    with zipfile.ZipFile(folder / "data.jsonl", "w") as archive:
        archive.writestr("inner.jsonl", json.dumps({"text": SECRET}))


def zipped_behind_text(folder, secret):
    zipped(folder, secret)
    archive = (folder / "data.jsonl").read_bytes()
    (folder / "data.jsonl").write_bytes(b'{"text": "own"}\n' + archive)


def tar_with_a_link(folder, secret):
    with tarfile.open(folder / "data.jsonl", "w", format=tarfile.USTAR_FORMAT) as archive:
        link = tarfile.TarInfo("inner.jsonl")
        link.type, link.linkname = tarfile.SYMTYPE, str(secret / "rows.jsonl")
        archive.addfile(link)


def tar_with_gzip(folder, secret):
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        archive.add(secret / "rows.jsonl", "inner.jsonl")
    (folder / "data.csv").write_bytes(content.getvalue())


def linked_folder(folder, secret):
    (folder / "parts").symlink_to(secret)
    return write_card(folder, of_split("parts/*.txt"))


def of_any_size(entry):
    """Returns a function that writes a card with `entry`, in which LISTS is 10**9 words."""

    def write(folder, _secret):
        lists = "a: &a0 [own]\n"
        for depth in range(1, 10):
            lists += f"a{depth}: &a{depth} [{', '.join([f'*a{depth - 1}'] * 10)}]\n"
        config = entry.replace("LISTS", "*a9")
        (folder / "README.md").write_text(f"---\n{lists}configs:\n- {config}\n---\n")
        (folder / "own.txt").write_text("a line of its own\n" * 50)
        return CONFIG

    return write


def images_as_tokens(folder, secret):
    """Reading the column would open the file that it names."""
    features = datasets.Features({"input_ids": datasets.List(datasets.Image())})
    table = pyarrow.table(
        {"input_ids": [[{"bytes": None, "path": str(secret / "rows.jsonl")}]] * 50},
        schema=features.arrow_schema,
    )
    pyarrow.parquet.write_table(table, folder / "data.parquet")


HOSTILE = {
    "an absolute path": lambda f, s: write_card(f, of_split(str(s / "secret.txt"))),
    "an absolute path alone": lambda f, s: write_card(f, str(s / "secret.txt")),
    "a list of paths": lambda f, s: write_card(f, ["own.txt", str(s / "secret.txt")]),
    "a list in a split": lambda f, s: write_card(f, of_split(["own.txt", str(s / "secret.txt")])),
    "a pattern": lambda f, s: write_card(f, of_split(str(s / "*.txt"))),
    "a folder above": lambda f, s: write_card(f, of_split("../secret/secret.txt")),
    "a folder above, later": lambda f, s: write_card(f, of_split("x/../../secret/*.txt")),
    "a home": lambda f, s: write_card(f, of_split("~/secret.txt")),
    "file URL": lambda f, s: write_card(f, of_split(f"file://{s}/secret.txt")),
    "local URL": lambda f, s: write_card(f, of_split(f"local://{s}/secret.txt")),
    "http URL": lambda f, s: write_card(f, of_split("URL/secret.txt")),
    "hub URL": lambda f, s: write_card(f, of_split("hf://datasets/a/b/secret.txt")),
    "a chain": lambda f, s: write_card(f, of_split("zip://inner.txt::URL/a.zip")),
    "a chain without slashes": lambda f, s: write_card(f, of_split("simplecache::own.txt")),
    "another file of the card": lambda f, s: write_card(
        f, of_split(str(s / "secret.txt")), file=".huggingface.yaml"
    ),
    "an absolute folder": lambda f, s: write_card(f, data_dir=str(s)),
    "a folder above as folder": lambda f, s: write_card(f, data_dir="../secret"),
    "an option with files": lambda f, s: write_card(
        f, of_split("own.txt"), storage_options={"path": str(s)}
    ),
    "a linked folder": linked_folder,
    "files of any size": of_any_size(f"{{config_name: {CONFIG}, data_files: [LISTS]}}"),
    "a folder of any size": of_any_size(f"{{config_name: {CONFIG}, data_dir: LISTS}}"),
    "a name of any size": of_any_size("{config_name: LISTS, data_files: own.txt}"),
    "a split of any size": of_any_size(
        f"{{config_name: {CONFIG}, data_files: [{{split: LISTS, path: own.txt}}]}}"
    ),
    "an option of any size": of_any_size(
        f"{{config_name: {CONFIG}, data_files: own.txt, columns: LISTS}}"
    ),
    "a tag that is not kept": of_any_size(f"{{config_name: {CONFIG}, data_dir: !!timestamp a}}"),
    "no text": lambda f, s: write_card(f, of_split([["own.txt"]])),
    "saved elsewhere": saved_elsewhere,
    "saved above": saved_above,
    "a split saved above": split_saved_above,
    "zip": zipped,
    "zip behind text": zipped_behind_text,
    "tar with a link": tar_with_a_link,
    "tar with gzip": tar_with_gzip,
    "images as tokens": images_as_tokens,
}
"""Writes a dataset that names something outside; returns a configuration where it is in a card."""


@pytest.fixture(scope="module")
def requested():
    """The paths of the requests that a server on this machine got; its URL is the first."""
    paths = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            paths.append(self.path)
            self.send_response(200)
            self.send_header("Content-Length", str(len(SECRET)))
            self.end_headers()
            self.wfile.write(SECRET.encode())

        def do_HEAD(self):
            self.do_GET()

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        paths.append(f"http://127.0.0.1:{server.server_port}")
        yield paths
        server.shutdown()


@pytest.fixture
def secret(tmp_path):
    folder = tmp_path / "secret"
    folder.mkdir()
    (folder / "secret.txt").write_text(f"{SECRET}\n" * 50)
    (folder / "rows.jsonl").write_text(json.dumps({"text": SECRET}) + "\n")
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict({"text": [SECRET] * 50}).save_to_disk(folder / "saved")
    return folder


def workload_of(folder, **settings):
    return make_workload("cpu", {"dataset": str(folder), **settings})


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", HOSTILE)
def test_a_dataset_names_only_its_own_files(kind, streaming, tmp_path, secret, requested):
    folder = tmp_path / "set"
    folder.mkdir()
    config = HOSTILE[kind](folder, secret)
    card = folder / "README.md"
    if card.exists():
        card.write_text(card.read_text().replace("URL", requested[0]))
    workload = workload_of(folder, dataset_config=config, streaming=streaming)
    with pytest.raises(InvalidDataset) as raised:
        list(read_documents(workload, cache_folder=tmp_path / "cache").train)
    assert SECRET not in raised.value.message
    assert len(requested) == 1


def test_a_card_may_say_how_its_files_are_read(tmp_path):
    config = write_card(tmp_path, of_split("parts/*.csv"), sep=";")
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "a.csv").write_text("text;other\n" + "own;1\n" * 20)
    workload = workload_of(tmp_path, dataset_config=config, text_column="text")
    assert set(read_documents(workload, cache_folder=tmp_path / "cache").train) == {"own"}


def test_a_configuration_may_be_a_folder_of_its_own(tmp_path):
    config = write_card(tmp_path, data_dir="part [one]")
    (tmp_path / "part [one]").mkdir()
    (tmp_path / "part [one]" / "train.jsonl").write_text('{"text": "own"}\n' * 20)
    workload = workload_of(tmp_path, dataset_config=config)
    assert set(read_documents(workload, cache_folder=tmp_path / "cache").train) == {"own"}


@pytest.mark.parametrize(
    ("path", "is_own"),
    [
        ("data/train-*", True),
        ("hf://datasets/owner/name/data/*.parquet", True),
        ("hf://datasets/owner/name@main/data/*.parquet", True),
        ("hf://datasets/owner/name-of-another/data/*.parquet", False),
        ("hf://datasets/owner/name/../../other/data/*.parquet", False),
        ("https://example.org/a.parquet", False),
        ("/etc/passwd", False),
        ("../../x", False),
    ],
)
def test_a_card_on_the_hub_names_only_files_of_its_dataset(path, is_own):
    card = f"---\nconfigs:\n- {{config_name: a, data_files: '{path}'}}\n---\n".encode()
    address = "hf://datasets/owner/name"
    if is_own:
        assert "a" in checked_configs([card], dataset="owner/name", own_address=address)
    else:
        with pytest.raises(InvalidDataset, match="no file of the dataset"):
            checked_configs([card], dataset="owner/name", own_address=address)


@pytest.mark.parametrize(
    "feature",
    [
        datasets.Image(),
        datasets.List(datasets.Image()),
        {"role": datasets.Value("string"), "content": datasets.Audio()},
        datasets.List({"image": datasets.Image(), "text": datasets.Value("string")}),
    ],
    ids=["image", "images", "table", "list of tables"],
)
def test_a_column_whose_values_are_read_from_files_is_not_one_of_text_or_lists(feature):
    rows = datasets.Dataset.from_dict({"a": []}, features=datasets.Features({"a": feature}))
    assert columns_of(rows, dataset="a").others == ("a",)
