import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compeer_core.cer import DecidedBy
from compeer_core.dialogue import Speaker
from compeer_core.errors import ConfigError
from tests.training.cer.personality.personality_rows import rows, written
from training.cer.personality import clusters, traits
from training.cer.personality.clusters import (
    Cast,
    ClusteredPersona,
    Elbow,
    Grouping,
    Settings,
    cluster,
    elbow,
    encoder_for,
    fit,
)
from training.cer.personality.traits import Disc, Persona
from training.data.records import read_records


def persona(name, *, source=None, speaker=Speaker.SEEKER, d=0.5, language="en"):
    return Persona(
        id=name,
        corpus="toy",
        dialogue_id=name,
        source_id=source or name,
        language=language,
        speaker=speaker,
        scores=Disc(d=d, i=0.5, s=0.5, c=0.5),
        description=f"Speaks like {name}.",
        described_by=DecidedBy(kind="rule", name="test"),
    )


def cast(**clusters):
    return Cast(
        ClusteredPersona(persona=one, cluster=name)
        for name, group in clusters.items()
        for one in group
    )


# --- The elbow --------------------------------------------------------------------------------


def test_without_a_knee_the_point_farthest_below_the_chord_is_taken(monkeypatch):
    monkeypatch.setattr(clusters, "_SENSITIVITY", 5)
    # Kneedle needs the curve to rise again, relative to the chord, by more than S / (n - 1).
    # The chord of 10, 4, 0 has 5 in its middle, 4 lies below it by 1; S = 5 is out of reach.
    assert elbow([2, 3, 4], [10, 4, 0]) == Elbow(3, "farthest from the chord")


def test_a_straight_or_flat_or_short_curve_takes_the_smallest(monkeypatch):
    monkeypatch.setattr(clusters, "_SENSITIVITY", 5)
    assert elbow([2, 3, 4], [9, 6, 3]) == Elbow(2, "smallest")
    assert elbow([2, 3, 4], [0, 0, 0]) == Elbow(2, "smallest")
    assert elbow([2, 3], [9, 1]) == Elbow(2, "smallest")


def test_three_clusters_are_recovered_and_numbered_by_size():
    rng = np.random.default_rng(0)
    centres = np.repeat([[0.0, 0.0], [0.0, 9.0], [9.0, 0.0]], [10, 30, 20], axis=0)
    fitted = fit(centres + rng.normal(0, 0.2, centres.shape), Settings(k_min=1, k_max=8), seed=1)
    assert (fitted.k, fitted.chosen_by) == (3, "kneedle")
    assert fitted.centres.round().tolist() == [[0, 9], [9, 0], [0, 0]]
    assert fitted.assign(np.array([[8.0, 1.0], [1.0, 1.0]])).tolist() == [1, 2]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_fewer_different_vectors_than_clusters_are_no_error(count):
    vectors = np.repeat(np.eye(3)[:count], 5, axis=0)
    assert 1 <= fit(vectors, Settings(), seed=0).k <= count


# --- Embedding --------------------------------------------------------------------------------


def test_tfidf_gives_rows_of_length_one_and_the_same_text_the_same_row():
    encoder = encoder_for("tfidf", "en")
    encoder.fit(["lively and warm", "careful and exact", "warm and careful", "direct"])
    vectors = encoder.encode(["lively and warm", "direct", "lively and warm"])
    assert np.linalg.norm(vectors, axis=1) == pytest.approx([1, 1, 1])
    assert (vectors[0] == vectors[2]).all()


def test_a_missing_encoder_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match="cannot be loaded"):
        encoder_for(str(tmp_path / "none"), "en")


# --- The step ---------------------------------------------------------------------------------


def grouped(folder, seed=0):
    traits.describe(written(folder, rows(24)), folder / "p.jsonl")
    return cluster(folder / "p.jsonl", folder / "clusters", Settings(k_max=6), seed=seed)


@pytest.mark.usefixtures("drawn_plots")
def test_all_personas_are_assigned_and_the_sizes_add_up(tmp_path):
    report = grouped(tmp_path)
    groupings = [
        Grouping.model_validate(row)
        for row in json.loads((tmp_path / "clusters/clusters.json").read_text(encoding="utf-8"))
    ]
    people = list(read_records(tmp_path / "clusters/personas.jsonl", ClusteredPersona))
    assert report.written == len(people) == 40
    for grouping in groupings:
        role = f"{grouping.speaker}.{grouping.language}"
        mine = [p.cluster for p in people if p.persona.speaker is grouping.speaker]
        assert grouping.fitted == 20  # of 24 dialogues, 4 are for testing
        clusters = [f"{role}.{number}" for number in range(grouping.k)]
        assert [mine.count(name) for name in clusters] == list(grouping.sizes)
        assert report.figures[f"k.{role}"] == grouping.k
        assert (tmp_path / f"clusters/elbow.{role}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("drawn_plots")
def test_a_second_run_writes_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        grouped(tmp_path / name)
    first, second = (
        {p.name: p.read_bytes() for p in (tmp_path / n / "clusters").iterdir()} for n in "ab"
    )
    assert first == second


# --- Drawing ----------------------------------------------------------------------------------


@given(st.integers(0, 10_000))
def test_a_speaker_never_gets_a_persona_of_the_same_dialogue(seed):
    # b is another window of a's dialogue.
    people = cast(x=[persona("a"), persona("b", source="a"), persona("c"), persona("d")])
    drawn = people.draw("a", np.random.default_rng(seed))
    assert drawn is not None
    assert drawn.persona.id in {"c", "d"}
    assert drawn.from_cluster


def test_the_other_personas_of_a_cluster_are_drawn_uniformly():
    people = cast(x=[persona(name) for name in "abcd"], y=[persona("e")])
    ids = [people.draw("a", np.random.default_rng(seed)).persona.id for seed in range(900)]
    counts = [ids.count(name) for name in "abcde"]
    assert counts[0] == counts[4] == 0
    assert min(counts[1:4]) > 250  # 300 each, standard deviation 14


def test_a_single_persona_in_a_cluster_gets_the_nearest_of_its_role():
    people = cast(
        x=[persona("a", d=0.5)],
        y=[
            persona("b", d=0.9),
            persona("c", d=0.6),
            persona("d", d=0.5, speaker=Speaker.SUPPORTER),
        ],
        z=[persona("e", d=0.5, language="zh")],
    )
    drawn = people.draw("a", np.random.default_rng(0))
    assert drawn is not None
    assert (drawn.persona.id, drawn.from_cluster) == ("c", False)


def test_without_another_persona_none_is_drawn():
    people = cast(x=[persona("a"), persona("b", source="a")])
    assert people.draw("a", np.random.default_rng(0)) is None
    assert people.draw("unknown", np.random.default_rng(0)) is None
