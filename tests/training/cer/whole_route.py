"""What a whole run needs in tests: corpora in their true layouts, a model that answers, annotators.

`answer` stands for a model behind an endpoint: what it writes depends on what it is asked and on the
seed, and on nothing else, so that two runs can be compared byte by byte.
"""

import csv
import gzip
import hashlib
import json
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from compeer_core.annotation.annotations import Annotation, AnnotationItem, write_annotations
from compeer_core.taxonomy import Emotion, Preference, Stage, Strategy
from tests.cases import turn_text
from training.data.records import read_records

# --- Corpora ------------------------------------------------------------------------------------

SOULCHAT = (
    ("我最近工作压力很大，晚上总是睡不着。", "听起来你这段时间很辛苦，睡不着持续多久了？"),
    ("大概有两个星期了，一躺下就想到没做完的事。", "脑子停不下来的时候，身体也很难放松下来。"),
    ("是的，我甚至开始害怕上班了。", "害怕上班，说明这份压力已经让你很吃力了。"),
    ("谢谢你，说出来好一些了。", "能说出来就是很好的一步，慢慢来。"),
)


def write_full_corpora(small_corpora: Path, folder: Path) -> Path:
    """Write the corpora of the paper's route: ESConv and the faces of `small_corpora`, and others."""
    for name in ("esconv", "faces"):
        shutil.copytree(small_corpora / name, folder / name)
    _write_json(
        folder / "soulchat" / "SoulChatCorpus-sft-multi-Turn.json",
        [
            {
                "id": number,
                "topic": "工作",
                "messages": [
                    {"role": role, "content": f"{text}（{number}）"}
                    for pair in SOULCHAT
                    for role, text in zip(("user", "assistant"), pair, strict=True)
                ],
            }
            for number in range(4)
        ],
    )
    _write_json(
        folder / "avamerg" / "train.json",
        [
            {
                "conversation_id": str(number),
                "topic": "work",
                "turns": [
                    {
                        "dialogue_history": [
                            {"index": 0, "role": "speaker", "utterance": f"I lost job {number}."},
                            {"index": 1, "role": "listener", "utterance": "Oh no, what happened?"},
                            {"index": 2, "role": "speaker", "utterance": "They closed the shop."},
                        ],
                        "response": "That is a hard thing to come home with.",
                    }
                ],
            }
            for number in range(3)
        ],
    )
    path = folder / "mesc" / "MESC.csv.gz"
    path.parent.mkdir(parents=True)
    with gzip.open(path, "wt", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            (
                *("Utterance", "Speaker", "Emotion", "Strategy", "Dialogue_ID", "Utterance_ID"),
                *("Season", "Episode", "StartTime", "EndTime"),
            )
        )
        for scene in range(3):
            for number, (text, speaker, emotion, strategy) in enumerate(
                (
                    (f"I told you, {scene} times.", "Client", "sadness", "undefined"),
                    ("Told me what?", "Therapist", "neutral", "Open question"),
                    ("That I cannot stand the house any more.", "Client", "anger", "undefined"),
                    (
                        "The house makes you angry.",
                        "Therapist",
                        "neutral",
                        "Reflection of feelings",
                    ),
                )
            ):
                time = f"00:00:{10 + number},000"
                writer.writerow((text, speaker, emotion, strategy, scene, number, 1, 1, time, time))
    for language in ("en", "zh"):
        _write_json(
            folder / "esc_eval" / "data" / f"card_high_{language}.json",
            [
                {
                    "base": "Age: unknown\nProblem: They lost count of the stars at the mill.",
                    "res": "x",
                    "source": "ESconv",
                    "language": language,
                    "id": 11,
                }
            ],
        )
    return folder


def _write_json(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")


# --- A model ------------------------------------------------------------------------------------

ARTIFICIAL = "(3, 1)"
"""A dialogue with these words (number 3 of the ESConv fixture) is artificial to the filter."""


def answer(body: Mapping[str, Any]) -> str:
    """Write what a model would, for any of the pipeline's prompts."""
    asked = "\n".join(_text(message) for message in body["messages"])
    last = _text(body["messages"][-1])
    draw = _draw(asked, str(body.get("seed")))
    if '"keep"' in last:
        drop = ARTIFICIAL in last
        return json.dumps({"keep": not drop, "reason": "artificial" if drop else None})
    if '"meaning"' in last:
        return '{"meaning": [], "strategy": [], "artefact": []}'
    if '"utterances"' in last:
        return json.dumps({"utterances": list(_rewritten(last))}, ensure_ascii=False)
    if '"D"' in last:
        scores = {name: (draw >> shift) % 10 / 10 for shift, name in enumerate("DISC")}
        chinese = ("说话直截了当，很少绕弯子，句子短。", "说话温和细心，常常先问对方的感受。")
        english = ("Short and plain, to the point.", "Warm and lively, asks a lot.")
        manner = chinese if _is_chinese(last) else english
        return json.dumps({**scores, "description": manner[draw % 2]}, ensure_ascii=False)
    return _turn(last, draw)


def stumbling(body: Mapping[str, Any]) -> str:
    """`answer`, but every now and then half of it; asked again, with another seed, it is whole."""
    text = answer(body)
    asked = "\n".join(_text(message) for message in body["messages"])
    return text[: len(text) // 2] if _draw(asked, str(body.get("seed")), "half") % 6 == 0 else text


def _turn(last: str, draw: int) -> str:
    chinese = _is_chinese(last)
    reply = (
        f"我听到了，第{draw % 97}次也可以慢慢说。" if chinese else f"I hear you, all {draw % 97}."
    )
    thought = "求助者很累。" if chinese else "The seeker carries a lot."
    return turn_text(
        reply,
        history=thought,
        stage=list(Stage)[draw % 3],
        feeling=thought,
        emotion=list(Emotion)[draw % len(Emotion)],
        intensity=draw % 5 + 1,
        reason=thought,
        strategy=list(Strategy)[draw % 8],
    )


def _rewritten(prompt: str) -> Iterator[str]:
    """The numbered utterances of a prompt, each with a word more."""
    for told in re.findall(r'^\d+\. [^"\n]*(".*")$', prompt, re.MULTILINE):
        text = json.loads(told)
        yield f"嗯，{text}" if _is_chinese(text) else f"Well, {text}"


def _text(message: Mapping[str, Any]) -> str:
    content = message["content"]
    if isinstance(content, str):
        return content
    return "\n".join(part.get("text", "[picture]") for part in content)


def _is_chinese(text: str) -> bool:
    return len(re.findall(r"[\u4e00-\u9fff]", text)) * 2 > len(re.findall(r"[A-Za-z]", text))


def _draw(*texts: str) -> int:
    return int.from_bytes(hashlib.sha256("\0".join(texts).encode()).digest()[:4], "big")


# --- Annotators ---------------------------------------------------------------------------------

EVENING = datetime(2026, 3, 1, 18, tzinfo=UTC)


def annotate(items: Path, name: str, path: Path, only: Collection[str] | None = None) -> int:
    """Write what one annotator says about the items; two of them differ now and then."""

    def answers() -> Iterator[Annotation]:
        for number, item in enumerate(read_records(items, AnnotationItem)):
            if only is None or item.id in only:
                yield _annotation(item, name, EVENING + timedelta(minutes=number))

    path.parent.mkdir(parents=True, exist_ok=True)
    return write_annotations(path, answers())


def _annotation(item: AnnotationItem, name: str, date: datetime) -> Annotation:
    def opinion(question: str, choices: int) -> int:
        says_otherwise = _draw(item.id, question, name) % 8 == 0
        return (_draw(item.id, question) % 5 + says_otherwise) % choices

    steps = tuple(opinion(part, 2) == 0 for part in ("history", "emotion", "strategy"))
    return Annotation(
        item_id=item.id,
        annotator=name,
        steps=(steps[0], steps[1], steps[2]),
        preference=None if item.replies is None else list(Preference)[opinion("reply", 4)],
        date=date,
    )
