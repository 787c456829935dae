"""Who asks: a visitor without a name, known by a signed cookie that scripts cannot read."""

import ipaddress
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from fastapi import Request
from itsdangerous import BadSignature, Signer

COOKIE = "compeer_visitor"
LANGUAGE_COOKIE = "compeer_language"
COOKIE_SECONDS = 30 * 24 * 3600
CONVERSATION_ID = re.compile(r"[\w-]{16,64}")
_MOST_DIGITS = 4
_FORWARDED = ("forwarded", "via", "x-forwarded-", "x-real-ip")


@dataclass(frozen=True)
class Visitors:
    """Makes and reads the cookie. With a secret of its own, a server knows only its own visitors."""

    secret: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)

    def new_cookie(self) -> str:
        """Return the cookie of somebody new."""
        return self._signer.sign(secrets.token_urlsafe(24)).decode("ascii")

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
    none has to keep to itself what is not for everybody (`DEPLOY.md` shows how).
    """
    if any(name.startswith(_FORWARDED) for name in request.headers):
        return False
    try:
        address = ipaddress.ip_address(request.client.host if request.client else "")
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)
