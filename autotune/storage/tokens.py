"""Stores the named tokens of a server and the log of what was done with them.

Of a token only its SHA-256 is stored. A token has 256 random bits, so that neither salt nor a slow
hash is needed: nobody finds it from its digest.
"""

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal, get_args

import sqlalchemy
from sqlalchemy import insert, or_, select, update

from autotune.errors import InvalidInput, suggestion
from autotune.spec.schema import Schema
from autotune.storage.database import Database
from autotune.storage.error_translation import Conflict
from autotune.storage.rows import DamagedRow
from autotune.storage.stored_columns import Unreadable
from autotune.storage.tables import ACTIONS, TOKENS, DatabaseNow

OWNER = "owner"
"""The name of whoever has the token that the server was started with."""

TokenRole = Literal["reader", "member", "admin"]
"""What a person may do: read; submit and change what is theirs; change everything."""
TOKEN_ROLES: tuple[TokenRole, ...] = get_args(TokenRole)

_LONGEST_NAME = 100
_LONGEST_TARGET = 200
_LONGEST_DETAIL = 1000
_RANDOM_BYTES = 32


@dataclass(frozen=True, kw_only=True)
class NamedToken:
    """A token without its secret."""

    name: str
    role: TokenRole
    created_at: datetime
    """In UTC."""
    revoked_at: datetime | None = None
    """In UTC; None: nobody has removed it."""
    expires_at: datetime | None = None
    """In UTC; None: it does not expire."""
    webhook: str | None = field(default=None, repr=False)
    """The URL that is told when a search of that name ends."""


@dataclass(frozen=True, kw_only=True)
class Action(Schema):
    """One line of the log: who did what."""

    number: int
    at: str
    """ISO 8601 in UTC."""
    who: str
    """The name of a token."""
    action: str
    """Such as `cancel search`."""
    target: str
    detail: str


def new_token() -> str:
    """Returns a random token that is safe in URLs and cookies."""
    return secrets.token_urlsafe(_RANDOM_BYTES)


def digest_of(token: str) -> str:
    """Returns what is stored of a token: its SHA-256 in hexadecimal digits."""
    return hashlib.sha256(token.encode("utf-8", errors="surrogatepass")).hexdigest()


class Tokens:
    """The named tokens and the log of actions in one database.

    All methods raise StorageUnavailable for a database that cannot be used, and StorageUnreachable
    for one that cannot be used at the moment.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    # -- tokens ------------------------------------------------------------------------------------

    def add(
        self,
        name: str,
        *,
        role: TokenRole = "member",
        valid_seconds: float | None = None,
        webhook: str | None = None,
    ) -> str:
        """Adds a token of that name and returns it; it cannot be shown again.

        With `valid_seconds` it expires so long from now. The name of a revoked token or of one
        that has expired may be used again. Raises InvalidInput for one in use.
        """
        check_token_name(name)
        token = new_token()
        expires_at = None if valid_seconds is None else DatabaseNow() + valid_seconds
        values = {
            "digest": digest_of(token),
            "role": role,
            "expires_at": expires_at,
            "webhook": webhook,
        }
        same_name = TOKENS.c.name == name
        try:
            with self._database.writing() as connection:
                renewed = connection.execute(
                    update(TOKENS)
                    .where(same_name, sqlalchemy.not_(_IS_VALID))
                    .values(**values, created_at=sqlalchemy.func.now(), revoked_at=None)
                )
                if not renewed.rowcount:
                    connection.execute(insert(TOKENS).values(name=name, **values))
        except Conflict:
            raise InvalidInput(
                f"there is a token {name!r} already",
                hint=f"choose another name, or first: autotune serve tokens remove {name}",
            ) from None
        return token

    def revoke(self, name: str) -> None:
        """Makes a token invalid. Raises InvalidInput where no valid one has that name."""
        with self._database.writing() as connection:
            revoked = connection.execute(
                update(TOKENS)
                .where(TOKENS.c.name == name, TOKENS.c.revoked_at.is_(None))
                .values(revoked_at=sqlalchemy.func.now())
            )
        if not revoked.rowcount:
            names = [token.name for token in self.valid().values()]
            there_is = f"there is {', '.join(names)}" if names else "there is none"
            raise InvalidInput(
                f"there is no valid token {name!r}",
                hint=suggestion(name, names, otherwise=there_is),
            )

    def all(self) -> list[NamedToken]:
        """Returns every token, also revoked ones, by name."""
        with self._database.reading() as connection:
            rows = connection.execute(select(TOKENS).order_by(TOKENS.c.name)).all()
        return [_named_token(row) for row in rows]

    def valid(self) -> Mapping[str, NamedToken]:
        """Returns the valid tokens by their digest."""
        with self._database.reading() as connection:
            rows = connection.execute(select(TOKENS).where(_IS_VALID)).all()
        return {row.digest: _named_token(row) for row in rows}

    def webhooks(self) -> Mapping[str, str]:
        """Returns {name of a valid token: the URL that is told of its searches}."""
        tokens = self.valid().values()
        return {token.name: token.webhook for token in tokens if token.webhook is not None}

    def roles(self) -> Mapping[str, TokenRole]:
        """Returns the role of each token by its name.

        One that is not valid any more makes nobody an admin, and a reader does not become a member.
        """
        with self._database.reading() as connection:
            rows = connection.execute(select(TOKENS, _IS_VALID.label("is_valid"))).all()
        roles = {row.name: _named_token(row).role for row in rows}
        demoted = {row.name for row in rows if not row.is_valid and row.role == "admin"}
        return {name: "member" if name in demoted else role for name, role in roles.items()}

    # -- actions -----------------------------------------------------------------------------------

    def record_action(self, *, who: str, action: str, target: str, detail: str = "") -> None:
        """Adds a line to the log of actions; texts that are too long are cut."""
        values = {
            "who": who[:_LONGEST_NAME],
            "action": action,
            "target": target[:_LONGEST_TARGET],
            "detail": detail[:_LONGEST_DETAIL],
        }
        # PostgreSQL does not store the NUL character.
        values = {name: text.replace("\0", "\ufffd") for name, text in values.items()}
        with self._database.writing() as connection:
            connection.execute(insert(ACTIONS).values(values))

    def actions(
        self, *, who: str | None = None, limit: int, offset: int = 0
    ) -> tuple[list[Action], int]:
        """Returns lines of the log, newest first, and how many it has; with `who` only theirs."""
        wanted = sqlalchemy.true() if who is None else ACTIONS.c.who == who
        query = select(ACTIONS).where(wanted).order_by(ACTIONS.c.id.desc())
        count = select(sqlalchemy.func.count()).select_from(ACTIONS).where(wanted)
        with self._database.reading() as connection:
            rows = connection.execute(query.limit(limit).offset(offset)).all()
            total = connection.scalar(count)
        found = [
            Action(
                number=row.id,
                at=_in_utc(row.at).isoformat(),
                who=row.who,
                action=row.action,
                target=row.target,
                detail=row.detail,
            )
            for row in rows
        ]
        return found, total or 0

    def people(self) -> list[str]:
        """Returns everybody of whom the log has a line."""
        query = select(ACTIONS.c.who).distinct().order_by(ACTIONS.c.who)
        with self._database.reading() as connection:
            return list(connection.scalars(query))


_IS_VALID = sqlalchemy.and_(
    TOKENS.c.revoked_at.is_(None),
    or_(TOKENS.c.expires_at.is_(None), TOKENS.c.expires_at > DatabaseNow()),
)


def _named_token(row: Any) -> NamedToken:
    expires_at = row.expires_at
    return NamedToken(
        name=row.name,
        role=row.role if row.role in TOKEN_ROLES else "reader",
        created_at=_in_utc(row.created_at),
        revoked_at=None if row.revoked_at is None else _in_utc(row.revoked_at),
        expires_at=None if expires_at is None else datetime.fromtimestamp(expires_at, tz=UTC),
        webhook=row.webhook,
    )


def check_token_name(name: str) -> None:
    """Raises InvalidInput unless a token may have that name."""
    allowed = all(character.isalnum() or character in "._@+-" for character in name)
    if not name or not allowed or not name.isascii() or len(name) > _LONGEST_NAME:
        raise InvalidInput(
            f"{name!r:.80} cannot be a token's name",
            hint=f"use up to {_LONGEST_NAME} letters, digits, '.', '_', '@', '+' and '-'",
        )
    if name.lower() == OWNER:
        raise InvalidInput(
            f"{name!r} is the name of the token that the server is started with",
            hint="choose another name",
        )


def _in_utc(moment: datetime | Unreadable) -> datetime:
    """Returns a moment with UTC as its zone, which is what a database without zones stores.

    Raises DamagedRow for one that is not a date.
    """
    if isinstance(moment, Unreadable):
        raise DamagedRow(f"a date of a token or an action {moment.why}")
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
