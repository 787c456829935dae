"""The time study: what each way reads is counted rightly, and all ways come to the same verdicts."""

import pytest

from compeer_core.errors import ConfigError
from compeer_core.model_pool import ModelPool, load_label_scorer
from compeer_core.registry import Registry
from compeer_core.unifireward import Judge
from training.benchmark import judging
from training.benchmark.judging import Config, compare, measure, round_of, ways_to_judge
from training.common import results


@pytest.fixture(scope="module")
def scorers(tmp_path_factory):
    from tests.checkpoints import build_adapter, build_qwen

    folder = tmp_path_factory.mktemp("judges")
    base = build_qwen(folder / "base", max_position_embeddings=4096)
    pool = ModelPool()
    made = [
        load_label_scorer(
            str(base), adapter=build_adapter(base, folder / name, seed=seed), pool=pool
        )
        for seed, name in enumerate(("unified", "process", "outcome"), start=1)
    ]
    yield made
    for scorer in made:
        scorer.close()


CONFIG = Config(group_sizes=(1, 2), histories=(2, 3), base_group=2, base_history=3, repeats=1)


def test_what_is_read_by_each_way_is_counted(scorers, one_thread):
    unified, process, outcome = scorers
    ways = ways_to_judge(unified, (process, outcome))

    found = measure(ways, 2, 3, CONFIG)

    messages, held = round_of(CONFIG, 2, 3, 1)
    # Naive: three steps and the reply in two orders, each from the beginning, for both candidates.
    naive = found["UnifiReward, naive"]
    assert naive.passes == [10]
    # Asked apart, no question stands behind the others: fewer tokens, as many passes.
    assert found["PRM + ORM, naive"].passes == [10]
    assert found["PRM + ORM, naive"].tokens[0] < naive.tokens[0]
    history = len(unified.chat.encode(list(messages), reply=False).ids)
    ours = found["UnifiReward, ours"]
    assert 2 <= ours.passes[0] <= 5
    # A random judge surprises often, and is read again behind each surprise.
    assert history < ours.tokens[0] < 0.75 * naive.tokens[0]
    # Two models both read the history.
    assert found["PRM + ORM, ours"].passes == [4]
    assert found["PRM + ORM, ours"].tokens[0] > 2 * history
    sessions = found["UnifiReward, sessions"]
    assert sessions.passes == [12]
    assert history * 2 < sessions.tokens[0] < naive.tokens[0]
    assert all(len(one.seconds) == 1 and one.seconds[0] > 0 for one in found.values())
    assert len(held) == 2


def test_all_ways_come_to_the_same_verdicts(scorers, one_thread):
    unified, process, outcome = scorers
    ways = ways_to_judge(unified, (process, outcome))

    difference = compare(ways, (round_of(CONFIG, 2, None, number) for number in range(5)))

    assert difference.verdicts == 5 * 2 * 5
    assert difference.unequal == 0
    assert difference.largest < 1e-4
    messages, held = round_of(CONFIG, 2, 3, 0)
    answers = {way.name: way.judge(messages, held) for way in ways}
    for one, other in zip(answers["PRM + ORM, naive"], answers["PRM + ORM, ours"], strict=True):
        for a, b in zip((*one.chain, *one.ends), (*other.chain, *other.ends), strict=True):
            assert a == pytest.approx(b, abs=1e-5)


def test_rounds_have_the_length_asked_for_and_are_drawn_by_the_seed():
    messages, held = round_of(CONFIG, 3, 4, 7)

    # A judged turn follows a seeker, so an even number of utterances gets one more.
    assert messages[-1].text.count("Seeker: ") == 3
    assert messages[-1].text.count("Supporter: ") == 2
    assert len(held) == 3
    assert round_of(CONFIG, 3, 4, 7) == (messages, held)
    assert round_of(CONFIG, 3, 4, 8) != (messages, held)


def test_the_stage_writes_its_results(scorers, one_thread, tmp_path, monkeypatch):
    judges = {
        "": Judge("u", scorers[0]),
        "lone": Judge("u", scorers[0]),
        "pair": Judge("p", scorers[1], reply_scorer=scorers[2]),
    }

    class Models:
        def judge(self, name):
            return judges[name]

        def default_name(self, kind):
            return f"default {kind}"

    monkeypatch.setattr(Registry, "from_toml", lambda *_, **__: Models())
    config = CONFIG.model_copy(
        update={"pair": "pair", "equality_rounds": 2, "output": tmp_path, "name": "judging_test"}
    )

    judging.run(config)

    result = results.load(tmp_path / "judging_test.json")
    assert result.model == "default judge, pair"
    abouts = dict.fromkeys(metric.about for metric in result.metrics)
    assert list(abouts) == [
        "1 candidates, 3 utterances",
        "2 candidates, 3 utterances",
        "2 candidates, 2 utterances",
        "ours against naive",
    ]
    [unequal] = [metric for metric in result.metrics if metric.name == "unequal verdicts"]
    assert (unequal.value, unequal.n) == (0, 2 * 2 * 5)
    with pytest.raises(ConfigError, match="not a PRM and an ORM"):
        judging.run(config.model_copy(update={"judge": "", "pair": "lone"}), dry_run=True)
