"""Which values of the Host and Origin headers are this server's, and which peer is its proxy.

A page of another site can make a browser send requests here, and by DNS rebinding even under that
site's name; both headers then name that site.
"""

import ipaddress
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from autotune.service.settings import WILDCARDS, ServerSettings

_DEFAULT_PORTS = {"http": 80, "https": 443}


class OwnHosts:
    """The names that this server has, as they stand in the Host header."""

    def __init__(self, settings: ServerSettings) -> None:
        self._scheme = "https" if settings.has_tls else "http"
        names = {settings.host.lower()}
        self._is_wildcard = settings.host in WILDCARDS
        if self._is_wildcard or _is_loopback(settings.host):
            names |= {"localhost", "127.0.0.1", "::1"}
        if self._is_wildcard:
            names.add(socket.gethostname().lower())
        self._port = settings.port
        self._hosts = {host for name in names for host in self._with_port(name)}
        self._allowed = {host.lower() for host in settings.allowed_hosts}
        if settings.internal_address:
            internal = urlsplit(settings.internal_address.lower())
            self._allowed.add(internal.netloc)
            if internal.port == _DEFAULT_PORTS[internal.scheme]:
                self._allowed.add(internal.netloc.removesuffix(f":{internal.port}"))

    def is_own_host(self, host: str, *, address: str | None = None) -> bool:
        """Whether a Host header names this server.

        `address` is the local address of the connection, which a server that listens on all
        addresses is also known by.
        """
        host = host.lower()
        if host in self._hosts or host in self._allowed:
            return True
        return self._is_wildcard and address is not None and host in self._with_port(address)

    def is_own_origin(self, origin: str, *, host: str) -> bool:
        """Whether an Origin header is of a page that this server has served as `host`.

        `host` must be known to be the server's own. A proxy may speak TLS for it.
        """
        scheme, separator, rest = origin.partition("://")
        if not separator or rest.lower() != host.lower():
            return False
        return scheme == self._scheme or (scheme == "https" and host.lower() in self._allowed)

    def _with_port(self, name: str) -> set[str]:
        """Returns the name as in a Host header, which leaves out the default port."""
        if ":" in name:
            name = f"[{name}]"
        hosts = {f"{name}:{self._port}"}
        if self._port == _DEFAULT_PORTS[self._scheme]:
            hosts.add(name)
        return hosts


class Proxies:
    """The proxies that are believed; `networks` are addresses or networks as texts."""

    def __init__(self, networks: Sequence[str]) -> None:
        self._networks = [ipaddress.ip_network(network) for network in networks]

    def have(self, peer: str) -> bool:
        """Whether one of them has the address at the other end of a connection."""
        try:
            address = ipaddress.ip_address(peer)
        except ValueError:
            return False
        return any(address in network for network in self._networks)


def _is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
