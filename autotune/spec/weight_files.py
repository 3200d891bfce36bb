"""Check the weight files of a model by their headers, without torch and without reading weights.

A safetensors file begins with the length of its header in 8 bytes, little-endian, and the header
itself: JSON with the type, shape and place of each tensor. Its tensors follow each other without
gaps to the end of the file: https://huggingface.co/docs/safetensors. A file of torch.save is a zip
archive, or of torch before 1.6 a row of pickles. A pickle can call any function; only those that
torch calls for tensors are accepted, and nothing is called here.
"""

import math
import os
import pickletools
import zipfile
from collections.abc import Iterable, Iterator
from io import BufferedReader, BytesIO
from pathlib import Path
from typing import Any

from autotune.errors import InvalidInput
from autotune.spec.model_file import weight_files
from autotune.spec.user_files import open_file, parse_json, read_json
from autotune.units import format_size

LARGEST_HEADER_BYTES = 32 * 2**20
"""That of 100,000 tensors has about 15 MB."""
LARGEST_INDEX_BYTES = 32 * 2**20
LARGEST_PICKLE_BYTES = 8 * 2**20
"""Of the description of the tensors, which stand outside of it."""

_INDICES = {
    ".safetensors": "model.safetensors.index.json",
    ".bin": "pytorch_model.bin.index.json",
}
"""Which of several files has which tensor, as transformers writes it."""
_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 8),
}
_OLD_FORMAT = bytes.fromhex("80028a0a6cfc9c46f9206aa850192e")
"""A pickle of the number that files of torch before 1.6 begin with."""
_OLD_PICKLES = 4
"""That number, the version, facts of the machine, and the description of the tensors."""
_TENSOR_MODULES = ("torch", "collections", "_codecs")

_COPY_AGAIN = "download or copy the weights again"
_CONVERT = (
    "save the model as safetensors on a machine that may run the file: "
    "model.save_pretrained(FOLDER), and name that folder"
)


def check_weight_files(folder: Path) -> None:
    """Raise InvalidInput for weights in `folder` that are damaged, incomplete or no weights."""
    files = weight_files(folder)
    for suffix, name in _INDICES.items():
        if (folder / name).exists():
            _check_index(folder / name, folder.glob(f"*{suffix}"))
    for file in files:
        try:
            with open_file(file) as opened:
                if file.suffix == ".safetensors":
                    _check_safetensors(opened, source=str(file))
                else:
                    _check_torch_file(opened, source=str(file))
        except OSError as error:
            raise InvalidInput(
                f"{file} cannot be read: {error.strerror or error}", hint=_COPY_AGAIN
            ) from None


def _check_index(index: Path, files: Iterable[Path]) -> None:
    content = read_json(index, most_bytes=LARGEST_INDEX_BYTES)
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict) or not names:
        raise InvalidInput(f"{index} has no weight_map", hint=_COPY_AGAIN)
    present = {file.name for file in files}
    for name in names.values():
        if not isinstance(name, str) or name not in present:
            raise InvalidInput(
                f"{index} names the file {name!r:.80}, which is not in its folder", hint=_COPY_AGAIN
            )


# -- safetensors -----------------------------------------------------------------------------------


def _check_safetensors(opened: BufferedReader, *, source: str) -> None:
    size = os.fstat(opened.fileno()).st_size
    length = int.from_bytes(opened.read(8), "little")
    if size < 8 or length > size - 8:
        raise _damaged(source, f"it has {size} bytes, and its header would have {length}")
    if length > LARGEST_HEADER_BYTES:
        raise _damaged(source, f"its header would have {format_size(length)}")
    check_safetensors_header(opened.read(length), data_bytes=size - 8 - length, source=source)


def check_safetensors_header(header: bytes, *, data_bytes: int, source: str) -> None:
    """Raise InvalidInput unless the tensors of the header fill `data_bytes` exactly."""
    content = parse_json(header, source=f"the header of {source}", hint=_COPY_AGAIN)
    if not isinstance(content, dict):
        raise _damaged(source, "its header is not a table")
    places = [
        _place_of(name, tensor, source=source)
        for name, tensor in content.items()
        if name != "__metadata__"
    ]
    end_of_last = 0
    for begin, end in sorted(places):
        if begin != end_of_last:
            raise _damaged(source, f"no tensor begins at byte {end_of_last}")
        end_of_last = end
    if end_of_last != data_bytes:
        raise _damaged(
            source, f"its tensors have {end_of_last} bytes, and {data_bytes} follow the header"
        )


def _place_of(name: str, tensor: Any, *, source: str) -> tuple[int, int]:
    """Returns the first byte of a tensor, and the one after its last. Raises InvalidInput."""
    match tensor:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(end)]}:
            sizes_are_right = all(type(size) is int and 0 <= size < 2**63 for size in shape)
            if sizes_are_right and len(shape) <= 64 and 0 <= begin <= end < 2**63:
                bits = _BITS.get(dtype)  # a newer type may be right, too
                if bits is None or math.prod(shape) * bits == (end - begin) * 8:
                    return begin, end
    raise _damaged(source, f"its header describes tensor {name!r:.80} wrongly")


def _damaged(source: str, reason: str) -> InvalidInput:
    return InvalidInput(f"{source} is not a whole safetensors file: {reason}", hint=_COPY_AGAIN)


# -- files of torch.save ---------------------------------------------------------------------------


def _check_torch_file(opened: BufferedReader, *, source: str) -> None:
    try:
        functions = list(_functions_in(opened))
    except Exception as error:  # damaged archives and pickles raise errors of many types
        raise InvalidInput(
            f"{source} is not a file of torch.save: {error or type(error).__name__}", hint=_CONVERT
        ) from None
    for function in functions:
        if function.partition(".")[0] not in _TENSOR_MODULES:
            raise InvalidInput(
                f"{source} is a pickle that calls {function!r:.80}, which is not run", hint=_CONVERT
            )


def _functions_in(opened: BufferedReader) -> Iterator[str]:
    """Yield the functions and classes that the pickles of the file name, as `module.name`."""
    beginning = opened.read(len(_OLD_FORMAT))
    opened.seek(0)
    if beginning == _OLD_FORMAT:
        pickles = BytesIO(opened.read(LARGEST_PICKLE_BYTES))
        for _ in range(_OLD_PICKLES):
            yield from _functions_of_pickle(pickles)
        return
    with zipfile.ZipFile(opened) as archive:
        names = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        if len(names) != 1:
            raise ValueError("it has no description of tensors")
        with archive.open(names[0]) as described:
            text = described.read(LARGEST_PICKLE_BYTES + 1)
    if len(text) > LARGEST_PICKLE_BYTES:
        raise ValueError(f"its description has more than {format_size(LARGEST_PICKLE_BYTES)}")
    yield from _functions_of_pickle(BytesIO(text))


def _functions_of_pickle(pickle: BytesIO) -> Iterator[str]:
    for operation, argument, _ in pickletools.genops(pickle):
        if operation.name in ("GLOBAL", "INST"):
            yield str(argument).replace(" ", ".")
        elif operation.name in ("STACK_GLOBAL", "EXT1", "EXT2", "EXT4"):
            yield "a function by its place"  # torch writes none of these
