"""A studies database on PostgreSQL: how it is opened, that it survives a crash, and its errors."""

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.engine import make_url

from autotune.errors import StorageUnavailable
from tests.building.studies import config, definition, keep, measured, open_store


@pytest.fixture
def store(postgres_url):
    """A store with one study and no trial."""
    with open_store(postgres_url) as opened:
        opened.create_study(definition(), trials_wanted=30)
        yield opened


@pytest.fixture
def attempt(store):
    return keep(store, config(0))


def error_of(url):
    """What beginning a study in `url` raises."""
    with pytest.raises(StorageUnavailable) as raised, open_store(url):
        pass
    return raised.value


def as_user(url, user, password=None):
    return make_url(url).set(username=user, password=password).render_as_string(hide_password=False)


# -- opened ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("lock_timeout", "1min"),
        ("idle_in_transaction_session_timeout", "1min"),
        ("synchronous_commit", "on"),
    ],
)
def test_a_session_is_set_to_be_durable_and_patient(postgres_url, setting, value):
    careless = f"{postgres_url}?options=-c%20synchronous_commit=off"
    with (
        open_store(careless) as store,
        store._database.engine.connect(),
        store._database.engine.connect() as connection,
    ):
        connection.exec_driver_sql("SELECT 1")
        connection.rollback()
        assert connection.exec_driver_sql(f"SHOW {setting}").scalar() == value


def test_a_stricter_commit_than_ours_stays(postgres_url):
    strict = f"{postgres_url}?options=-c%20synchronous_commit=remote_apply"
    with open_store(strict) as store, store._database.engine.connect() as connection:
        assert connection.exec_driver_sql("SHOW synchronous_commit").scalar() == "remote_apply"


@pytest.mark.parametrize(("query", "seconds"), [("", "5"), ("?connect_timeout=9", "9")])
def test_connecting_times_out_by_default_or_after_the_time_in_the_url(postgres_url, query, seconds):
    with open_store(postgres_url + query) as store, store._database.engine.connect() as connection:
        assert (
            connection.connection.driver_connection.info.get_parameters()["connect_timeout"]
            == seconds
        )


@pytest.mark.parametrize("scheme", ["postgresql", "postgres"])
def test_a_url_without_a_driver_is_opened_with_psycopg(store, postgres_url, scheme):
    url = postgres_url.replace("postgresql+psycopg", scheme)
    with open_store(url, create=False) as other:
        assert other.names() == ["by-hand"]


def test_dates_do_not_depend_on_the_time_zone_of_the_session(store, attempt, postgres_url):
    store.attempts.finish(attempt.id, measured(), seconds=1.0)
    with open_store(
        f"{postgres_url}?options=-c%20timezone=Asia/Kathmandu", create=False
    ) as elsewhere:
        assert elsewhere.dates("by-hand") == store.dates("by-hand")


# -- a server that goes and comes back -------------------------------------------------------------


def test_a_store_that_was_open_before_its_server_was_restarted_can_be_used_after(store, postgres):
    postgres.restart()
    assert store.names() == ["by-hand"]


def test_a_result_survives_a_crash_of_the_server_right_after_it_was_stored(
    store, attempt, postgres
):
    store.attempts.finish(attempt.id, measured(), seconds=1.0)
    postgres.restart(mode="immediate")
    assert store.trials("by-hand")[0].outcome == "ok"


def test_a_server_that_is_down_is_named_with_the_way_out_and_used_again_when_it_is_back(
    store, attempt, postgres, postgres_url
):
    with postgres.stopped(), pytest.raises(StorageUnavailable) as raised:
        store.attempts.finish(attempt.id, measured(), seconds=1.0)
    assert (
        raised.value.message
        == f"the server of {postgres_url} cannot be reached: Connection refused"
    )
    assert raised.value.hint == "start it, or check its host and port"
    store.attempts.finish(attempt.id, measured(), seconds=1.0)
    assert store.trials("by-hand")[0].outcome == "ok"


# -- what is refused -------------------------------------------------------------------------------


def test_the_error_for_a_missing_database_has_the_command_that_creates_it(postgres):
    error = error_of(url := postgres.url("my studies"))
    assert error.message == f"the database of {url} does not exist"
    assert error.hint.endswith(f"createdb -h 127.0.0.1 -p {postgres.port} -U autotune 'my studies'")


@pytest.mark.parametrize(
    ("user", "password", "reason"),
    [
        ("needs_password", "open-sesame", "password authentication failed"),
        ("needs_password", None, "no password supplied"),
        ("nobody", "open-sesame", 'role "nobody" does not exist'),
    ],
)
def test_the_error_for_a_rejected_user_does_not_contain_the_password(
    postgres_url, user, password, reason
):
    error = error_of(as_user(postgres_url, user, password))
    assert user in error.message
    assert reason in error.message
    assert "open-sesame" not in error.message + error.hint
    assert error.hint.endswith(f"--storage {as_user(postgres_url, 'user', 'password')}")


def test_an_error_does_not_contain_a_password_in_the_query(postgres):
    error = error_of(f"{postgres.url('missing')}?password=open-sesame")
    assert "open-sesame" not in error.message + error.hint


def test_the_error_for_a_user_who_may_not_create_tables_says_so(postgres_url):
    guest = make_url(postgres_url).database
    engine = create_engine(postgres_url)
    with engine.begin() as connection:
        connection.execute(text(f'CREATE ROLE "{guest}" LOGIN'))
        connection.execute(text("REVOKE CREATE ON SCHEMA public FROM PUBLIC"))
    engine.dispose()
    error = error_of(as_user(postgres_url, guest))
    assert "permission denied for schema public" in error.message
    assert "let that user create tables" in error.hint


def test_an_option_that_postgresql_does_not_know_is_named(postgres_url):
    assert (
        'invalid connection option "conect_timeout"'
        in error_of(f"{postgres_url}?conect_timeout=3").message
    )


@pytest.mark.parametrize(
    ("url", "shown", "why"),
    [
        (
            "postgresql://me:open-sesame@host:port/studies",
            "postgresql://me:***@host:port/studies",
            "its port is not a number",
        ),
        (
            "postgresql://me:open-@-sesame@host/studies",
            "postgresql://me:***@host/studies",
            "an @ in a password is written %40",
        ),
        (
            "postgresql//me:open-sesame@host/studies",
            "postgresql//me:***@host/studies",
            "Could not parse",
        ),
    ],
)
def test_the_error_for_an_invalid_url_does_not_contain_its_password(url, shown, why):
    error = error_of(url)
    assert f"{shown!r} is not a database URL: {why}" in error.message
    assert "sesame" not in error.message + error.hint
