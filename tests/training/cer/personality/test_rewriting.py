import json
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compeer_core.cer import CerRecord, Variant
from compeer_core.reasoning import read
from tests.training.cer.fake_asker import FakeAsker
from tests.training.cer.personality.personality_rows import (
    NUMBERED,
    rewriter,
    row,
    rows,
    written,
)
from training.cer.personality import clusters, traits
from training.cer.personality.clusters import ClusteredPersona
from training.cer.personality.rewriting import (
    VARIANTS,
    DroppedRow,
    check_rewriting,
    check_verdict,
    pieces,
    rewrite,
    with_texts,
)
from training.data.records import read_records


def expanded(folder, records, asker=None, checker=None, seed=0):
    source = written(folder, records)
    traits.describe(source, folder / "p.jsonl")
    clusters.cluster(folder / "p.jsonl", folder / "clusters", clusters.Settings(k_max=4), seed=seed)
    personas = folder / "clusters" / "personas.jsonl"
    report = rewrite(source, personas, folder / "out", asker, checker, seed=seed)
    variants = {
        variant: list(read_records(folder / "out" / f"{variant}.jsonl", CerRecord))
        for variant in VARIANTS
    }
    return report, variants


def dropped(folder):
    return list(read_records(folder / "out" / "dropped.jsonl", DroppedRow))


# --- One row ----------------------------------------------------------------------------------


def test_only_utterances_and_replies_change():
    before = row("a", ["Hi.", "Hello.", "I'm sad."])
    texts = [piece.text.upper() for piece in pieces(before)]
    after = with_texts(before, texts, Variant.PERSONA, "somebody")
    assert [one.text for one in after.case.history] == ["HI.", "HELLO.", "I'M SAD."]
    assert after.first.reply == after.case.original == texts[3]
    assert after.second is not None
    assert after.second.reply == texts[4]
    assert read(after.second.turn or "").reply == texts[4]
    assert read(after.second.turn or "").history == read(before.second.turn or "").history
    assert (after.id, after.rewritten_from) == ("a#0~persona", "a#0")
    assert (after.variant, after.persona) == (Variant.PERSONA, "somebody")
    kept = {"preference", "preference_by"}
    assert after.model_dump(include=kept) == before.model_dump(include=kept)
    assert after.second.steps == before.second.steps


def test_a_turn_with_another_reply_stays_unchanged():
    before = row("a", ["Hi."])
    second = before.second.model_copy(update={"turn": "no tags at all"})
    after = with_texts(
        before.model_copy(update={"second": second}), ["A", "B", "C"], Variant.REWRITE
    )
    assert after.second.turn == "no tags at all"
    assert after.second.reply == "C"


# --- By rule ----------------------------------------------------------------------------------


def test_the_three_variants_hold_the_same_rows(tmp_path):
    report, variants = expanded(tmp_path, rows(24))
    ids = [[one.rewritten_from for one in variants[variant]] for variant in VARIANTS]
    assert ids[0] == ids[1] == ids[2]
    assert (
        len(ids[0]) + len(dropped(tmp_path)) == report.read == 40
    )  # 20 training dialogues, 2 each
    assert report.written == 3 * len(ids[0])
    for variant, records in variants.items():
        assert {one.variant for one in records} == {variant}
        assert all(one.case.split == "train" for one in records)
        assert report.figures[f"rows.{variant}"] == len(records)


def test_duplicates_are_unchanged_and_rewritten_rows_are_not(tmp_path):
    report, variants = expanded(tmp_path, rows(24))
    originals = {one.id: one for one in rows(24)}
    for one in variants[Variant.DUPLICATE]:
        assert pieces(one) == pieces(originals[one.rewritten_from])
        assert one.persona is None
    assert report.figures["share_of_changed_tokens.duplicate"] == 0
    assert report.figures["share_of_changed_tokens.rewrite"] > 0.05
    assert report.figures["share_of_changed_tokens.persona"] > 0.02
    for name in ("duplicate", "rewrite", "persona"):
        assert 0 < report.figures[f"distinct_2.{name}"] <= 1


def test_a_persona_is_another_speaker_of_the_same_cluster(tmp_path):
    _, variants = expanded(tmp_path, rows(24))
    people = {
        one.persona.id: one
        for one in read_records(tmp_path / "clusters/personas.jsonl", ClusteredPersona)
    }
    sizes = Counter(one.cluster for one in people.values())
    for record in variants[Variant.PERSONA]:
        for name in record.persona.split(" + "):
            drawn = people[name]
            own = people[f"toy/{record.case.dialogue_id}/{drawn.persona.speaker}"]
            assert drawn.persona.id != own.persona.id
            assert drawn.cluster == own.cluster or sizes[own.cluster] == 1


def test_an_utterance_reads_the_same_in_every_row_of_its_dialogue(tmp_path):
    _, variants = expanded(tmp_path, rows(24))
    for variant in VARIANTS:
        first = {}
        for one in variants[variant]:
            text = one.case.history[0].text
            assert first.setdefault(one.case.dialogue_id, text) == text


def test_a_second_run_writes_the_same_bytes_and_another_seed_others(tmp_path):
    result = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        (tmp_path / name).mkdir()
        expanded(tmp_path / name, rows(24), seed=seed)
        out = tmp_path / name / "out"
        result.append({path.name: path.read_bytes() for path in sorted(out.iterdir())})
    assert result[0] == result[1]
    assert result[0]["persona.jsonl"] != result[2]["persona.jsonl"]
    assert set(result[0]) == {f"{v}.jsonl" for v in (*VARIANTS, "dropped")}


def test_rows_of_other_splits_and_variants_are_skipped(tmp_path):
    records = rows(12)
    repeated = with_texts(records[0], [p.text for p in pieces(records[0])], Variant.DUPLICATE)
    report, _ = expanded(tmp_path, [*records, repeated])
    assert report.read == 20


def test_a_speaker_without_another_persona_is_in_no_variant(tmp_path):
    report, variants = expanded(
        tmp_path, [*rows(8), row("z", ["我很累。"], "休息吧。", "为什么？", language="zh")]
    )
    assert report.dropped == {"toy": {"persona: no other persona available": 1}}
    assert all(one.case.dialogue_id != "z" for one in variants[Variant.DUPLICATE])
    assert [one.id for one in dropped(tmp_path)] == ["z#0"]


@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(
        st.sampled_from(
            ["I don't know 2 of them.", "Why?", "Oh!!!", "", "It's late, and I am sad."]
        ),
        min_size=9,
        max_size=15,
    )
)
def test_all_variants_have_equally_many_rows_for_any_text(tmp_path_factory, texts):
    folder = tmp_path_factory.mktemp("rows")
    records = [row(f"d{i}", texts[i : i + 3]) for i in range(len(texts) - 2)]
    report, variants = expanded(folder, records)
    assert {len(result) for result in variants.values()} == {report.written // 3}
    assert report.written // 3 + report.dropped_count == report.read == len(records)


# --- By a generator ---------------------------------------------------------------------------


def test_a_generator_rewrites_with_and_without_a_persona(tmp_path):
    seen = []

    def answer(message):
        seen.append(message)
        return rewriter(lambda text: text.replace("I ", "I really "))(message)

    asker = FakeAsker(answer)
    report, variants = expanded(tmp_path, rows(8), asker)
    assert report.figures["by"] == "fake"
    free = [one for one in seen if "of your own choice" in one]
    told = [one for one in seen if "The seeker's manner: Speaks" in one]
    assert len(free) == len(told) == len(seen) / 2 == len(variants[Variant.REWRITE])
    assert len(set(asker.keys)) == len(asker.keys)


def test_what_a_generator_gets_wrong_is_dropped_from_all_variants_and_counted(tmp_path):
    def answer(message):
        texts = [json.loads(text) for text in NUMBERED.findall(message)]
        if "about number 1" in message:
            return '{"utterances": ["half'
        if "about number 2" in message:
            texts[-1] = "Sure, here is the rewritten question: what's going on at work right now?"
        if "about number 3" in message:
            texts[2] = texts[2].replace("3", "4")
        if "about number 4" in message:
            texts = [*texts, "one more"]
        return json.dumps({"utterances": texts})

    report, variants = expanded(tmp_path, rows(6), FakeAsker(answer))
    assert report.dropped == {
        "toy": {
            "rewrite: no usable rewriting": 2,
            "rewrite: numbers changed": 1,
            "rewrite: LLM artifact": 1,
        }
    }
    left = [one.rewritten_from for one in variants[Variant.DUPLICATE]]
    assert left == [one.rewritten_from for one in variants[Variant.PERSONA]]
    assert sorted({"d1#1", "d2#1", "d3#1", "d4#1"}.intersection(left)) == []


def test_a_generator_cannot_write_a_tag_into_a_turn(tmp_path):
    forge = rewriter(lambda text: f"{text} </reply>")
    _, variants = expanded(tmp_path, rows(6), FakeAsker(forge))
    assert len(variants[Variant.REWRITE]) > 4
    for one in variants[Variant.REWRITE]:
        assert read(one.second.turn).is_complete
        assert one.second.reply.endswith("‹/reply›")


def test_the_checker_can_drop_rows(tmp_path):
    def judge(message):
        is_bad = "about number 1" in message
        return json.dumps({"meaning": [], "strategy": [1] if is_bad else [], "artefact": []})

    checker = FakeAsker(judge)
    report, variants = expanded(
        tmp_path, rows(6), FakeAsker(rewriter(lambda text: f"{text} Yes.")), checker
    )
    assert report.dropped == {"toy": {"rewrite: strategy changed": 1}}
    assert report.figures["checked_by"] == "fake"
    assert "d1#1" not in {one.rewritten_from for one in variants[Variant.DUPLICATE]}
    assert len(set(checker.keys)) == len(checker.keys)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"utterances": ["Hello there.", "I am sad."]}', None),
        ('{"utterances": ["Hello there."]}', "wrong number of utterances"),
        ('{"utterances": ["Hello there.", " "]}', "an empty utterance"),
        ('{"utterances": ["你好", "我很难过"]}', "wrong language"),
        ('{"utterances": ["Hello', "incomplete JSON"),
        ('{"texts": []}', "no list of utterances"),
    ],
)
def test_a_rewriting_is_whole_and_in_its_language(text, problem):
    assert check_rewriting("rewrite:en:2:persona:a#0", text) == problem


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"meaning": [1], "strategy": [], "artefact": [2]}', None),
        ('{"meaning": [3], "strategy": [], "artefact": []}', "no such pair"),
        ('{"meaning": []}', "unexpected JSON"),
        ("fine", "no JSON"),
    ],
)
def test_a_verdict_names_pairs_that_exist(text, problem):
    assert check_verdict("drift:en:2:persona:0:a#0", text) == problem
