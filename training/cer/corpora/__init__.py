"""Loaders of public corpora, each for one layout, that yield `training.cer.records.SourceDialogue`s.

A loader takes the path of a file (plain or `.gz`; for some a folder or a tar archive), a `Dropped`
that counts what is skipped, and the name of the file's split. It needs constant memory. A path such as
`hub:thu-coai/esconv#train` names a hub data set instead (`hub`), whose rows must have the loader's
layout.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from training.cer.corpora import answers, chinese, esconv, escot, everyday, mesc
from training.cer.records import Dropped, SourceDialogue


class Loader(Protocol):
    """Reads one file of a corpus."""

    def __call__(
        self, path: Path, dropped: Dropped, split: str | None = None
    ) -> Iterator[SourceDialogue]:
        """Yield its dialogues.

        Raises:
            ConfigError: The file is missing or damaged.
        """
        ...


LOADERS: Mapping[str, Loader] = MappingProxyType(
    {
        "esconv": esconv.load_lines,
        "esconv_original": esconv.load_original,
        "esconv_multiesc": esconv.load_multiesc,
        "esconv_windows": esconv.load_windows,
        "escot": escot.load,
        "escot_chain": escot.load_chain,
        "mesc_csv": mesc.load_csv,
        "mesc_json": mesc.load_json,
        "smile": chinese.load_smile,
        "cpsycoun_d": chinese.load_cpsycoun_d,
        "cpsycoun_e": chinese.load_cpsycoun_e,
        "soulchat": chinese.load_soulchat,
        "dailydialog": everyday.load_dailydialog,
        "empathetic_dialogues": everyday.load_empathetic_dialogues,
        "annomi": everyday.load_annomi,
        "avamerg": everyday.load_avamerg,
        "epitome": answers.load_epitome,
        "counselchat": answers.load_counselchat,
        "ed_pairs": answers.load_ed_pairs,
        "pair": answers.load_pair,
        "empathy_ratings": answers.load_empathy_ratings,
    }
)
"""Loaders by the name of the layout in a config."""
