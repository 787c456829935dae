"""Filters of votes as a query string: ``language=zh&image=with&admit=leaked``.

Used by the page's form, the downloads and shared links.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from urllib.parse import parse_qs, urlencode

from compeer_core.errors import InputError
from compeer_core.votes.battles import Flag
from compeer_core.votes.leaderboard.board import ALL_FLAGS, Filters

MOST_CHARACTERS = 2000

_PRESENCE: Mapping[str, bool | None] = MappingProxyType({"": None, "with": True, "without": False})
_KINDS = ("blind", "named", "any")


def read_filters(query: str) -> Filters:
    """Parse a query string; unrelated parameters are ignored.

    Raises:
        InputError: A value is invalid.

    Example:
        >>> read_filters("language=zh&image=with&topic=").languages
        ('zh',)
    """
    if len(query) > MOST_CHARACTERS:
        raise InputError(f"the filters have more than {MOST_CHARACTERS} characters")
    parameters = parse_qs(query)
    if not all(value.isprintable() for values in parameters.values() for value in values):
        raise InputError("a filter has a character that cannot be shown")
    kind = parameters.get("kind", ["blind"])[0]
    if kind not in _KINDS:
        raise InputError(f"kind must be one of {', '.join(_KINDS)}")
    admit = parameters.get("admit", [])
    unknown = set(admit) - {ALL_FLAGS, *Flag}
    if unknown:
        raise InputError(f"there is no flag {min(unknown)!r}")
    return Filters(
        kind=kind,
        languages=_some(parameters.get("language", [])),
        topics=_some(parameters.get("topic", [])),
        has_image=_presence("image", parameters),
        with_reasoning=_presence("reasoning", parameters),
        admit=_some(admit),
    )


def write_filters(filters: Filters, **more: str) -> str:
    """Return the query string without default values.

    Example:
        >>> write_filters(read_filters("kind=blind&image=with&admit=leaked"), as_of="now")
        'image=with&admit=leaked&as_of=now'
    """
    choices = {True: "with", False: "without"}
    return urlencode(
        [
            *([("kind", filters.kind)] if filters.kind != Filters().kind else []),
            *(("language", language) for language in filters.languages),
            *(("topic", topic) for topic in filters.topics),
            *(
                (name, choices[wanted])
                for name, wanted in (
                    ("image", filters.has_image),
                    ("reasoning", filters.with_reasoning),
                )
                if wanted is not None
            ),
            *(("admit", flag) for flag in filters.admit),
            *more.items(),
        ]
    )


def _some(values: Sequence[str]) -> tuple[str, ...]:
    return tuple(sorted(set(values)))


def _presence(name: str, parameters: Mapping[str, Sequence[str]]) -> bool | None:
    value = parameters.get(name, [""])[0]
    if value not in _PRESENCE:
        raise InputError(f"{name} must be 'with' or 'without'")
    return _PRESENCE[value]
