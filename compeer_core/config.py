"""Configuration: frozen models, read from TOML.

A TOML file lists only the values that differ from a model's defaults. `load_toml` reads it, applies
overrides from the command line and reports all invalid keys at once, each with its path and the
nearest valid key.
"""

import re
import tomllib
import typing
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from compeer_core.errors import ConfigError


class FrozenModel(BaseModel):
    """Base of records that cross a boundary (disk, model, user): immutable, no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


Model = TypeVar("Model", bound=BaseModel)


def load_toml(path: Path | None, model: type[Model], overrides: Sequence[str] = ()) -> Model:
    """Read a TOML file as a model.

    Args:
        path: The file, UTF-8; None if there are only overrides.
        model: The schema.
        overrides: ``"table.key=value"``; the last one wins. The value is parsed as TOML or, if
            that fails, taken as a plain string: ``steps=10``, ``name=mine``, ``tags=["a", "b"]``.

    Raises:
        ConfigError: The file cannot be read or is not TOML, an override has no ``=`` or a path
            through a value that is not a table, or keys or values do not fit the model. In the last
            case the message has one line per invalid key.
    """
    try:
        values = {} if path is None else tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is not TOML: {error}") from error
    where = path or Path("command line")
    for override in overrides:
        _apply(values, override, where)
    try:
        return model.model_validate(values)
    except ValidationError as error:
        lines = [_explain(where, model, dict(detail)) for detail in error.errors()]
        raise ConfigError("\n".join(lines)) from error


def _apply(values: dict[str, Any], override: str, path: Path) -> None:
    dotted, equals, text = override.partition("=")
    keys = [key.strip() for key in dotted.split(".")]
    if not equals or not all(keys):
        raise ConfigError(f"override {override!r}: must look like table.key=value")
    table = values
    for depth, key in enumerate(keys[:-1], start=1):
        inner = table.setdefault(key, {})
        if not isinstance(inner, dict):
            raise ConfigError(
                f"override {override!r}: {'.'.join(keys[:depth])} is not a table in {path}"
            )
        table = inner
    table[keys[-1]] = _toml_value(text.strip())


def _toml_value(text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    # A line break could add further keys; such text is a string.
    return parsed["value"] if parsed.keys() == {"value"} else text


def _explain(path: Path, model: type[BaseModel], detail: Mapping[str, Any]) -> str:
    location: tuple[str | int, ...] = detail["loc"]
    where = f"{path}: {'.'.join(map(str, location)) or 'the file'}"
    if detail["type"] == "missing":
        return f"{where}: is required"
    got = f"got {_shortened(detail['input'])}"
    if detail["type"] != "extra_forbidden":
        return f"{where}: {detail['msg']}, {got}"
    known = sorted(_keys_at(model, location[:-1]))
    nearest = get_close_matches(str(location[-1]), known, n=1, cutoff=0.5)
    if nearest:
        return f"{where}: unknown key, {got} (did you mean {nearest[0]!r}?)"
    return f"{where}: unknown key, {got} (known keys: {', '.join(known) or 'none'})"


def _shortened(value: object, limit: int = 80) -> str:
    text = re.sub(
        r"//[^/@\s]*@", "//...@", repr(value)
    )  # errors are logged, and a URL may hold a key
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def _keys_at(model: type[BaseModel], location: Iterable[str | int]) -> set[str]:
    """Return the keys of the models at a path."""
    models = {model}
    for step in location:
        fields = [inner.model_fields.get(str(step)) for inner in models]
        reached = {inner for field in fields if field for inner in _models_in(field.annotation)}
        # A list index, a mapping key or a union tag is not a field; the models stay the same.
        models = reached or models
    return {field.alias or name for inner in models for name, field in inner.model_fields.items()}


def _models_in(annotation: Any) -> set[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return {annotation}
    return {inner for part in typing.get_args(annotation) for inner in _models_in(part)}
