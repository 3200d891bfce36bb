"""A database that cannot be reached when a search begins."""

import pytest

from autotune.errors import StorageUnavailable, StorageUnreachable
from autotune.storage.retry import RetryPolicy
from autotune.study.opening.open_study import stored_study
from autotune.study.request import SearchRequest

NOBODY = "postgresql+psycopg://autotune@127.0.0.1:1/autotune"


@pytest.mark.parametrize("was_reached", [True, False])
def test_a_database_is_waited_for_only_where_the_process_has_reached_it_before(was_reached):
    """As by the process of a search of the service, which has begun its run there."""
    request = SearchRequest(storage=NOBODY, name="away", max_mem="1GiB")
    retry = RetryPolicy(limit_seconds=0.0)
    with pytest.raises(StorageUnavailable) as raised:
        stored_study(request, retry, was_reached=was_reached)
    assert isinstance(raised.value, StorageUnreachable) == was_reached
