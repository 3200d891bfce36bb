"""Folders outside a study's folder: no other user can prepare, open or replace them."""

import os
import stat

import pytest

from autotune.errors import StorageUnavailable
from autotune.execution.private_folder import cache_bases, private_folder

NOBODY = 65534


@pytest.fixture
def base(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def make(base, tmp_path, monkeypatch):
    """make() is the folder, whose temporary folders are in here."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    return lambda **options: private_folder(
        "things", purpose="the cache of things", bases=[base], **options
    )


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


def assert_temporary(found, *, because):
    assert (found.is_temporary, found.path.parent.name, mode_of(found.path)) == (True, "tmp", 0o700)
    assert found.note.startswith(
        f"the cache of things is in the temporary folder {found.path} this time: "
    )
    assert because in found.note


def test_the_folder_is_open_to_its_user_alone(make, base):
    found = make()
    assert (found.path, found.note) == (base / "autotune" / "things", "")
    assert [mode_of(one) for one in (base, base / "autotune", found.path)] == [0o700] * 3


def test_the_same_name_is_the_same_folder(make):
    assert make() == make()


@pytest.mark.parametrize("planted", ["autotune", "autotune/things"])
def test_a_folder_that_is_open_to_others_is_not_used(make, base, planted):
    make()
    (base / planted).chmod(0o777)
    assert_temporary(make(), because=f"{base / planted} is open to others (mode 777)")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to another user")
@pytest.mark.parametrize("planted", ["autotune", "autotune/things"])
def test_a_folder_of_another_user_is_not_used(make, base, planted):
    make()
    os.chown(base / planted, NOBODY, NOBODY)
    assert_temporary(make(), because=f"{base / planted} belongs to user {NOBODY}")


@pytest.mark.parametrize("planted", ["autotune", "autotune/things"])
def test_a_link_is_not_followed(make, base, tmp_path, planted):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (base / planted).parent.mkdir(mode=0o700, parents=True)
    (base / planted).parent.chmod(0o700)
    (base / planted).symlink_to(tmp_path / "elsewhere")
    assert_temporary(make(), because=f"{base / planted} is a link")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_file_instead_of_the_folder_is_not_used(make, base):
    base.mkdir()
    (base / "autotune").write_text("mine")
    assert_temporary(make(), because="Not a directory")


def test_a_folder_that_others_can_replace_is_not_used(make, base):
    base.mkdir()
    base.chmod(0o777)
    assert_temporary(make(), because=f"others can write to {base} (mode 777)")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_below_that_of_another_user_is_not_used(make, base):
    base.mkdir()
    os.chown(base, NOBODY, NOBODY)
    assert_temporary(make(), because=f"{base} belongs to user {NOBODY}")


def test_a_folder_is_found_below_one_where_only_the_owner_can_replace_it(make, base):
    """As /tmp is: sticky."""
    base.mkdir()
    base.chmod(0o1777)
    assert make().note == ""


def test_a_folder_that_is_of_no_use_is_not_created(make, base):
    found = make(is_usable=lambda path: base not in path.parents)
    assert_temporary(found, because=f"{base / 'autotune' / 'things'} cannot be used for it")
    assert not base.exists()


def test_without_any_folder_one_sentence_says_which_were_tried(make, base):
    with pytest.raises(
        StorageUnavailable, match="there is no folder for the cache of things: "
    ) as refused:
        make(is_usable=lambda path: False)
    assert "TMPDIR" in refused.value.hint


def test_caches_are_where_the_user_says(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_bases() == [tmp_path]


@pytest.mark.parametrize("said", ["", "relative"])
def test_caches_are_in_the_home_where_the_user_does_not_name_a_whole_path(
    monkeypatch, tmp_path, said
):
    monkeypatch.setenv("XDG_CACHE_HOME", said)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_bases() == [tmp_path / ".cache"]
