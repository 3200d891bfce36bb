"""What a server is started with."""

import dataclasses
import ipaddress
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from autotune.analysis.queue_order import DEFAULT_GROUP, DeviceHours
from autotune.errors import InvalidInput
from autotune.execution.cluster.address import check_address
from autotune.spec.setting import (
    EVERYDAY,
    LIMITS,
    RESULTS,
    THE_DATA,
    THE_DEVICE,
    WHO_GETS_IN,
    Duration,
    FilePath,
    Format,
    Settings,
    Size,
    same_setting,
    setting,
    texts,
    whole_number,
)
from autotune.study.request import DeviceList, SearchRequest
from autotune.study.running.devices import parse_devices
from autotune.units import format_duration

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8321
WILDCARDS = ("", "0.0.0.0", "::")
"""Hosts that are every address of the machine."""
LARGEST_BODY_BYTES = 2**20
"""Of a request, unless settings say otherwise."""
LONGEST_WAIT_SECONDS = 30.0
"""For a client, unless settings say otherwise."""


def is_group_name(name: str) -> bool:
    """Whether a group of devices can have this name."""
    is_plain = re.fullmatch(r"[A-Za-z0-9_-]{1,100}", name) is not None
    return is_plain and any(map(str.isalnum, name))


def _read_groups(given: Any) -> Any:
    """Returns {name: devices} of texts such as `left=cuda:0,cuda:1`. Raises InvalidInput."""
    if not isinstance(given, list | tuple):
        return given
    groups: dict[str, str] = {}
    for text in given:
        name, _, of_group = text.partition("=")
        if not is_group_name(name):
            raise InvalidInput(
                repr(text), hint="write --group left=cuda:0,cuda:1 --group right=cuda:2,cuda:3"
            )
        if name in groups:
            raise InvalidInput(f"{name} is named twice", hint="give each group its own name")
        parse_devices(of_group)
        groups[name] = of_group
    return groups


def _read_folder(given: Any) -> Any:
    """Returns the absolute path of a folder, links followed. Raises InvalidInput."""
    found = None
    if given:  # an empty path would be the current folder
        with suppress(OSError, RuntimeError, ValueError):
            found = Path(given).resolve(strict=True)
    if found is None or not found.is_dir():
        raise InvalidInput(f"there is no folder {str(given)!r}", hint="name a folder that is there")
    if found == Path(found.anchor):
        raise InvalidInput(
            f"{given} would allow every file of this machine", hint="name the folder that is meant"
        )
    return str(found)


def _read_host(name: Any) -> Any:
    if not isinstance(name, str):
        return name
    try:
        parts = urlsplit(f"//{name}")
        is_name = parts.netloc == name and parts.hostname and parts.username is None
        _ = parts.port
    except ValueError:
        is_name = False
    if not is_name or not name.isascii() or not name.isprintable() or " " in name or "*" in name:
        raise InvalidInput(
            repr(name),
            hint="give a name as it stands in the URL: tuning.example.org, or tuning.lan:8443",
        )
    return name


def _read_path(given: Any) -> Any:
    """Returns a path without a slash at its end. Raises InvalidInput."""
    if not isinstance(given, str):
        return given
    path = given.rstrip("/")
    is_path = re.fullmatch(r"(/[A-Za-z0-9_~-][A-Za-z0-9._~-]*)*", path)
    if not is_path:
        raise InvalidInput(repr(given), hint="give the path as it stands in the URL, such as /tune")
    return path


def _read_header(name: Any) -> Any:
    if not isinstance(name, str):
        return name
    if not re.fullmatch(r"[A-Za-z0-9-]+", name) or name.lower() in _READ_OTHERWISE:
        raise InvalidInput(
            repr(name),
            hint="give the header in which the proxy names a person, such as X-Forwarded-User",
        )
    return name


def _read_proxy(given: Any) -> Any:
    if not isinstance(given, str):
        return given
    try:
        network = ipaddress.ip_network(given)
    except ValueError as error:
        raise InvalidInput(
            f"{error}",
            hint="give the address of the proxy, 10.0.0.5, or a network of its own, 10.0.5.0/24",
        ) from None
    if network.prefixlen == 0:
        raise InvalidInput(
            f"{given} is every address: anybody could say who they are",
            hint="give the address of the proxy, such as 10.0.0.5",
        )
    return given


def _read_url(url: Any) -> Any:
    if not isinstance(url, str):
        return url
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and url.isprintable()
        _ = parts.port
    except ValueError:
        is_url = False
    if not is_url:
        raise InvalidInput(repr(url), hint="give a URL that begins with https://")
    return url


_READ_OTHERWISE = (
    *("accept", "authorization", "content-length", "content-type", "cookie", "host"),
    *("last-event-id", "origin", "sec-fetch-site", "transfer-encoding", "user-agent"),
)
"""Headers that mean something else, which browsers send of everybody."""


def _read_hours(given: Any) -> Any:
    if isinstance(given, str):
        DeviceHours.parse(given)
    return given


_HOURS = Format(wanted="hours and their time", metavar="HOURS/TIME", read=_read_hours)
_GROUPS = Format(
    wanted="devices by the name of a group",
    metavar="NAME=DEVICES",
    read=_read_groups,
    is_repeatable=True,
)
_URL = Format(wanted="a URL", read=_read_url)
_FOLDER = Format(wanted="a folder", read=_read_folder)
_HOST = Format(wanted="a name of a host", read=_read_host)
Folders = Annotated[tuple[Annotated[str, _FOLDER], ...], texts("folders")]
HostNames = Annotated[tuple[Annotated[str, _HOST], ...], texts("names of hosts")]
_PROXY = Format(wanted="an address or a network", read=_read_proxy)
Proxies = Annotated[tuple[Annotated[str, _PROXY], ...], texts("addresses")]
_PATH = Format(wanted="a path", read=_read_path)
_HEADER = Format(wanted="a header", read=_read_header)
WebAddress = Annotated[str, _URL]
Count = Annotated[int, whole_number(1, 2**31 - 1)]


@dataclass(frozen=True, kw_only=True)
class MachineRules(Settings):
    """Which database searches of a machine use, and what of that machine."""

    storage: str = same_setting(SearchRequest, "storage")
    devices: DeviceList | None = same_setting(SearchRequest, "devices")
    """What each search may use; None: one device."""
    ray: str | None = same_setting(SearchRequest, "ray")
    data_roots: Folders = setting(
        (),
        "Folder that searches may read datasets, tokenizers and models from. Can be repeated. "
        "[default: none]",
        group=THE_DATA,
        flag="--data-root",
        metavar="FOLDER",
    )
    code_folders: Folders = setting(
        (),
        "Folder that searches may run scripts and models in Python from, as the user of the "
        "server. Can be repeated. [default: none]",
        group=WHO_GETS_IN,
        flag="--allow-code",
        metavar="FOLDER",
    )
    """Without any, no code of a submission is run."""


@dataclass(frozen=True, kw_only=True)
class SubmissionRules(MachineRules):
    """What a server accepts, and what it decides for every search."""

    most_trials: Count | None = setting(
        None,
        "Largest number of trials of a search.",
        group=LIMITS,
        flag="--max-trials",
        metavar="N",
    )
    most_seconds: Duration | None = setting(
        None, "Largest time budget of a search: 2h.", group=LIMITS, flag="--max-time"
    )
    most_devices: Count | None = setting(
        None,
        "Largest number of trials of a search that run at once. [default: that of the devices]",
        group=LIMITS,
        flag="--max-devices",
        metavar="N",
    )
    device_type: str = ""
    """cpu or cuda, of the devices that a search would run on; empty: of this machine."""
    device_kind: str = ""
    """The vendor's name of these devices; empty where it is not known."""


@dataclass(frozen=True, kw_only=True)
class WorkerSettings(MachineRules):
    """What a worker runs searches on, for how long, and what it keeps."""

    time_limit: Duration | None = setting(
        None,
        "End within this time, such as 4h: what runs then goes on elsewhere. [default: never]",
        group=EVERYDAY,
    )
    groups: Annotated[Mapping[str, str], _GROUPS] = setting(
        dict,
        "Name a group of devices that runs a search of its own at the same time, such as "
        "left=cuda:0,cuda:1. Can be repeated, instead of --devices. [default: one group]",
        group=THE_DEVICE,
        flag="--group",
    )
    """{name: devices}; empty: one group, named `default`, of `devices`."""
    internal_address: WebAddress | None = setting(
        None,
        "URL at which other servers of the database reach this one, to read logs and profiles: "
        "http://10.0.0.7:8321. [default: its own]",
        group=WHO_GETS_IN,
        metavar="URL",
    )
    log_format: Literal["text", "json"] | None = setting(
        None,
        "Print a line for each request: as text, or as JSON with route and person. "
        "[default: only what goes wrong, as text]",
        group=RESULTS,
    )
    keep_days: Count | None = setting(
        None,
        "Delete logs and profiles of trials after this many days; results stay. [default: never]",
        group=LIMITS,
        flag="--keep",
        metavar="DAYS",
    )
    quota_bytes: Size | None = setting(
        None,
        "Delete the oldest logs and profiles where all together are larger: 10GiB. "
        "[default: never]",
        group=LIMITS,
        flag="--quota",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.devices is not None:
            parse_devices(self.devices)
        if self.groups and self.devices is not None:
            raise InvalidInput(
                "--devices and --group both say which devices there are",
                hint="leave --devices out",
            )
        if self.ray is not None:
            check_address(self.ray)

    @property
    def device_groups(self) -> Mapping[str, str | None]:
        """The devices of each group by its name."""
        return self.groups or {DEFAULT_GROUP: self.devices}


@dataclass(frozen=True, kw_only=True)
class ServerSettings(WorkerSettings, SubmissionRules):
    """Where a server listens, what it serves and who gets in."""

    worker: bool = setting(
        True,
        "Run no searches on this machine: workers of the database do.",
        group=THE_DEVICE,
    )

    most_queued_of_person: Count | None = setting(
        None,
        "Largest number of searches of one person that wait in the queue. [default: no limit]",
        group=LIMITS,
        flag="--max-queued-per-person",
        metavar="N",
    )
    most_running_of_person: Count | None = setting(
        None,
        "Largest number of searches of one person that run at once, with several groups of "
        "devices. [default: no limit]",
        group=LIMITS,
        flag="--max-running-per-person",
        metavar="N",
    )
    most_device_hours_of_person: Annotated[str, _HOURS] | None = setting(
        None,
        "Largest number of device hours of one person's searches in a sliding window: 40/7d is 40 "
        "hours in any 7 days. Whoever has used them waits; what runs is not stopped. "
        "[default: no limit]",
        group=LIMITS,
        flag="--max-device-hours-per-person",
    )
    host: str = setting(
        DEFAULT_HOST,
        "Address to listen on: 127.0.0.1 for this machine alone, 0.0.0.0 for every network of it.",
        group=EVERYDAY,
        metavar="ADDRESS",
    )
    port: Annotated[int, whole_number(0, 65535)] = setting(
        DEFAULT_PORT, "Port to listen on; 0 for one that is free.", group=EVERYDAY, metavar="N"
    )
    allowed_hosts: HostNames = setting(
        (),
        "Name that a proxy serves it under, such as tuning.example.org. Can be repeated.",
        group=WHO_GETS_IN,
        flag="--allow-host",
        metavar="NAME",
    )
    """Further values of the Host header."""
    root_path: Annotated[str, _PATH] = setting(
        "",
        "Path that a proxy serves it under, such as /tune. [default: none]",
        group=WHO_GETS_IN,
        metavar="PATH",
    )
    """Which every address of a page begins with. A proxy may remove it from what it sends."""
    trusted_user_header: Annotated[str, _HEADER] | None = setting(
        None,
        "Header in which a proxy names the person who has signed in to it, such as "
        "X-Forwarded-User. Needs --trust-proxy.",
        group=WHO_GETS_IN,
        flag="--trust-user-header",
        metavar="NAME",
    )
    trusted_proxies: Proxies = setting(
        (),
        "Address or network of a proxy that is believed who a person is: 10.0.0.5. Can be "
        "repeated. Needs --trust-user-header.",
        group=WHO_GETS_IN,
        flag="--trust-proxy",
        metavar="ADDRESS",
    )
    tls_certificate: FilePath | None = setting(
        None, "Certificate in PEM format, to serve https.", group=WHO_GETS_IN
    )
    tls_key: FilePath | None = setting(None, "Its private key in PEM format.", group=WHO_GETS_IN)
    webhook: WebAddress | None = setting(
        None, "Send a message to this URL when a search ends.", group=RESULTS, metavar="URL"
    )
    is_worker: bool = False
    """Whether only other servers get in, and it never leads: `autotune worker`."""
    token: str | None = field(default=None, repr=False)
    """The token that the user has chosen; it is never printed. None: a random one."""
    largest_body_bytes: int = LARGEST_BODY_BYTES
    longest_wait_seconds: float = LONGEST_WAIT_SECONDS
    """How long a client may take for its headers, for a body, and to take in what it is sent."""
    owner_token: str = field(init=False, repr=False)
    """The token that lets its bearer do everything: `token`, or a random one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # This imports SQLAlchemy, 0.3 s that the help of the command does without.
        from autotune.storage.tokens import new_token  # noqa: PLC0415

        object.__setattr__(self, "owner_token", self.token or new_token())
        if (self.trusted_user_header is None) != (not self.trusted_proxies):
            raise InvalidInput(
                "--trust-user-header and --trust-proxy belong together",
                hint="name the header, and the address of the proxy that sends it",
            )
        if (
            self.ray is not None
            and self.most_device_hours_of_person is not None
            and self.devices in (None, "all")
        ):
            raise InvalidInput(
                "--max-device-hours-per-person counts devices, and how many searches have on "
                "the Ray cluster is not said",
                hint="say it with --devices N",
            )

    @property
    def limits(self) -> Mapping[str, Any]:
        """What searches and people may have, by the names of the settings; the others have none."""
        named = {name: getattr(self, name) for name in _LIMITS}
        return {name: value for name, value in named.items() if value is not None}

    def limits_of_person(self) -> Iterator[str]:
        """Yield what one person may have, a sentence each."""
        if self.most_queued_of_person is not None:
            yield f"At most {self.most_queued_of_person} of your searches wait in the queue."
        if self.most_running_of_person is not None:
            yield f"At most {self.most_running_of_person} of your searches run at once."
        if self.most_device_hours_of_person is not None:
            hours = DeviceHours.parse(self.most_device_hours_of_person)
            window = format_duration(hours.window_seconds)
            yield f"Your searches have at most {hours.hours:g} device hours in any {window}."

    def rules(self, group: str = "") -> SubmissionRules:
        """Returns what is accepted and decided for a search on a group of this machine."""
        devices = self.device_groups.get(group, self.devices)
        decided = {field.name: getattr(self, field.name) for field in fields(SubmissionRules)}
        return SubmissionRules(**decided | {"devices": devices})

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
        host = socket.gethostname() if self.host in WILDCARDS else self.host
        return dataclasses.replace(self, host=host).origin + self.root_path

    @property
    def url(self) -> str:
        """The URL to open in a browser, with the token unless the user has chosen it."""
        if self.token is not None:
            return f"{self.origin}{self.root_path}/"
        return f"{self.origin}{self.root_path}/?token={self.owner_token}"


_LIMITS = (
    *("most_trials", "most_seconds", "most_devices"),
    *("most_running_of_person", "most_device_hours_of_person"),
)
