"""Visitors: anonymous, identified by a signed cookie that scripts cannot read.

Limits also need the network of a request and whether a person or a program sent it. Cookies are
free, so if somebody collects them, their network counts instead.
"""

import hashlib
import ipaddress
import re
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from fastapi import Request
from itsdangerous import BadSignature, Signer

COOKIE = "compeer_visitor"
LANGUAGE_COOKIE = "compeer_language"
COOKIE_SECONDS = 30 * 24 * 3600
CONVERSATION_ID = re.compile(r"[\w-]{16,64}")
_MOST_DIGITS = 4
_FORWARDED = ("forwarded", "via", "x-forwarded-", "x-real-ip")
SITE_BITS = 64
"""Prefix of an IPv6 address; customers choose the rest freely."""
NEW_VISITORS = 200
"""New visitors of one network in `NEW_VISITORS_SECONDS`: a large school that opens the page in one
lesson."""
NEW_VISITORS_SECONDS = 3600.0
CROWD = "~"
"""Prefix of ids beyond `NEW_VISITORS`; no other id contains it."""

Clock = Callable[[], float]


@dataclass(frozen=True)
class Caller:
    """The sender of a request, for limits."""

    network: str
    """See `Visitors.network`."""
    visitor: str = field(default="", repr=False)
    """Empty without a cookie."""
    is_program: bool = False

    @property
    def is_of_the_crowd(self) -> bool:
        """Without a cookie, or beyond `NEW_VISITORS`: counted with others of the network."""
        return not self.visitor or self.visitor.startswith(CROWD)

    @property
    def holder(self) -> str:
        """The owner of stored data: the visitor, or the crowd of a network."""
        return f"{CROWD}{self.network}" if self.is_of_the_crowd else self.visitor


class NewVisitors:
    """Counts the new visitors of each network per hour."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._since = clock()
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def is_one_too_many(self, network: str) -> bool:
        """Count one more; return whether the network exceeds `NEW_VISITORS`."""
        with self._lock:
            if self._clock() - self._since > NEW_VISITORS_SECONDS:
                self._since = self._clock()
                self._counts.clear()
            self._counts[network] += 1
            return self._counts[network] > NEW_VISITORS


@dataclass(frozen=True)
class Visitors:
    """Creates and reads the cookie, signed with the server's own secret."""

    secret: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
    _new_visitors: NewVisitors = field(default_factory=NewVisitors, repr=False, compare=False)

    def new_cookie(self, network: str = "") -> str:
        """Return the cookie for a new visitor from that network."""
        crowded = bool(network) and self._new_visitors.is_one_too_many(network)
        visitor = (CROWD if crowded else "") + secrets.token_urlsafe(24)
        return self._signer.sign(visitor).decode("ascii")

    def network(self, address: str | None) -> str:
        """Return a pseudonym for the network of an address.

        Empty if there is no address, as in a call without a connection.
        """
        if not address:
            return ""
        key = hashlib.sha256(self.secret.encode()).digest()
        return hashlib.blake2b(_site(address).encode(), key=key, digest_size=12).hexdigest()

    def read(self, cookies: Mapping[str, str]) -> str:
        """Return the visitor's id, empty without a valid cookie."""
        try:
            return self._signer.unsign(cookies.get(COOKIE, "")).decode("ascii")
        except (BadSignature, UnicodeError):
            return ""

    @property
    def _signer(self) -> Signer:
        return Signer(self.secret, salt="visitor")


def address_of(request: object) -> str | None:
    """Return the client's address, None if there is none (a local socket).

    Args:
        request: A request of FastAPI or gradio.
    """
    client = getattr(request, "client", None)
    return getattr(client, "host", None)


def site_of(request: object) -> str:
    """Return the client's address for limits; empty if there is none."""
    address = address_of(request)
    return _site(address) if address else ""


def conversation_of(claimed: object) -> str:
    """Return the id from the browser if it is well-formed, else a new one."""
    if isinstance(claimed, str) and CONVERSATION_ID.fullmatch(claimed):
        return claimed
    return secrets.token_urlsafe(24)


def picture_number(claimed: str) -> int:
    """Return the index of an image in a URL, from 0; -1 if it is not a number."""
    is_number = claimed.isascii() and claimed.isdigit() and len(claimed) <= _MOST_DIGITS
    return int(claimed) if is_number else -1


def is_from_here(request: Request) -> bool:
    """Whether a program on this computer sends the request for itself.

    A proxy on this computer sends for others. It is recognised by the headers it adds; one that
    adds none must itself restrict private routes (see `docs/serving.md`).
    """
    if any(name.startswith(_FORWARDED) for name in request.headers):
        return False
    try:
        address = ipaddress.ip_address(request.client.host if request.client else "")
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def _site(address: str) -> str:
    """Return what a provider's customer cannot change: an IPv4 address, or 64 bits of IPv6."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:  # a socket's name, or a test client's
        return address
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.ip_network((parsed.packed[: SITE_BITS // 8] + bytes(8), SITE_BITS)))
    return str(parsed)
