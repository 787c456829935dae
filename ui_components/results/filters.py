"""Which votes a visitor asks for, as it stands in an address: ``language=zh&image=with&admit=leaked``.

The form of the page, the downloads and a shared link all speak this way.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from urllib.parse import parse_qs, urlencode

from compeer_core.errors import InputError
from compeer_core.votes.battles import Flag
from compeer_core.votes.leaderboard.board import ALL_FLAGS, Filters

VISITORS = "-"
"""As a group of raters: those who belong to none."""
MOST_CHARACTERS = 2000

_PRESENCE: Mapping[str, bool | None] = MappingProxyType({"": None, "with": True, "without": False})
_KINDS = ("blind", "named", "any")


def read_filters(query: str) -> Filters:
    """Read the part of an address after the question mark; what is not about filters is passed over.

    Raises:
        InputError: It asks for something that cannot be.

    Example:
        >>> read_filters("language=zh&image=with&topic=").languages
        ('zh',)
    """
    if len(query) > MOST_CHARACTERS:
        raise InputError(f"the filters have more than {MOST_CHARACTERS} characters")
    asked = parse_qs(query)
    if not all(value.isprintable() for values in asked.values() for value in values):
        raise InputError("a filter has a character that cannot be shown")
    kind = asked.get("kind", ["blind"])[0]
    if kind not in _KINDS:
        raise InputError(f"kind must be one of {', '.join(_KINDS)}")
    groups = ["" if group == VISITORS else group for group in asked.get("group", [])]
    admit = asked.get("admit", [])
    unknown = set(admit) - {ALL_FLAGS, *Flag}
    if unknown:
        raise InputError(f"there is no flag {min(unknown)!r}")
    return Filters(
        kind=kind,
        languages=_some(asked.get("language", [])),
        topics=_some(asked.get("topic", [])),
        rater_groups=_some(groups),
        has_image=_presence("image", asked),
        with_reasoning=_presence("reasoning", asked),
        admit=_some(admit),
    )


def write_filters(filters: Filters, **more: str) -> str:
    """Return the same in an address, without what is asked for by default.

    Example:
        >>> write_filters(read_filters("kind=blind&image=with&admit=leaked"), as_of="now")
        'image=with&admit=leaked&as_of=now'
    """
    said = {True: "with", False: "without"}
    return urlencode(
        [
            *([("kind", filters.kind)] if filters.kind != Filters().kind else []),
            *(("language", language) for language in filters.languages),
            *(("topic", topic) for topic in filters.topics),
            *(("group", group or VISITORS) for group in filters.rater_groups),
            *(
                (name, said[wanted])
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


def _presence(name: str, asked: Mapping[str, Sequence[str]]) -> bool | None:
    value = asked.get(name, [""])[0]
    if value not in _PRESENCE:
        raise InputError(f"{name} must be 'with' or 'without'")
    return _PRESENCE[value]
