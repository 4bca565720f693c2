"""The names and addresses that this machine has in private networks."""

from __future__ import annotations

import ipaddress
import re
import socket
from contextlib import suppress
from dataclasses import dataclass

from federation.errors import InputError

EVERY_ADDRESS = ("0.0.0.0", "::")
PRIVATE = [  # networks to which the internet has no way
    ipaddress.ip_network(text)
    for text in (
        "127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16", "100.64.0.0/10",
        "192.0.2.0/24", "198.18.0.0/15", "::1/128", "fc00::/7", "fe80::/10",
    )
]  # fmt: skip
_ELSEWHERE = "192.0.2.1"  # an address that no machine of the internet has
_LABEL = r"(?!-)[a-z0-9-]{1,63}(?<!-)"
_HOST_NAME = re.compile(rf"{_LABEL}(\.{_LABEL})*")


@dataclass(frozen=True)
class Names:
    """How clients in the same network may call this machine."""

    hosts: tuple[str, ...]
    addresses: tuple[str, ...]
    link: str  # the one for links


def names_of_this_machine(host: str, public: str | None = None) -> Names:
    """Collect them for a server that listens on `host`, and that clients call `public` if that is given.

    Neither may be an address of the internet.
    """
    full, lan = socket.getfqdn().lower(), lan_addresses()
    short = socket.gethostname().lower().partition(".")[0]
    hosts = ["localhost", short, f"{short}.local", full]
    addresses = ["127.0.0.1", "::1", *lan]
    link = next((each for each in lan if (":" in each) == (":" in host)), full)
    for given in (host, public):
        if given is None or given in EVERY_ADDRESS:
            continue
        link = given.lower()
        (addresses if _is_address(given) else hosts).append(link)
    for address in addresses:
        if not is_private(address):
            raise InputError(
                f"--tls auto makes certificates for private networks, and {address} is an address of the internet: "
                "get a certificate of a public authority, and give --tls-certificate and --tls-key"
            )
    good = [name for name in hosts if _HOST_NAME.fullmatch(name) and len(name) <= 253 and not name.endswith(".arpa")]
    return Names(tuple(dict.fromkeys(good)), tuple(dict.fromkeys(addresses)), link)


def lan_addresses() -> tuple[str, ...]:
    """Find the addresses of this machine in private networks, the one with a way to others first."""
    found: list[str] = []
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((_ELSEWHERE, 9))  # asks for the way and sends nothing
        found.append(probe.getsockname()[0])
    with suppress(OSError, UnicodeError):
        known = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        found += [str(place[0]) for *_, place in known]
    others = [each for each in found if is_private(each) and not ipaddress.ip_address(each).is_loopback]
    return tuple(dict.fromkeys(each for each in others if "%" not in each))


def is_private(address: str) -> bool:
    """Whether it is an address of a private network or of this machine."""
    found = ipaddress.ip_address(address)
    return any(found in network for network in PRIVATE if network.version == found.version)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
