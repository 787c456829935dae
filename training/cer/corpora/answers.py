"""Posts and questions with judged answers.

Each answer becomes a dialogue of the post and the answer; all answers to one post share a
`source_id`, and the judgement of an answer is a label of the dialogue.

- EPITOME (Sharma et al. 2020, https://arxiv.org/abs/2009.08441): a level of 0 to 2 for one of three
  mechanisms per file, with the part of the answer that shows it.
- counsel-chat (https://github.com/nbertagnolli/counsel-chat): therapists' answers, with votes.
- EmpatheticDialogues pairs: a CSV without header; label 0 is a person's reply, 1 a worse one. The
  post is all utterances of the speaker so far.
- PAIR (Min et al. 2022): eight reflections of a client's prompt, in three tiers of quality.
- empathy ratings (Welivita and Pu 2024, https://arxiv.org/abs/2406.05063): one reply of a person and
  two of ChatGPT, each rated 1 to 3 by people.
"""

import html
import re
from collections.abc import Iterator
from pathlib import Path

from compeer_core.dialogue import Speaker
from training.cer.corpora.builder import Builder, RawUtterance
from training.cer.corpora.reading import (
    Row,
    bare_csv_rows,
    converted,
    csv_rows,
    labels_of,
    letters_of,
    text_key,
)
from training.cer.records import Dropped, Reason, SourceDialogue

PAIR_TIERS = ("hq1", "hq2", "mq1", "lq1", "lq2", "lq3", "lq4", "lq5")
"""From high to low; tiers with the same letters are equal."""
RATED_REPLIES = ("human", "chatgpt", "chatgpt_empathy")
_TAG = re.compile(r"<[^<>]*>")
_PARAGRAPH = re.compile(r"</p>|<br\s*/?>", re.IGNORECASE)
_END = "<|endoftext|>"


def _answered(
    builder: Builder,
    where: int | str,
    *,
    id: str,
    source_id: str,
    post: str,
    answer: str,
    problem: str = "",
    situation: str = "",
    labels: dict[str, str],
) -> SourceDialogue | None:
    if not post.strip() or not answer.strip():
        builder.dropped.add(Reason.NO_PARTNER, builder.path, where)
        return None
    return builder.dialogue(
        where,
        id=f"{builder.corpus}/{id}",
        source_id=source_id,
        utterances=[RawUtterance(Speaker.SEEKER, post), RawUtterance(Speaker.SUPPORTER, answer)],
        problem=problem,
        situation=situation,
        labels=labels,
    )


def load_epitome(
    path: Path, dropped: Dropped, split: str | None = None
) -> Iterator[SourceDialogue]:
    """Yield the pairs of one mechanism's file; the label `rp_id` identifies the answer in all three."""
    builder = Builder("epitome", "en", "academic, non-commercial", path, dropped, split)
    columns = ("sp_id", "rp_id", "seeker_post", "response_post", "level", "rationales")

    def convert(row: Row) -> SourceDialogue | None:
        pair = row.value
        return _answered(
            builder,
            row.where,
            # 52 public rows repeat an earlier pair of ids
            id=f"{pair['sp_id']}/{pair['rp_id']}/{row.where}",
            source_id=pair["sp_id"],
            post=pair["seeker_post"],
            answer=pair["response_post"],
            labels={
                "rp_id": pair["rp_id"],
                "level": str(int(pair["level"])),
                "rationales": pair["rationales"].strip().rstrip("|"),
            },
        )

    return converted(csv_rows(path, dropped, columns), convert, path, dropped)


def load_counselchat(
    path: Path, dropped: Dropped, split: str | None = None
) -> Iterator[SourceDialogue]:
    """Yield the answers of either file, without HTML. The older file names its splits."""
    columns = ("questionID", "questionTitle", "questionText", "answerText", "upvotes")

    def convert(row: Row) -> SourceDialogue | None:
        answer = row.value
        own = {"val": "valid"}.get(answer.get("split", ""), answer.get("split"))
        builder = Builder("counselchat", "en", "MIT", path, dropped, own or split)
        title, text = _without_html(answer["questionTitle"]), _without_html(answer["questionText"])
        return _answered(
            builder,
            row.where,
            id=f"{answer['questionID']}/{row.where}",
            # the files number the questions differently, but have the same texts
            source_id=text_key(letters_of(title)),
            post=text or title,
            answer=_without_html(answer["answerText"]),
            problem=(answer.get("topic") or answer.get("topics") or "").strip().lower(),
            situation=title,
            labels=labels_of(answer, ["upvotes"]),
        )

    return converted(csv_rows(path, dropped, columns), convert, path, dropped)


def _without_html(text: str) -> str:
    plain = html.unescape(_TAG.sub("", _PARAGRAPH.sub("\n", text)))
    return "\n".join(line.strip() for line in plain.replace("\xa0", " ").splitlines()).strip()


def load_ed_pairs(
    path: Path, dropped: Dropped, split: str | None = None
) -> Iterator[SourceDialogue]:
    """Yield the replies, with `label` 0 (a person's) or 1.

    The file has no ids, and a context grows from row to row, so rows whose contexts begin with the
    same 40 characters share a source.
    """
    builder = Builder("empathetic_dialogues", "en", "CC BY-NC 4.0", path, dropped, split)

    def convert(row: Row) -> SourceDialogue | None:
        label, context, reply = row.value
        if label not in {"0", "1"}:
            raise ValueError("the label is neither 0 nor 1")
        context = context.strip().removesuffix(_END).strip()
        return _answered(
            builder,
            row.where,
            id=f"{split or 'all'}/{row.where}",
            source_id=text_key(context[:40]),
            post=context,
            answer=reply.strip().removesuffix(_END),
            labels={"label": label},
        )

    return converted(bare_csv_rows(path, dropped, 3), convert, path, dropped)


def load_pair(path: Path, dropped: Dropped, split: str | None = None) -> Iterator[SourceDialogue]:
    """Yield the eight reflections of each prompt, with their `tier`."""
    builder = Builder("pair", "en", "none stated", path, dropped, split)
    for row in csv_rows(path, dropped, ("prompt", *PAIR_TIERS)):
        for tier in PAIR_TIERS:
            dialogue = _answered(
                builder,
                row.where,
                id=f"{row.where}/{tier}",
                source_id=text_key(row.value["prompt"]),
                post=row.value["prompt"],
                answer=row.value[tier],
                labels={"tier": tier},
            )
            if dialogue is not None:
                yield dialogue


def load_empathy_ratings(
    path: Path, dropped: Dropped, split: str | None = None
) -> Iterator[SourceDialogue]:
    """Yield the three replies of each context, with their `rating`."""
    builder = Builder("empathy_ratings", "en", "none stated", path, dropped, split)
    columns = ["dialog_id", "emotion", "situation", "speaker_uttr"]
    columns += [
        f"{kind}_{name}" for kind in ("response", "rating", "miti") for name in RATED_REPLIES
    ]
    for row in csv_rows(path, dropped, columns):
        context = row.value
        for name in RATED_REPLIES:
            rating = context[f"rating_{name}"]
            if rating not in {"1", "2", "3"}:
                dropped.add(Reason.ANOTHER_LAYOUT, path, row.where, "rating")
                continue
            dialogue = _answered(
                builder,
                row.where,
                id=f"{context['dialog_id']}/{name}",
                source_id=context["dialog_id"],
                post=context["speaker_uttr"],
                answer=context[f"response_{name}"],
                situation=context["situation"].strip(),
                labels={
                    "reply_of": name,
                    "rating": rating,
                    "miti": context[f"miti_{name}"],
                    "emotion": context["emotion"],
                },
            )
            if dialogue is not None:
                yield dialogue
