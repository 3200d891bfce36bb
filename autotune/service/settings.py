"""What a server is started with."""

import dataclasses
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from autotune.service.submissions import SubmissionRules
from autotune.spec.study import DEFAULT_STORAGE
from autotune.storage.tokens import new_token
from autotune.study.devices import parse_devices

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8321
WILDCARDS = ("", "0.0.0.0", "::")
"""Hosts that are every address of the machine."""
DEFAULT_GROUP = "default"
LARGEST_BODY_BYTES = 2**20
"""Of a request, unless settings say otherwise."""
LONGEST_WAIT_SECONDS = 30.0
"""For a client, unless settings say otherwise."""


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Where a server listens, what it serves and who gets in."""

    storage: str = DEFAULT_STORAGE
    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    devices: str | None = None
    """What each search may use, as of `autotune search --devices`; None: one device."""
    groups: Mapping[str, str] = field(default_factory=dict)
    """{name: devices} of groups that run a search each at the same time; empty: one group, named
    `default`, of `devices`."""
    ray: str | None = None
    data_roots: tuple[Path, ...] = ()
    """Folders that submissions may name data in."""
    code_folders: tuple[Path, ...] = ()
    """Folders that submissions may name Python code in; without any, none is run."""
    token: str | None = field(default=None, repr=False)
    """The token that the user has chosen; it is never printed. None: a random one."""
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    most_trials: int | None = None
    most_seconds: float | None = None
    most_devices: int | None = None
    """How many trials of one search may run at once; None: as many as there are devices."""
    webhook: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    """Further values of the Host header, such as a proxy's `tuning.example.org`."""
    keep_days: int | None = None
    """Logs and profiles are removed after so many days; None: they stay."""
    quota_bytes: int | None = None
    """The oldest logs and profiles are removed where all are together larger; None: no limit."""
    largest_body_bytes: int = LARGEST_BODY_BYTES
    longest_wait_seconds: float = LONGEST_WAIT_SECONDS
    """How long a client may take for its headers, for a body, and to take in what it is sent."""
    owner_token: str = field(init=False, repr=False)
    """The token that lets its bearer do everything: `token`, or a random one."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "owner_token", self.token or new_token())

    @property
    def device_groups(self) -> Mapping[str, str | None]:
        """The devices of each group by its name."""
        return self.groups or {DEFAULT_GROUP: self.devices}

    def rules(self, group: str = "") -> SubmissionRules:
        """Return what is accepted and decided for a search of a group.

        One of any group, which is empty, may ask for what each of them has.
        """
        groups = self.device_groups
        devices = groups.get(group, min(groups.values(), key=_devices_in))
        return SubmissionRules(
            storage=self.storage,
            devices=devices,
            ray=self.ray,
            data_roots=tuple(str(folder.resolve()) for folder in self.data_roots),
            code_folders=tuple(str(folder.resolve()) for folder in self.code_folders),
            most_trials=self.most_trials,
            most_seconds=self.most_seconds,
            most_devices=self.most_devices or _devices_in(devices),
        )

    @property
    def has_tls(self) -> bool:
        return self.tls_certificate is not None

    @property
    def origin(self) -> str:
        """The URL that the server listens at, such as `http://127.0.0.1:8321`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.has_tls else 'http'}://{host}:{self.port}"

    @property
    def address(self) -> str:
        """The URL that others know the server by, without a token."""
        if self.host in WILDCARDS:
            return dataclasses.replace(self, host=socket.gethostname()).origin
        return self.origin

    @property
    def url(self) -> str:
        """The URL to open in a browser, with the token unless the user has chosen it."""
        if self.token is not None:
            return f"{self.origin}/"
        return f"{self.origin}/?token={self.owner_token}"


def _devices_in(devices: str | None) -> int:
    """Return how many trials may run at once on devices of which no number is given.

    A machine has as many slots for trials on its CPU as it has cores.
    """
    wanted = 1 if devices is None else parse_devices(devices)
    if isinstance(wanted, tuple):
        return len(wanted)
    return max(wanted or 1, os.cpu_count() or 1)
