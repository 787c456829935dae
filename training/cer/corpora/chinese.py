"""Chinese counselling dialogues written or rewritten by language models.

- SMILE (Qiu et al. 2024, https://arxiv.org/abs/2305.00450): one JSON file per dialogue, roles
  `client` and `counselor`; its label field is always empty.
- CPsyCoun (Zhang et al. 2024, https://arxiv.org/abs/2405.16433): CPsyCounD, one text file per
  dialogue, and CPsyCounE, one JSON list of strings per dialogue in a folder for each topic.
- SoulChat (Chen et al. 2023, https://arxiv.org/abs/2311.00273): one array of objects with `id`,
  `topic` and `messages` of `role` user or assistant and `content`.
    No file was available: the layout follows published descriptions and is untested on a real file.

SMILE and CPsyCoun are read from a folder or from a tar archive.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath

from compeer_core.dialogue import Speaker
from training.cer.corpora.builder import Builder, RawUtterance
from training.cer.corpora.reading import Row, converted, json_array, packed_files, plain
from training.cer.records import Dropped, Reason, SourceDialogue

_SPEAKERS = {
    **dict.fromkeys(("client", "user", "来访者", "求助者"), Speaker.SEEKER),
    **dict.fromkeys(("counselor", "assistant", "心理咨询师", "支持者"), Speaker.SUPPORTER),
}
_PREFIX = re.compile(r"^\s*(来访者|心理咨询师|求助者|支持者)[：:]", re.MULTILINE)


def load_smile(path: Path, dropped: Dropped, split: str | None = None) -> Iterator[SourceDialogue]:
    """Yield the dialogues of SMILE's `data` folder."""
    builder = Builder("smile", "zh", "CC0 1.0", path, dropped, split)

    def utterances_of(row: Row) -> Iterable[RawUtterance]:
        return [
            RawUtterance(_SPEAKERS[turn["role"]], turn["content"]) for turn in json.loads(row.value)
        ]

    return _load_packed(builder, ".json", utterances_of, lambda name: {})


def load_cpsycoun_d(
    path: Path, dropped: Dropped, split: str | None = None
) -> Iterator[SourceDialogue]:
    """Yield the dialogues of CPsyCounD, rebuilt from reports of counselling."""
    builder = Builder("cpsycoun", "zh", "CC BY 4.0", path, dropped, split)
    return _load_packed(
        builder, ".txt", lambda row: _prefixed(row.value.decode("utf-8-sig")), lambda name: {}
    )


def load_cpsycoun_e(
    path: Path, dropped: Dropped, split: str | None = None
) -> Iterator[SourceDialogue]:
    """Yield the dialogues of CPsyCounE, its set for evaluation; the topic is a label."""
    builder = Builder("cpsycoun", "zh", "CC BY 4.0", path, dropped, split)
    return _load_packed(
        builder,
        ".json",
        lambda row: _prefixed("\n".join(json.loads(row.value))),
        lambda name: {"topic": PurePosixPath(name).parent.name},
    )


def load_soulchat(
    path: Path, dropped: Dropped, split: str | None = None
) -> Iterator[SourceDialogue]:
    """Yield the dialogues of SoulChatCorpus."""
    builder = Builder("soulchat", "zh", "for research, on request", path, dropped, split)

    def convert(row: Row) -> SourceDialogue | None:
        turns = [turn for turn in row.value["messages"] if turn["role"] != "system"]
        topic = plain(row.value.get("topic"))
        return builder.dialogue(
            row.where,
            id=f"soulchat/{row.value['id']}",
            source_id=str(row.value["id"]),
            utterances=[RawUtterance(_SPEAKERS[turn["role"]], turn["content"]) for turn in turns],
            labels={"topic": topic} if topic else {},
        )

    return converted(json_array(path, dropped), convert, path, dropped)


def _load_packed(
    builder: Builder,
    suffix: str,
    utterances_of: Callable[[Row], Iterable[RawUtterance]],
    labels: Callable[[str], dict[str, str]],
) -> Iterator[SourceDialogue]:
    def convert(row: Row) -> SourceDialogue | None:
        name = str(row.where)
        try:
            turns = utterances_of(row)
        except json.JSONDecodeError as error:
            builder.dropped.add(Reason.NOT_JSON, builder.path, name, str(error.msg))
            return None
        short = name.removesuffix(suffix)
        return builder.dialogue(
            name,
            id=f"{builder.corpus}/{short}",
            source_id=short,
            utterances=turns,
            labels=labels(name),
        )

    rows = packed_files(builder.path, suffix)
    return converted(rows, convert, builder.path, builder.dropped)


def _prefixed(text: str) -> list[RawUtterance]:
    before, *turns = _PREFIX.split(text)
    if before.strip():
        raise ValueError("text before the first speaker")
    return [
        RawUtterance(_SPEAKERS[who], words)
        for who, words in zip(turns[::2], turns[1::2], strict=True)
    ]
