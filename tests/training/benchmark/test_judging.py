"""The judging benchmark: correct counts, and equal verdicts from all methods."""

import pytest

from compeer_core.errors import ConfigError
from compeer_core.model_pool import ModelPool, load_label_scorer
from compeer_core.registry import Registry
from compeer_core.unifireward import Judge
from training.benchmark import judging
from training.benchmark.judging import Config, compare, judging_methods, measure, synthetic_round
from training.common import results


@pytest.fixture(scope="module")
def scorers(tmp_path_factory):
    from tests.checkpoints import build_adapter, build_qwen

    folder = tmp_path_factory.mktemp("judges")
    base = build_qwen(folder / "base", max_position_embeddings=4096)
    pool = ModelPool()
    scorers = [
        load_label_scorer(
            str(base), adapter=build_adapter(base, folder / name, seed=seed), pool=pool
        )
        for seed, name in enumerate(("unified", "process", "outcome"), start=1)
    ]
    yield scorers
    for scorer in scorers:
        scorer.close()


CONFIG = Config(group_sizes=(1, 2), histories=(2, 3), base_group=2, base_history=3, repeats=1)


def test_counts_passes_and_tokens_of_each_method(scorers, one_thread):
    unified, process, outcome = scorers
    methods = judging_methods(unified, (process, outcome))

    costs = measure(methods, 2, 3, CONFIG)

    messages, interviews = synthetic_round(CONFIG, 2, 3, 1)
    # Naive: three steps and the reply in two orders, each from the beginning, for two candidates.
    naive = costs["UnifiReward, naive"]
    assert naive.passes == [10]
    # PRM + ORM: questions are independent, so prompts are shorter, with as many passes.
    assert costs["PRM + ORM, naive"].passes == [10]
    assert costs["PRM + ORM, naive"].tokens[0] < naive.tokens[0]
    history = len(unified.chat.encode(list(messages), reply=False).ids)
    ours = costs["UnifiReward, ours"]
    assert 2 <= ours.passes[0] <= 5
    # A random judge often rejects drafts, which costs another pass.
    assert history < ours.tokens[0] < 0.75 * naive.tokens[0]
    # Both models process the history.
    assert costs["PRM + ORM, ours"].passes == [4]
    assert costs["PRM + ORM, ours"].tokens[0] > 2 * history
    sessions = costs["UnifiReward, sessions"]
    assert sessions.passes == [12]
    assert history * 2 < sessions.tokens[0] < naive.tokens[0]
    assert all(len(cost.seconds) == 1 and cost.seconds[0] > 0 for cost in costs.values())
    assert len(interviews) == 2


def test_all_methods_give_the_same_verdicts(scorers, one_thread):
    unified, process, outcome = scorers
    methods = judging_methods(unified, (process, outcome))

    difference = compare(methods, (synthetic_round(CONFIG, 2, None, number) for number in range(5)))

    assert difference.verdicts == 5 * 2 * 5
    assert difference.unequal == 0
    assert difference.largest < 1e-4
    messages, interviews = synthetic_round(CONFIG, 2, 3, 0)
    answers = {method.name: method.judge(messages, interviews) for method in methods}
    for naive, ours in zip(answers["PRM + ORM, naive"], answers["PRM + ORM, ours"], strict=True):
        for a, b in zip((*naive.chain, *naive.ends), (*ours.chain, *ours.ends), strict=True):
            assert a == pytest.approx(b, abs=1e-5)


def test_rounds_have_the_requested_length_and_depend_on_the_seed():
    messages, interviews = synthetic_round(CONFIG, 3, 4, 7)

    # A judged turn follows a seeker, so an even length is increased by one.
    assert messages[-1].text.count("Seeker: ") == 3
    assert messages[-1].text.count("Supporter: ") == 2
    assert len(interviews) == 3
    assert synthetic_round(CONFIG, 3, 4, 7) == (messages, interviews)
    assert synthetic_round(CONFIG, 3, 4, 8) != (messages, interviews)


def test_stage_writes_its_results(scorers, one_thread, tmp_path, monkeypatch):
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
    with pytest.raises(ConfigError, match="not a local PRM with an ORM"):
        judging.run(config.model_copy(update={"judge": "", "pair": "lone"}), dry_run=True)
