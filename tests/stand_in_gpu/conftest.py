"""Marks every test of this folder `stand_in`: `make test-cuda` runs them, `make test` leaves them out."""

import os
from pathlib import Path

import pytest
from machine import BUILD_VARIABLE, Machine

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items):
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker(pytest.mark.stand_in)


@pytest.fixture(scope="session", autouse=True)
def _stand_in():
    """The libraries; without them there is nothing to run on."""
    if not os.environ.get(BUILD_VARIABLE):
        pytest.skip(
            f"needs the stand-in GPU: make test-cuda, or {BUILD_VARIABLE} with the folder that build.py made"
        )


@pytest.fixture
def machine(tmp_path) -> Machine:
    """A machine with one GPU of 80 GiB, of this test alone."""
    return Machine(tmp_path / "machine")


@pytest.fixture(scope="module")
def shared_machine(tmp_path_factory) -> Machine:
    """The same, for what all tests of a module look at."""
    return Machine(tmp_path_factory.mktemp("machine"))
