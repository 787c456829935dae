"""Who asks: a visitor without a name, known by a signed cookie that scripts cannot read.

Limits need to know more: the network that a request comes from, and whether a person or a program
asks. A cookie costs nothing, so where somebody collects them, the network counts instead.
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
"""Of an IPv6 address: below them, whoever has a line chooses freely."""
NEW_VISITORS = 200
"""New visitors of one network in `NEW_VISITORS_SECONDS`: a large school that opens the page in one lesson."""
NEW_VISITORS_SECONDS = 3600.0
CROWD = "~"
"""What the ids of visitors beyond `NEW_VISITORS` begin with; no other id has this character."""

Clock = Callable[[], float]


@dataclass(frozen=True)
class Caller:
    """Whom a limit is about."""

    network: str
    """As `Visitors.network` tells it."""
    visitor: str = field(default="", repr=False)
    """Empty without a cookie."""
    is_program: bool = False

    @property
    def is_of_the_crowd(self) -> bool:
        """Without a cookie, or beyond `NEW_VISITORS`: one with all others of the network."""
        return not self.visitor or self.visitor.startswith(CROWD)

    @property
    def holder(self) -> str:
        """Who answers for what is kept of the caller: the visitor, or the crowd of a network."""
        return f"{CROWD}{self.network}" if self.is_of_the_crowd else self.visitor


class NewVisitors:
    """Counts the new visitors of each network, an hour at a time."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._since = clock()
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def is_one_too_many(self, network: str) -> bool:
        """Count one more, and tell whether there are more than `NEW_VISITORS` by now."""
        with self._lock:
            if self._clock() - self._since > NEW_VISITORS_SECONDS:
                self._since = self._clock()
                self._counts.clear()
            self._counts[network] += 1
            return self._counts[network] > NEW_VISITORS


@dataclass(frozen=True)
class Visitors:
    """Makes and reads the cookie. With a secret of its own, a server knows only its own visitors."""

    secret: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
    _new_visitors: NewVisitors = field(default_factory=NewVisitors, repr=False, compare=False)

    def new_cookie(self, network: str = "") -> str:
        """Return the cookie of somebody new, who came from that network."""
        crowded = bool(network) and self._new_visitors.is_one_too_many(network)
        visitor = (CROWD if crowded else "") + secrets.token_urlsafe(24)
        return self._signer.sign(visitor).decode("ascii")

    def network(self, address: str | None) -> str:
        """Return a name for the network of an address that does not tell the address.

        Empty where there is none, as in a call without a connection.
        """
        if not address:
            return ""
        key = hashlib.sha256(self.secret.encode()).digest()
        return hashlib.blake2b(_site(address).encode(), key=key, digest_size=12).hexdigest()

    def read(self, cookies: Mapping[str, str]) -> str:
        """Return the visitor's id, empty where there is no cookie or a forged one."""
        try:
            return self._signer.unsign(cookies.get(COOKIE, "")).decode("ascii")
        except (BadSignature, UnicodeError):
            return ""

    @property
    def _signer(self) -> Signer:
        return Signer(self.secret, salt="visitor")


def address_of(request: object) -> str | None:
    """Return the address of whoever asks, None where there is none (a socket of this machine).

    Args:
        request: A request of FastAPI's or of gradio's.
    """
    client = getattr(request, "client", None)
    return getattr(client, "host", None)


def site_of(request: object) -> str:
    """Return where whoever asks comes from, for limits; empty where there is no address."""
    address = address_of(request)
    return _site(address) if address else ""


def conversation_of(claimed: object) -> str:
    """Return the id that the browser holds, or a new one: an id that somebody made up is none."""
    if isinstance(claimed, str) and CONVERSATION_ID.fullmatch(claimed):
        return claimed
    return secrets.token_urlsafe(24)


def picture_number(claimed: str) -> int:
    """Return which picture an address names, from 0; -1 for anything that is no number."""
    is_number = claimed.isascii() and claimed.isdigit() and len(claimed) <= _MOST_DIGITS
    return int(claimed) if is_number else -1


def is_from_here(request: Request) -> bool:
    """Whether a program on the server's own computer asks, and for itself.

    A proxy beside the server asks for others. It is known by the headers that it adds; one that adds
    none has to keep to itself what is not for everybody (`docs/serving.md` shows how).
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
    """Return what one customer of a provider cannot change: an IPv4 address, or 64 bits of IPv6."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:  # the name of a socket, or of a test's client
        return address
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.ip_network((parsed.packed[: SITE_BITS // 8] + bytes(8), SITE_BITS)))
    return str(parsed)
