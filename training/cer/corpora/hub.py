"""Data sets of the Hugging Face hub in the place of files.

A corpus may be named `hub:<owner>/<name>[@revision][:config][#split]`. Its rows are streamed and
stand for the records of a file, so a loader can read a data set whose rows are laid out as its
file is. ESConv's (`hub:thu-coai/esconv`) are text files of JSON lines, hence rows with one column
`text`. A data set made by a script cannot be loaded any more; where the hub has converted it, the
rows are under the revision `refs/convert/parquet`.

The library caches and authenticates as it is set up to do (`HF_HOME`, `HF_TOKEN`).
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from compeer_core.errors import ConfigError

PREFIX = "hub:"
_NAME = re.compile(
    r"hub:(?P<name>[\w.-]+/[\w.-]+)"
    r"(?:@(?P<revision>[\w./-]+))?(?::(?P<config>[\w.-]+))?(?:#(?P<split>[\w.-]+))?"
)
_OF_A_SCRIPT = "scripts are no longer supported"
OWN_SPLITS: Mapping[str, str] = {
    "train": "train",
    "training": "train",
    "valid": "valid",
    "validation": "valid",
    "val": "valid",
    "dev": "valid",
    "test": "test",
}
"""What corpora call their splits, and what the splits are called here."""


@dataclass(frozen=True)
class HubName:
    """A name, taken apart."""

    name: str
    revision: str | None
    config: str | None
    split: str | None


@dataclass(frozen=True)
class HubPart:
    """One split of a data set: a path for a loader, and what the split is called there."""

    path: Path
    split: str


def is_hub_name(path: Path | str) -> bool:
    """Tell whether it names a data set and no file."""
    return str(path).startswith(PREFIX)


def read_hub_name(path: Path | str) -> HubName:
    """Take a name apart.

    Raises:
        ConfigError: It is not of the form above.

    Example:
        >>> read_hub_name("hub:thu-coai/esconv#train")
        HubName(name='thu-coai/esconv', revision=None, config=None, split='train')
    """
    match = _NAME.fullmatch(str(path))
    if match is None:
        raise ConfigError(f"{path}: not of the form hub:<owner>/<name>[@revision][:config][#split]")
    return HubName(**match.groupdict())


def hub_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of one split, or of all splits where the name has none.

    Raises:
        ConfigError: There is no such data set or split, or it cannot be reached or read.
    """
    named = read_hub_name(path)
    splits = _opened(path, named)
    if named.split is not None and named.split not in splits:
        raise ConfigError(f"{path}: no such split; there are {', '.join(splits)}")
    for name in [named.split] if named.split is not None else list(splits):
        with _explained(path):
            yield from splits[name]


def hub_parts(path: str, split: str | None) -> list[HubPart]:
    """Return the splits to read of a data set, each with a path that names it.

    Args:
        path: As in a configuration.
        split: Only those that are this split of ours; None for all.

    Raises:
        ConfigError: As `hub_rows` does, or there is no such split.
    """
    named = read_hub_name(path)
    if named.split is not None:
        return [HubPart(Path(path), split or OWN_SPLITS.get(named.split, named.split))]
    names = list(_opened(Path(path), named))
    parts = [HubPart(Path(f"{path}#{name}"), OWN_SPLITS.get(name, name)) for name in names]
    chosen = [part for part in parts if split in {None, part.split}]
    if not chosen:
        raise ConfigError(f"{path}: no split {split}; there are {', '.join(names)}")
    return chosen


def _opened(path: Path, named: HubName) -> Mapping[str, Any]:
    from datasets import load_dataset

    with _explained(path):
        opened: Mapping[str, Any] = load_dataset(
            named.name, named.config, revision=named.revision, streaming=True
        )
    return opened


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn what the library raises into one sentence with the way out."""
    from datasets.exceptions import DatasetNotFoundError, DatasetsError

    try:
        yield
    except ConfigError:
        raise
    except DatasetNotFoundError as error:
        raise ConfigError(
            f"{path}: the hub has no such data set or revision, or it is private; check the name,"
            " or log in with hf auth login"
        ) from error
    except (ConnectionError, httpx.TransportError) as error:
        raise ConfigError(
            f"{path}: the hub cannot be reached; check the network, or download the data set"
            " elsewhere (hf download --repo-type dataset) and give the path of its files"
        ) from error
    except (OSError, ValueError, RuntimeError, DatasetsError, httpx.HTTPError) as error:
        if _OF_A_SCRIPT in str(error):
            raise ConfigError(
                f"{path}: this data set is made by a script, which the library does not run; name"
                " the revision @refs/convert/parquet, where the hub may have converted it"
            ) from error
        raise ConfigError(f"{path}: {str(error).partition(chr(10))[0]}") from error
