"""Errors in logs and messages: a library's own words may quote what a visitor wrote."""

import traceback


def trace_of(error: BaseException) -> str:
    """Return the types and tracebacks of an error and its causes, without their messages.

    Example:
        >>> trace_of(ValueError("cannot read 'my secret'"))
        'ValueError'
    """
    kinds: list[str] = []
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        places = "".join(traceback.format_tb(cause.__traceback__)).rstrip("\n")
        kinds.append("\n".join([type(cause).__name__, *([places] if places else [])]))
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return "\nafter a ".join(kinds)


def brief(error: BaseException) -> str:
    """Return the kind of a library's error and the first line of its message, for one of ours."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300] if lines else 'no message'}"
