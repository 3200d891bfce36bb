"""A server with one study, which tests of reads share."""

import pytest

from tests.building.service import BEARER, serving, write_example


@pytest.fixture(scope="package")
def served_storage(tmp_path_factory):
    url = f"sqlite:///{tmp_path_factory.mktemp('served')}/autotune.db"
    write_example(url)
    return url


@pytest.fixture(scope="package")
def anonymous(served_storage):
    """A client without a token."""
    with serving(served_storage) as client:
        yield client


@pytest.fixture(scope="package")
def get(anonymous):
    """get(path, **query) answers with the token, as a program does."""

    def get_with_token(path, headers=(), **query):
        return anonymous.get(path, params=query, headers={**BEARER, **dict(headers)})

    return get_with_token
