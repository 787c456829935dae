"""Small corpora in the layouts of the public ones, with text written for these tests.

`write_corpora` lays out the same tree of files as the folder of public corpora, so that a shipped
config reads either. What the layouts are like, and where they are odd:

- ESConv: one JSON object per line though the name ends in .txt, speakers `usr` and `sys`, a
  strategy on supporter entries only, runs of one speaker, dialogues that `sys` begins, surveys whose
  final rating is null, ratings as strings.
- plain English: documents separated by a line `<|endoftext|>`; in dialogues each line begins with
  a speaker, and a line before the talk may set the scene.
- counsel-chat: a CSV whose first column has no name, with line breaks and HTML in its fields.
- faces: a tar.gz of JPEGs and a CSV of labels per source, and one CSV that maps labels.
"""

import csv
import gzip
import io
import json
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image

from training.data.faces import FACE_CLASSES

Row = dict[str, Any]
Turn = tuple[str, ...]

# (emotion, problem, what happened, a word that gives the feeling away)
_SITUATIONS = (
    ("anxiety", "job crisis", "my team will be cut in half next month", "worried"),
    ("depression", "ongoing depression", "most mornings I cannot get up at all", "empty"),
    ("sadness", "breakup with partner", "we ended things after four years together", "lonely"),
    ("anger", "problems with friends", "my best friend shared what I had told her", "betrayed"),
    ("fear", "academic pressure", "I may fail the exam a second time", "scared"),
    ("shame", "Appearance Anxiety", "I hide whenever someone takes a photo", "ashamed"),
    ("guilt", "Issues with Parents", "I shouted at my father on his birthday", "fault"),
    ("nervousness", "Sleep Problems", "I lie awake until the birds begin", "nervous"),
)

_STRATEGIES = (
    ("Question", "When did you first notice it? Has anyone else seen it too?"),
    ("Restatement or Paraphrasing", "So what you are telling me is that it came all at once."),
    ("Reflection of feelings", "That sounds heavy. You have carried it alone for some time."),
    ("Self-disclosure", "I went through a spell like that myself. It took me a long while."),
    (
        "Affirmation and Reassurance",
        "You kept going on the worst of days. That took real strength.",
    ),
    (
        "Providing Suggestions",
        "Could you tell one person you trust about it? A short note is enough.",
    ),
    ("Information", "Many people find the second week easier. That is how grief tends to move."),
    ("Others", "I am glad that you wrote to me today. Take all the time you need."),
)


def esconv_row(
    dialog: Sequence[Turn],
    *,
    emotion: str = "anxiety",
    problem: str = "job crisis",
    initial: object = "5",
    final: object = "2",
) -> Row:
    """One ESConv dialogue. A turn is ("usr", text) or ("sys", text, strategy)."""
    entries = [
        {"text": turn[1], "speaker": turn[0]} | ({"strategy": turn[2]} if len(turn) > 2 else {})
        for turn in dialog
    ]
    return {
        "experience_type": "Previous Experience",
        "emotion_type": emotion,
        "problem_type": problem,
        "situation": "It has been a hard month.",
        "survey_score": {
            "seeker": {
                "initial_emotion_intensity": initial,
                "empathy": "4",
                "relevance": "5",
                "final_emotion_intensity": final,
            },
            "supporter": {"relevance": "4"},
        },
        "dialog": entries,
        "seeker_question1": "",
        "seeker_question2": "",
        "supporter_question1": "",
        "supporter_question2": "",
    }


def esconv_rows(count: int, *, first: int = 0) -> list[Row]:
    """Dialogues that differ in problem, feeling, words and quirks; the same for the same numbers."""
    return [_esconv_dialogue(number) for number in range(first, first + count)]


def _esconv_dialogue(number: int) -> Row:
    emotion, problem, happened, feeling = _SITUATIONS[number % len(_SITUATIONS)]
    place = f"It is the {number + 2}th week now"

    def support(turn: int) -> Turn:
        strategy, words = _STRATEGIES[(number + turn) % len(_STRATEGIES)]
        return ("sys", f"{words} ({number}, {turn})", strategy)

    dialog: list[Turn] = [
        ("usr", "Hello there."),
        support(0),
        ("usr", f"Where to begin... {happened}. {place}, and I am {feeling} all day."),
        support(1),
        ("usr", f'Nobody at home knows. I said it was "nothing", but {happened}.'),
        ("usr", "I just wanted to say that as well. \U0001f614"),
        support(2),
        support(3),
        ("usr", f"I never thought of it that way. I am a bit less {feeling} when I say it aloud."),
        support(4),
        ("usr", "Thank you, that was really helpful. I will try it."),
        support(5),
    ]
    if number % 2:  # more than half of ESConv begins with the supporter
        dialog.insert(0, ("sys", "Welcome! What brings you here today?", "Others"))
    return esconv_row(
        dialog,
        emotion=emotion,
        problem=problem,
        initial=str(3 + number % 3),
        final=None if number % 4 == 3 else "2",
    )


def write_esconv(path: Path, rows: Iterable[Row]) -> Path:
    """Write JSON lines, ASCII-escaped as ESConv's are."""
    return _write_gz(path, "".join(json.dumps(row) + "\n" for row in rows))


def write_blocks(path: Path, blocks: Iterable[str]) -> Path:
    """Write documents, each followed by a line `<|endoftext|>`."""
    return _write_gz(path, "".join(f"{block}\n<|endoftext|>\n" for block in blocks))


COUNSELCHAT_COLUMNS = (
    *("", "questionID", "questionTitle", "questionText", "questionLink", "topic", "therapistInfo"),
    *("therapistURL", "answerText", "upvotes", "views", "split"),
)


def write_counselchat(path: Path, rows: Iterable[Mapping[str, str]]) -> Path:
    """Write counsel-chat's CSV; a row names only what matters to it."""
    buffer = io.StringIO(newline="")
    writer = csv.DictWriter(buffer, COUNSELCHAT_COLUMNS, restval="")
    writer.writeheader()
    for number, row in enumerate(rows):
        writer.writerow({"": str(number), "questionID": str(number), **row})
    return _write_gz(path, buffer.getvalue())


def jpeg(side: int, face_class: str, number: int) -> bytes:
    """A grey photo: each class has its own pattern, each number its own noise."""
    rng = np.random.default_rng([FACE_CLASSES.index(face_class), number])
    rows, columns = np.mgrid[0:side, 0:side]
    phase = FACE_CLASSES.index(face_class) / len(FACE_CLASSES) * np.pi
    wave = np.sin((rows * np.cos(phase) + columns * np.sin(phase)) * 12 / side)
    pixels = 128 + 90 * wave + rng.normal(0, 8, (side, side))
    buffer = io.BytesIO()
    PIL.Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(buffer, "JPEG")
    return buffer.getvalue()


MUXSPACE_LABELS = {
    "anger": "angry",
    "disgust": "disgust",
    "fear": "fear",
    "happiness": "happy",
    "neutral": "neutral",
    "sadness": "sad",
    "surprise": "surprise",
}

_EMOTION_MAP = """\
source_label,source,face_class
anxiety,esconv,fear
depression,esconv,sad
sadness,esconv,sad
anger,esconv,angry
fear,esconv,fear
shame,esconv,sad
disgust,esconv,disgust
nervousness,esconv,fear
pain,esconv,sad
guilt,esconv,sad
jealousy,esconv,angry
neutral,mesc,neutral
depression,mesc,sad
anger,mesc,angry
disgust,mesc,disgust
joy,mesc,happy
sadness,mesc,sad
fear,mesc,fear
no emotion,dailydialog,neutral
surprise,dailydialog,surprise
"""


def write_faces(folder: Path, *, train: int = 4, valid: int = 2, muxspace: int = 2) -> Path:
    """Write both packs, with so many photos of each class, and one photo of contempt."""
    folder.mkdir(parents=True, exist_ok=True)
    fer = [
        (f"fer2013/{split}/{name}/{split}_{number:03}.jpg", split, name, jpeg(48, name, number))
        for split, first, count in (("train", 0, train), ("valid", 100, valid))
        for name in FACE_CLASSES
        for number in range(first, first + count)
    ]
    mux = [
        (f"mux/{number:05}.jpg", "train", label, jpeg(112, MUXSPACE_LABELS[label], number))
        for number, label in enumerate(sorted(MUXSPACE_LABELS) * muxspace, start=1)
    ]
    mux.append(("mux/99999.jpg", "train", "contempt", jpeg(112, "angry", 99)))
    _write_pack(folder, "fer2013_48.tar.gz", "fer2013_labels.csv", 48, fer)
    _write_pack(folder, "muxspace_112.tar.gz", "muxspace_labels.csv", 112, mux)
    mapping = "".join(f"{label},muxspace,{name}\n" for label, name in MUXSPACE_LABELS.items())
    (folder / "emotion_map.csv").write_text(_EMOTION_MAP + mapping, encoding="utf-8")
    return folder


def _write_pack(
    folder: Path, pack: str, labels: str, side: int, photos: Sequence[tuple[str, str, str, bytes]]
) -> None:
    with tarfile.open(folder / pack, "w:gz") as archive:
        for name, _, _, data in photos:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    with (folder / labels).open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("file", "split", "label", "width", "height", "mode"))
        writer.writerows((name, split, label, side, side, "L") for name, split, label, _ in photos)


def write_corpora(folder: Path) -> Path:
    """Write all of them under the names that the shipped configs use."""
    for split, count, first in (("train", 12, 0), ("valid", 8, 20), ("test", 8, 40)):
        write_esconv(folder / "esconv" / f"{split}.txt.gz", esconv_rows(count, first=first))
    english = folder / "english"
    write_blocks(english / "commonsense_dialogues.txt.gz", _talks("Robin lost the keys again."))
    for name in ("dailydialog", "self_dialogue"):
        write_blocks(english / f"{name}.txt.gz", _talks())
    write_blocks(english / "dream.txt.gz", (talk.replace("B: ", "W: ") for talk in _talks()))
    for name in ("grimm_tales", "stories_llm_child", "debates_llm"):
        write_blocks(english / f"{name}.txt.gz", _tales())
    write_counselchat(
        folder / "counselchat" / "20200325_counsel_chat.csv.gz",
        (
            {
                "questionTitle": f"How can I rest, part {number}?",
                "questionText": f"I have not slept well for {number + 2} nights.\n   What now?",
                "answerText": "<p>Rest comes slowly.</p><p>Write the thought down, then let it be.",
                "upvotes": "1",
                "split": "train" if number % 3 else "val",
            }
            for number in range(12)
        ),
    )
    write_faces(folder / "faces")
    return folder


def _talks(scene: str = "") -> list[str]:
    places = ("the park", "the market", "the station", "the library", "the old mill", "the lake")
    return [
        (f"{scene}\n" if scene else "")
        + f"A: Shall we walk to {place} before it rains?\n"
        + f"B: Gladly. I have not seen {place} since the spring.\n"
        + "A: Then bring a coat, the wind is cold today.\n"
        + "B: I will. Thank you for asking me along."
        for place in places
    ]


def _tales() -> list[str]:
    animals = ("fox", "heron", "mouse", "owl", "hare", "otter")
    return [
        f"There was once a {animal} who counted the stars.\n\nEach night it lost count, and each "
        f"night it began again.\nIn the end the {animal} was content to look."
        for animal in animals
    ]


def _write_gz(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt", encoding="utf-8", newline="") as file:
        file.write(text)
    return path
