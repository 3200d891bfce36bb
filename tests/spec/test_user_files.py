import os
import socket
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import InvalidInput
from autotune.spec.user_files import (
    LARGEST_TEXT_BYTES,
    MOST_KEY_PARTS,
    open_file,
    parse_json,
    parse_toml,
    read_file,
)


def pipe(folder):
    os.mkfifo(folder / "made")


def endpoint(folder):
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folder / "made"))


def link_to_itself(folder):
    (folder / "made").symlink_to("made")


def link_to_a_device(folder):
    (folder / "made").symlink_to("/dev/zero")


def folder_of_that_name(folder):
    (folder / "made").mkdir()


@pytest.mark.parametrize(
    "make",
    [pipe, endpoint, link_to_itself, link_to_a_device, folder_of_that_name],
    ids=["pipe", "socket", "link to itself", "device", "folder"],
)
def test_what_is_not_a_regular_file_is_not_opened(make, tmp_path):
    make(tmp_path)
    with pytest.raises(OSError, match=r"not a regular file|symbolic links"):
        open_file(tmp_path / "made")


@pytest.mark.parametrize(
    "name",
    ["a\0b", "x" * 5000, "file/below", "\ud800"],
    ids=["null byte", "too long", "below a file", "no text"],
)
def test_a_name_that_no_file_can_have_is_one_sentence(name, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InvalidInput, match=r"cannot be read: [A-Zn]"):
        read_file(tmp_path / name)


def test_a_file_larger_than_the_bound_is_not_read(tmp_path):
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", 2**40)
    with pytest.raises(InvalidInput, match=r"more than 1\.00 MiB"):
        read_file(tmp_path / "large")


def test_a_file_as_large_as_the_bound_is_read(tmp_path):
    (tmp_path / "file").write_bytes(b"a" * LARGEST_TEXT_BYTES)
    assert len(read_file(tmp_path / "file")) == LARGEST_TEXT_BYTES


def test_a_file_of_the_kernel_without_a_size_is_read_up_to_the_bound():
    with pytest.raises(InvalidInput, match="too large"):
        read_file(Path("/proc/self/status"), most_bytes=100)


LONG = MOST_KEY_PARTS + 1
PART = '"a\\". b"'


@pytest.mark.parametrize(
    "text",
    [
        f"{'.'.join(['a'] * 200_000)} = 1",
        f"x = 1\n[{' . '.join(['a'] * LONG)}]",
        f"[[{'.'.join([PART] * LONG)}]]",
        f"x = [1,\n{{ b = 2, {'.'.join(['a', repr('b')] * LONG)} = 1 }}]",
    ],
    ids=["line", "table", "quoted", "inline"],
)
def test_a_key_of_many_parts_is_rejected_before_it_is_parsed(text):
    with pytest.raises(InvalidInput, match=f"a key of more than {MOST_KEY_PARTS} parts"):
        parse_toml(text.encode(), source="space.toml")


def test_a_key_of_as_many_parts_as_the_bound_is_parsed():
    key = ".".join(["a"] * MOST_KEY_PARTS)
    value: Any = parse_toml(f"{key} = 1".encode(), source="space.toml")
    for _ in range(MOST_KEY_PARTS):
        value = value["a"]
    assert value == 1


def test_dots_that_join_no_keys_are_no_long_key():
    text = f"x = [{'1.5, ' * 500}]\ny = 'and so on{'.' * 500}'\nz = '{'one word. ' * 500}'"
    assert len(parse_toml(text.encode(), source="space.toml")["x"]) == 500


@pytest.mark.parametrize(
    "text",
    ['"\\' * 2**18, '"' * 2**19, "a." * 20 + "b" * 2**19, "a " * 2**18, "'" * 2**19],
    ids=["escapes", "quotes", "dots", "words", "apostrophes"],
)
def test_looking_for_long_keys_takes_a_time_in_proportion_to_the_text(text):
    # A pattern that goes back would need hours for one of these.
    with pytest.raises(InvalidInput, match="not valid TOML"):
        parse_toml(text.encode(), source="space.toml")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000], ids=["lists", "tables"])
@pytest.mark.parametrize("parse", [parse_json, parse_toml])
def test_deep_nesting_is_one_sentence(parse, text):
    with pytest.raises(InvalidInput, match="not valid"):
        parse(text.encode(), source="file")
