"""Weight files are refused by their headers; the files that transformers writes are accepted."""

import json
import os
import pickle
import struct
from zipfile import ZipFile

import pytest

from autotune.errors import InvalidInput
from autotune.spec.model_choice import with_model_config
from autotune.spec.weight_files import check_safetensors_header, check_weight_files

F32_OF_2 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def safetensors(header, data=b"\0" * 8, *, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


@pytest.fixture
def check(tmp_path):
    def check(content, name="model.safetensors"):
        (tmp_path / name).write_bytes(content)
        check_weight_files(tmp_path)

    return check


def test_whole_weights_are_accepted(check):
    second = {"dtype": "BF16", "shape": [3, 2], "data_offsets": [8, 20]}
    header = {"__metadata__": {"format": "pt"}, "b": second, "a": F32_OF_2}
    check(safetensors(header, b"\0" * 20))


BROKEN = {
    "empty": b"",
    "a few bytes": b"abc",
    "text": b"all is well " * 100,
    "cut off": safetensors({"a": F32_OF_2})[:-1],
    "longer": safetensors({"a": F32_OF_2}, b"\0" * 9),
    "endless header": safetensors({"a": F32_OF_2}, length=2**63),
    "no json": safetensors(b"{"),
    "deep json": safetensors(b"[" * 100_000),
    "list": safetensors([1]),
    "no place": safetensors({"a": {"dtype": "F32", "shape": [2]}}),
    "backwards": safetensors({"a": {**F32_OF_2, "data_offsets": [8, 0]}}),
    "other size": safetensors({"a": {**F32_OF_2, "shape": [3]}}),
    "no size": safetensors({"a": {**F32_OF_2, "shape": [-1]}}),
    "endless shape": safetensors({"a": {**F32_OF_2, "shape": [2**62] * 65}}),
    "twice the same place": safetensors({"a": F32_OF_2, "b": F32_OF_2}),
    "gap": safetensors({"a": {**F32_OF_2, "data_offsets": [8, 16]}}, b"\0" * 16),
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_broken_weights_are_refused_with_a_way_out(content, check):
    with pytest.raises(InvalidInput, match=r"model\.safetensors") as refused:
        check(content)
    assert refused.value.hint


def test_a_header_is_checked_without_its_file():
    check_safetensors_header(
        b'{"a": {"dtype": "new", "shape": [], "data_offsets": [0, 9]}}', data_bytes=9, source="x"
    )


@pytest.mark.parametrize("index", ["[]", "{}", '{"weight_map": {"a": "../../secret.safetensors"}}'])
def test_an_index_that_names_other_files_is_refused(index, check, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(InvalidInput, match=r"index\.json"):
        check(safetensors({"a": F32_OF_2}))


def zipped(folder, content):
    with ZipFile(folder / "zip", "w") as archive:
        archive.writestr("archive/data.pkl", content)
    return (folder / "zip").read_bytes()


class Foreign:
    def __reduce__(self):
        return print, ("a pickle was run",)


def test_a_pickle_that_calls_other_functions_is_refused_and_not_run(check, tmp_path, capsys):
    content = zipped(tmp_path, pickle.dumps({"a": Foreign()}, protocol=2))
    with pytest.raises(InvalidInput, match=r"calls '__builtin__\.print'") as refused:
        check(content, "pytorch_model.bin")
    assert "safetensors" in refused.value.hint
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "content",
    [b"", b"PK\3\4", b"noise" * 9, pickle.dumps(Foreign()), pickle.dumps({}, protocol=0)],
    ids=["empty", "half a zip", "noise", "pickle", "old pickle"],
)
def test_what_torch_has_not_saved_is_refused(content, check):
    with pytest.raises(InvalidInput, match=r"not a file of torch\.save"):
        check(content, "pytorch_model.bin")


def test_a_pipe_among_the_weights_is_refused(check, tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(InvalidInput, match="it is a pipe"):
        check_weight_files(tmp_path)


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "old format"])
def test_what_torch_saves_is_accepted(is_zip, tmp_path):
    torch = pytest.importorskip("torch")
    weights = torch.nn.Linear(3, 2).half().state_dict()
    torch.save(weights, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=is_zip)
    check_weight_files(tmp_path)


def test_a_pretrained_model_with_broken_weights_is_refused_before_anything_starts(tmp_path):
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "num_hidden_layers": 2, "vocab_size": 256}'
    )
    (tmp_path / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(InvalidInput, match="not a whole safetensors file"):
        with_model_config({"model": str(tmp_path), "pretrained": True})
