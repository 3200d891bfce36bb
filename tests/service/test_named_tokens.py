"""Named tokens and the log of actions, on each kind of database."""

from datetime import UTC, datetime

import pytest
from sqlalchemy import select

from autotune.errors import InvalidInput
from autotune.storage.tables import TOKENS
from autotune.storage.tokens import Tokens, digest_of
from tests.building.studies import open_store


@pytest.fixture
def tokens(store_url):
    with open_store(store_url) as store:
        yield Tokens(store.database)


def test_only_the_digest_of_a_token_is_stored(tokens):
    token = tokens.add("ann", role="reader")
    with tokens._database.reading() as connection:
        (row,) = connection.execute(select(TOKENS)).all()
    assert row.digest == digest_of(token)
    assert token not in str(row)


def test_a_valid_token_is_found_by_its_digest_until_it_is_revoked(tokens):
    token = tokens.add("ann", role="reader")
    found = tokens.valid()[digest_of(token)]
    assert (found.name, found.role) == ("ann", "reader")
    tokens.revoke("ann")
    assert tokens.valid() == {}
    (revoked,) = tokens.all()
    assert revoked.revoked_at is not None


def test_two_tokens_differ_and_have_enough_bits(tokens):
    first, second = tokens.add("ann"), tokens.add("bob")
    assert first != second
    assert len(first) >= 43


def test_a_name_in_use_is_rejected(tokens):
    tokens.add("ann")
    with pytest.raises(InvalidInput, match="there is a token 'ann' already") as raised:
        tokens.add("ann")
    assert "tokens remove ann" in raised.value.hint


def test_the_name_of_a_revoked_token_may_be_used_again(tokens):
    old = tokens.add("ann")
    tokens.revoke("ann")
    new = tokens.add("ann", role="reader")
    assert set(tokens.valid()) == {digest_of(new)}
    assert digest_of(old) not in tokens.valid()


def test_a_token_expires_and_its_name_may_be_used_again(tokens):
    expired = tokens.add("ann", valid_seconds=-1.0)
    assert tokens.valid() == {}
    (listed,) = tokens.all()
    assert listed.expires_at < datetime.now(UTC)
    lasting = tokens.add("ann", valid_seconds=3600.0)
    assert set(tokens.valid()) == {digest_of(lasting)}
    assert digest_of(expired) not in tokens.valid()


def test_who_has_a_valid_token_may_have_a_webhook(tokens):
    for name in ("ann", "bob", "expired"):
        seconds = -1.0 if name == "expired" else None
        tokens.add(name, webhook=f"https://hooks.example.org/{name}", valid_seconds=seconds)
    tokens.add("without")
    tokens.revoke("bob")
    assert tokens.webhooks() == {"ann": "https://hooks.example.org/ann"}
    tokens.add("bob")
    assert set(tokens.webhooks()) == {"ann"}
    assert "hooks.example.org" not in repr(tokens.all())


@pytest.mark.parametrize("name", ["", "owner", "a b", "a\0", "ä", "a" * 101, "<b>", "a\n"])
def test_an_odd_name_is_rejected(tokens, name):
    with pytest.raises(InvalidInput) as raised:
        tokens.add(name)
    assert raised.value.hint


def test_revoking_an_unknown_token_says_which_there_are(tokens):
    tokens.add("ann")
    with pytest.raises(InvalidInput, match="there is no valid token 'anne'") as raised:
        tokens.revoke("anne")
    assert "did you mean 'ann'" in raised.value.hint


def test_actions_are_listed_newest_first_by_pages(tokens):
    for number in range(5):
        tokens.record_action(who="ann", action="cancel search", target=str(number))
    first, total = tokens.actions(limit=2)
    rest, _ = tokens.actions(limit=10, offset=2)
    assert total == 5
    assert [action.target for action in (*first, *rest)] == ["4", "3", "2", "1", "0"]
    assert datetime.fromisoformat(first[0].at).tzinfo is not None


def test_texts_of_an_action_that_no_database_takes_are_mended(tokens):
    tokens.record_action(who="ann", action="rename study", target="x" * 500, detail="a\0b" * 900)
    ((action,), _) = tokens.actions(limit=1)
    assert len(action.target) == 200
    assert len(action.detail) == 1000
    assert "\0" not in action.detail
