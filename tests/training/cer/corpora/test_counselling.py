"""ESCoT, MESC and the Chinese corpora: their layouts, and their public files."""

import io
import json
import tarfile
from pathlib import Path

import pytest

from compeer_core.dialogue import Speaker
from compeer_core.taxonomy import Emotion, Strategy
from tests.training.cer.corpora.corpus_files import load, write_csv, write_json
from training.cer.records import Reason, SourceDialogue

# --- ESCoT ---------------------------------------------------------------------------------------

FULL = {
    "id": 12,
    "original_data": {
        "dialog": [
            {"speaker": "supporter", "content": "Welcome."},
            {"speaker": "seeker", "content": "I moved, and I know nobody here."},
        ],
        "strategy": "Specify",
        "response": "Where did you move to?",
    },
    "cot_data": {
        "emotion": "The seeker feels lonely.",
        "emotion_stimuli": "A move.",
        "individual_appraisal": "The seeker thinks that nobody cares.",
        "recognized_strategy": "Specify",
        "strategy_reason": "To learn more.",
    },
}
CHAIN = {
    "instruction": "Generate the response.",
    "input": "supporter: Welcome.\nseeker: I moved,\nand I know nobody here.",
    "output": "Emotion:\nLonely.\nStrategy Reason:\nTo learn more.\nResponse:\nWhere to?",
    "dialog_id": 12,
}


def test_escot_keeps_the_chain_with_the_reply(tmp_path):
    (dialogue,), _ = load("escot", write_json(tmp_path / "val.json", [FULL]))

    reply = dialogue.utterances[-1]
    assert reply.text == "Where did you move to?"
    assert reply.strategy is Strategy.QUESTION
    assert reply.labels["individual_appraisal"] == "The seeker thinks that nobody cares."
    assert "recognized_strategy" not in reply.labels


def test_both_layouts_of_escot_share_the_source(tmp_path):
    (full,), _ = load("escot", write_json(tmp_path / "val.json", [FULL]))
    (chain,), dropped = load("escot_chain", write_json(tmp_path / "chain.json", [CHAIN]))

    assert chain.source_id == full.source_id
    assert chain.id != full.id
    assert [said.text for said in chain.utterances] == [
        "Welcome.",
        "I moved,\nand I know nobody here.",
        "Where to?",
    ]
    assert chain.utterances[-1].labels == {
        "emotion": "Lonely.",
        "strategy_reason": "To learn more.",
    }
    assert not dropped.reasons


# --- MESC ----------------------------------------------------------------------------------------

MESC_COLUMNS = (
    "Utterance,Speaker,Emotion,Strategy,Dialogue_ID,Utterance_ID,Season,Episode,StartTime,EndTime"
)
SCENE = (
    ("I slept badly.", "Client", "depression", "undefined"),
    ("Since when?", "Therapist", "neutral", "open question"),
)


def write_scenes(path: Path, *ids: int) -> Path:
    rows = [
        (*utterance, identifier, number, 1, 2, "00:00:01,5", "00:00:02,5")
        for identifier in ids
        for number, utterance in enumerate(SCENE)
    ]
    return write_csv(path, MESC_COLUMNS.split(","), *rows)


def letters(dialogue: SourceDialogue) -> str:
    words = "".join(said.text for said in dialogue.utterances)
    return "".join(filter(str.isalnum, words.lower()))


def mesc_json(caption: str) -> list[object]:
    dialog = [
        {"text": f"I slept badly.{caption}", "speaker": "user", "emotion": "depression"},
        {"text": "Since when?", "speaker": "sys", "emotion": "neutral", "strategy": "Approval"},
    ]
    return [{"problem_type": "Sleep  Problems ", "situation": "Nights.", "dialog": dialog}]


def test_mesc_scenes_have_emotions_strategies_and_times(tmp_path):
    (scene, other), dropped = load("mesc_csv", write_scenes(tmp_path / "MESC.csv.gz", 0, 7))

    assert [said.emotion for said in scene.utterances] == [Emotion.DEPRESSION, Emotion.NEUTRAL]
    assert [said.strategy for said in scene.utterances] == [None, Strategy.QUESTION]
    assert scene.utterances[0].labels["StartTime"] == "00:00:01,5"
    assert other.labels == {"Dialogue_ID": "7"}
    assert not dropped.reasons


@pytest.mark.parametrize(
    "caption",
    [
        "The speaker seems to be calm.The speaker's emotional expression is hard to tell.",
        "The speaker's emotion state is not mentioned.",
        "The emotion state of the speaker in the video is calm.\nHe reads.",
    ],
)
def test_captions_are_split_off_and_the_source_stays(tmp_path, caption):
    ((scene,), _) = load("mesc_csv", write_scenes(tmp_path / "MESC.csv.gz", 3))
    path = write_json(tmp_path / "test.json", mesc_json(f" {caption}"))

    ((dialogue,), _) = load("mesc_json", path)

    assert dialogue.utterances[0].text == "I slept badly."
    assert dialogue.utterances[0].caption == caption
    assert dialogue.utterances[1].caption is None
    assert dialogue.source_id == scene.source_id
    assert dialogue.problem == "sleep problems"


def test_the_public_files_of_mesc_are_read_whole_and_agree(corpora):
    scenes, dropped = load("mesc_csv", corpora / "mesc" / "MESC.csv.gz")
    clean = {(scene.source_id, letters(scene)) for scene in scenes}

    assert len(scenes) == 999
    assert len({scene.source_id for scene in scenes}) == 998  # two scenes open alike
    assert sum(len(scene.utterances) for scene in scenes) == 28_189
    assert not dropped.reasons
    for file, count in (("val.json.gz", 102), ("test.json.gz", 82)):
        read, dropped = load("mesc_json", corpora / "mesc" / file)
        assert len(read) == count
        assert not dropped.reasons
        for dialogue in read:
            assert (dialogue.source_id, letters(dialogue)) in clean


# --- Chinese -------------------------------------------------------------------------------------


def pack(path: Path, files: dict[str, str]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
    return path


SMILE = [
    {
        "role": "client",
        "content": "我睡不好。",
        "annotation": [{"sentence": "我睡不好。", "label": ""}],
    },
    {"role": "counselor", "content": "多久了？", "annotation": []},
]


def test_smile_is_read_from_an_archive_and_from_a_folder(tmp_path):
    text = json.dumps(SMILE)
    path = pack(tmp_path / "slice.tar.gz", {"data/2.json": text, "data/3.json": "[{", "a.md": "-"})
    (tmp_path / "folder" / "data").mkdir(parents=True)
    (tmp_path / "folder" / "data" / "2.json").write_text(text, encoding="utf-8")

    packed, dropped = load("smile", path)
    unpacked, _ = load("smile", tmp_path / "folder")

    assert packed == unpacked
    assert dropped.reasons == {Reason.NOT_JSON: 1}
    (dialogue,) = packed
    assert (dialogue.source_id, dialogue.language) == ("smile/data/2", "zh")
    assert [said.speaker for said in dialogue.utterances] == [Speaker.SEEKER, Speaker.SUPPORTER]


def test_both_sets_of_cpsycoun_are_distinguished_by_their_speakers(tmp_path):
    talk = "来访者：你好。\r\n我很累。\r\n\r\n心理咨询师：我在听。\r\n"
    lines = json.dumps(["求助者：我很累。", "支持者：多久了？"])

    (d,), _ = load("cpsycoun_d", pack(tmp_path / "D.tar.gz", {"D/case_1.txt": talk}))
    (e,), _ = load("cpsycoun_e", pack(tmp_path / "E.tar.gz", {"E/Career/1.json": lines}))

    assert [said.text for said in d.utterances] == ["你好。\r\n我很累。", "我在听。"]
    assert [said.speaker for said in e.utterances] == [Speaker.SEEKER, Speaker.SUPPORTER]
    assert e.labels == {"topic": "Career"}


def test_soulchat_is_read_by_its_published_layout(tmp_path):
    messages = [{"role": "user", "content": "我很累。"}, {"role": "assistant", "content": "嗯。"}]
    rows = [{"id": 0, "topic": "家庭", "messages": messages}, {"id": 1}]

    (dialogue,), dropped = load("soulchat", write_json(tmp_path / "SoulChat.json", rows))

    assert dialogue.labels == {"topic": "家庭"}
    assert len(dialogue.utterances) == 2
    assert dropped.reasons == {Reason.ANOTHER_LAYOUT: 1}
