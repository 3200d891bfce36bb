"""Marks every test of this folder `stand_in`: only `make test-cuda` runs them."""

import os

import pytest

from tests.stand_in_gpu.machine import BUILD_VARIABLE, Machine

FOLDER = "tests/stand_in_gpu/"


def pytest_collection_modifyitems(items):
    for item in items:
        if item.nodeid.startswith(FOLDER):
            item.add_marker(pytest.mark.stand_in)


@pytest.fixture(scope="session", autouse=True)
def _stand_in():
    """Skips the tests where the libraries have not been built."""
    if not os.environ.get(BUILD_VARIABLE):
        pytest.skip(
            "needs the stand-in GPU: run make test-cuda, or set "
            f"{BUILD_VARIABLE} to the folder that build.py made"
        )


@pytest.fixture
def machine(tmp_path) -> Machine:
    """A machine with one GPU of 80 GiB, for this test alone."""
    return Machine(tmp_path / "machine")


@pytest.fixture(scope="module")
def shared_machine(tmp_path_factory) -> Machine:
    """The same kind of machine, shared by all tests of a module."""
    return Machine(tmp_path_factory.mktemp("machine"))
