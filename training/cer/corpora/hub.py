"""Read data sets of the Hugging Face hub instead of files.

A corpus path may be `hub:<owner>/<name>[@revision][:config][#split]`. The rows are streamed and
replace the records of a file, so a loader can read a data set whose rows have the layout of its file.
ESConv's (`hub:thu-coai/esconv`) are text files of JSON lines, hence rows with one column `text`. Data
sets that are made by a script can no longer be loaded; if the hub has converted one, use the revision
`refs/convert/parquet`.

The library's cache and authentication settings apply (`HF_HOME`, `HF_TOKEN`).
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
"""Our names of splits, by the corpora's names."""


@dataclass(frozen=True)
class HubName:
    """The parts of a name."""

    name: str
    revision: str | None
    config: str | None
    split: str | None


@dataclass(frozen=True)
class CorpusPart:
    """One file of a corpus, or one split of a data set: a path for a loader, and the split's name."""

    path: Path
    split: str | None


def is_hub_name(path: Path | str) -> bool:
    """Whether the path names a hub data set."""
    return str(path).startswith(PREFIX)


def read_hub_name(path: Path | str) -> HubName:
    """Parse a name.

    Raises:
        ConfigError: It is malformed.

    Example:
        >>> read_hub_name("hub:thu-coai/esconv#train")
        HubName(name='thu-coai/esconv', revision=None, config=None, split='train')
    """
    match = _NAME.fullmatch(str(path))
    if match is None:
        raise ConfigError(f"{path}: expected hub:<owner>/<name>[@revision][:config][#split]")
    return HubName(**match.groupdict())


def hub_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of one split, or of all splits if the name has none.

    Raises:
        ConfigError: The data set or split does not exist or cannot be read.
    """
    named = read_hub_name(path)
    splits = _opened(path, named)
    if named.split is not None and named.split not in splits:
        raise ConfigError(f"{path}: no such split; known: {', '.join(splits)}")
    for name in [named.split] if named.split is not None else list(splits):
        with _explained(path):
            yield from splits[name]


def hub_parts(path: str, split: str | None) -> list[CorpusPart]:
    """Return the splits to read from a data set, each with a path that names it.

    Args:
        path: The path in the config.
        split: Our name of the split to read; None for all.

    Raises:
        ConfigError: As in `hub_rows`.
    """
    named = read_hub_name(path)
    if named.split is not None:
        return [CorpusPart(Path(path), split or OWN_SPLITS.get(named.split, named.split))]
    names = list(_opened(Path(path), named))
    parts = [CorpusPart(Path(f"{path}#{name}"), OWN_SPLITS.get(name, name)) for name in names]
    chosen = [part for part in parts if split in {None, part.split}]
    if not chosen:
        raise ConfigError(f"{path}: no split {split}; known: {', '.join(names)}")
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
    """Turn the library's errors into one sentence that says what to do."""
    from datasets.exceptions import DatasetNotFoundError, DatasetsError

    try:
        yield
    except ConfigError:
        raise
    except DatasetNotFoundError as error:
        raise ConfigError(
            f"{path}: no such data set or revision on the hub, or it is private; check the name,"
            " or log in with hf auth login"
        ) from error
    except (ConnectionError, httpx.TransportError) as error:
        raise ConfigError(
            f"{path}: the hub is not reachable; check the network, or download the data set"
            " elsewhere (hf download --repo-type dataset) and use the path of its files"
        ) from error
    except (OSError, ValueError, RuntimeError, DatasetsError, httpx.HTTPError) as error:
        if _OF_A_SCRIPT in str(error):
            raise ConfigError(
                f"{path}: this data set needs a script, which the library does not run; try the"
                " revision @refs/convert/parquet, which the hub may provide"
            ) from error
        raise ConfigError(f"{path}: {str(error).partition(chr(10))[0]}") from error
