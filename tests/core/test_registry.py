"""models.toml: what it may say, what a page learns of it, and that a model is loaded once."""

import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

import compeer_core.registry
from compeer_core.backends.openai.policy import OpenAIBackend
from compeer_core.backends.openai.scoring import OpenAIScorer
from compeer_core.backends.protocol import Sampling
from compeer_core.backends.scripted import ScriptedBackend
from compeer_core.dialogue import Dialogue
from compeer_core.errors import CheckpointError, ConfigError, UnknownModelError
from compeer_core.policy import Controls, Policy
from compeer_core.registry import (
    ModelEntry,
    Registry,
    Source,
    SourceKind,
    parse_source,
)
from compeer_core.safety import RiskKind, RiskSign, find_risk

SCRIPT = '[[turns]]\ntext = "<reply>Hello.</reply>"\n'
JUDGE = 'answers = ["True", "First"]\n'
MODELS = """
[[models]]
name = "taped"
kind = "policy"
title = "Taped turns"
source = "scripted:turns.toml"
languages = ["en"]
licence = "CC0-1.0"
sampling = { temperature = 0.0, max_new_tokens = 99 }

[[models]]
name = "remote"
kind = "policy"
source = "openai:http://10.1.2.3:8000/v1#org/secret-name"
style = "prompted"
default = true

[[models]]
name = "judge"
kind = "judge"
source = "scripted:judge.toml"
languages = ["de", "zh"]
"""


@pytest.fixture
def models(tmp_path: Path) -> Path:
    (tmp_path / "turns.toml").write_text(SCRIPT, encoding="utf-8")
    (tmp_path / "judge.toml").write_text(JUDGE, encoding="utf-8")
    path = tmp_path / "models.toml"
    path.write_text(MODELS, encoding="utf-8")
    return path


def entry(**settings: Any) -> ModelEntry:
    return ModelEntry(**({"name": "m", "kind": "policy", "source": "folder"} | settings))


# --- sources -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("checkpoints/mine", Source(SourceKind.CHECKPOINT, "checkpoints/mine")),
        ("policy", Source(SourceKind.CHECKPOINT, "policy")),
        ("/a:b/c", Source(SourceKind.CHECKPOINT, "/a:b/c")),
        ("C:\\models\\mine", Source(SourceKind.CHECKPOINT, "C:\\models\\mine")),
        ("hf:Qwen/Qwen2.5-VL-3B", Source(SourceKind.HUB, "Qwen/Qwen2.5-VL-3B")),
        ("scripted:a/b.toml", Source(SourceKind.SCRIPTED, "a/b.toml")),
        (
            "openai:http://host:8000/v1#org/model:tag",
            Source(SourceKind.ENDPOINT, "http://host:8000/v1", "org/model:tag"),
        ),
    ],
)
def test_sources_are_read(text: str, source: Source) -> None:
    assert parse_source(text) == source


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "is empty"),
        ("hf:", "nothing follows 'hf:'"),
        ("openia:http://h/v1#m", "did you mean 'openai:'"),
        ("gguf:model", "known: a folder, hf:NAME, openai:URL#MODEL or scripted:FILE"),
        ("openai:http://h/v1", "write openai:URL#MODEL"),
        ("openai:http://h/v1#", "write openai:URL#MODEL"),
    ],
)
def test_a_wrong_source_says_what_is_wrong(text: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_source(text)
    assert part in str(caught.value)


@settings(deadline=None)
@given(st.text())
def test_any_text_is_a_source_or_a_configuration_error(text: str) -> None:
    try:
        source = parse_source(text)
    except ConfigError:
        return
    assert source.location


# --- the list ------------------------------------------------------------------------------------


def test_a_list_is_read_and_its_models_are_loaded(models: Path) -> None:
    registry = Registry.from_toml(models)
    taped, remote, judge = registry.policy("taped"), registry.policy(), registry.judge()

    assert [entry.name for entry in registry.entries] == ["taped", "remote", "judge"]
    assert isinstance(taped.backend, ScriptedBackend)
    assert taped.sampling == Sampling(temperature=0.0, max_new_tokens=99)
    assert taped.languages == ("en",)
    assert isinstance(remote.backend, OpenAIBackend)
    assert (remote.name, remote.style, remote.backend.name) == (
        "remote",
        "prompted",
        "org/secret-name",
    )
    assert judge is not None
    assert (judge.name, judge.language) == ("judge", "zh")
    assert registry.judge("judge") is judge
    registry.close()


def test_a_loaded_policy_answers(models: Path) -> None:
    policy = Registry.from_toml(models).policy("taped")
    dialogue = Dialogue.from_messages([{"role": "user", "content": "Hi"}])
    *_, last = policy.respond(dialogue, Controls(), threading.Event())

    assert last.reading.reply == "Hello."  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (("licence", "license"), "did you mean 'licence'"),
        (('kind = "judge"', 'kind = "jugde"'), "models.2.kind"),
        (('"judge"\nkind', '"taped"\nkind'), "'taped' more than once"),
        (('kind = "policy"\ntitle', 'kind = "policy"\ndefault = true\ntitle'), "more than one"),
        (("openai:http", "opnai:http"), "did you mean 'openai:'"),
        (('name = "taped"', 'name = "a b"'), "models.0.name"),
        (("temperature = 0.0", "temperature = -1"), "models.0.sampling.temperature"),
        (("temperature = 0.0", "exact_quotations = true"), "exact_quotations needs a checkpoint"),
        (("temperature = 0.0", "fresh_sentences = true"), "fresh_sentences needs a checkpoint"),
        (("[[models]]", "[[model]]"), "did you mean 'models'"),
        (('licence = "CC0-1.0"', 'adapter = "lora"'), "an adapter needs a checkpoint"),
        (('licence = "CC0-1.0"', 'verdicts = "parsed"'), "a judge behind an endpoint"),
        (
            ("scripted:judge.toml", 'scripted:judge.toml"\nverdicts = "logprobs'),
            "behind an endpoint",
        ),
        (("scripted:judge.toml", 'openai:http://h/v1#m"\nverdicts = "spoken'), "models.2.verdicts"),
    ],
)
def test_a_wrong_list_is_named_with_what_is_wrong(
    models: Path, change: tuple[str, str], part: str
) -> None:
    models.write_text(MODELS.replace(*change), encoding="utf-8")

    with pytest.raises(ConfigError) as caught:
        Registry.from_toml(models)
    assert part in str(caught.value)
    assert str(models) in str(caught.value)


def test_an_unknown_name_is_answered_with_the_nearest(models: Path) -> None:
    registry = Registry.from_toml(models)

    with pytest.raises(UnknownModelError, match="did you mean 'taped'") as caught:
        registry.policy("tapd")
    assert caught.value.known == ("taped", "remote")
    with pytest.raises(UnknownModelError):
        registry.policy("judge")  # of the other kind
    with pytest.raises(UnknownModelError):
        registry.judge("taped")


def test_the_default_is_the_one_that_says_so_or_the_first() -> None:
    first, second = entry(name="a"), entry(name="b")

    assert Registry([first, second]).default_name("policy") == "a"
    assert Registry([first, entry(name="c", default=True)]).default_name("policy") == "c"
    assert Registry([first]).default_name("judge") == ""
    assert Registry([first]).judge() is None
    with pytest.raises(UnknownModelError):
        Registry([]).policy()


def test_an_added_default_takes_the_place_of_the_old_one(models: Path) -> None:
    registry = Registry.from_toml(models)
    more = registry.adding(entry(name="new", default=True))

    assert registry.default_name("policy") == "remote"
    assert more.default_name("policy") == "new"
    assert more.default_name("judge") == "judge"
    assert more.adding(entry(name="other")).default_name("policy") == "new"
    with pytest.raises(ConfigError, match="more than once"):
        more.adding(entry(name="new"))


def test_a_page_learns_no_path_and_no_address(models: Path) -> None:
    rows = Registry.from_toml(models).public()

    assert rows[0] == {
        "name": "taped",
        "kind": "policy",
        "title": "Taped turns",
        "languages": ["en"],
        "licence": "CC0-1.0",
        "style": "trained",
        "sees_images": True,
        "source": "scripted",
        "default": False,
    }
    assert [row["default"] for row in rows] == [False, True, True]
    assert rows[1]["title"] == "remote"
    assert not [
        word
        for word in ("10.1.2.3", "secret-name", "turns.toml", str(models.parent))
        if word in str(rows)
    ]


def test_an_entry_knows_its_languages() -> None:
    assert entry().speaks("fr")
    assert entry(languages=("en",)).speaks("und")
    assert not entry(languages=("en",)).speaks("fr")


# --- what is not there ---------------------------------------------------------------------------


def test_what_is_missing_is_named_at_once_and_when_it_is_loaded(models: Path) -> None:
    folder = models.parent
    (folder / "turns.toml").unlink()
    (folder / "base").mkdir()
    registry = (
        Registry.from_toml(models)
        .adding(entry(name="gone", source="no-such-folder", card=Path("CARD.md")))
        .adding(entry(name="half", source="base", adapter=Path("no-such-adapter")))
    )

    with pytest.raises(CheckpointError) as caught:
        registry.check()
    assert str(caught.value).splitlines() == [
        f"model 'taped': there is no file {folder / 'turns.toml'}",
        f"model 'gone': there is no folder {folder / 'no-such-folder'}",
        f"model 'gone': there is no file {folder / 'CARD.md'}",
        f"model 'half': there is no folder {folder / 'no-such-adapter'}",
    ]
    with pytest.raises(CheckpointError, match=r"turns\.toml"):
        registry.policy("taped")
    with pytest.raises(CheckpointError, match="no-such-adapter"):
        registry.policy("half")
    assert registry.judge() is not None


def test_a_list_that_is_whole_passes_the_check(models: Path) -> None:
    Registry.from_toml(models).check()


def test_what_failed_to_load_is_tried_again(models: Path) -> None:
    registry = Registry.from_toml(models)
    script = models.parent / "turns.toml"
    script.write_text("turns = 3", encoding="utf-8")
    with pytest.raises(ConfigError):
        registry.policy("taped")
    script.write_text(SCRIPT, encoding="utf-8")

    assert registry.policy("taped").name == "taped"


def test_a_vocabulary_of_its_own_is_loaded(models: Path) -> None:
    (models.parent / "two.toml").write_text(
        'source = "ours"\n'
        '[[strategies]]\nname = "Listen"\nen = "a"\nzh = "b"\n'
        '[[strategies]]\nname = "Ask"\nen = "a"\nzh = "b"\n',
        encoding="utf-8",
    )
    registry = Registry.from_toml(models).adding(
        entry(source="scripted:turns.toml", strategies=Path("two.toml"))
    )

    assert registry.policy("m").vocabulary.names == ("Listen", "Ask")


# --- loading -------------------------------------------------------------------------------------


def test_two_visitors_who_come_at_once_load_a_model_once(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = []
    go_on = threading.Event()
    real = ScriptedBackend.from_file

    def slow(path: Path) -> ScriptedBackend:
        loads.append(path)
        assert go_on.wait(60)
        return real(path)

    monkeypatch.setattr(compeer_core.registry.ScriptedBackend, "from_file", slow)
    registry = Registry.from_toml(models)
    got: list[Policy] = []
    visitors = [
        threading.Thread(target=lambda: got.append(registry.policy("taped"))) for _ in range(8)
    ]
    for visitor in visitors:
        visitor.start()
    assert registry.policy("remote").name == "remote"  # nobody waits for another model
    assert not got
    go_on.set()
    for visitor in visitors:
        visitor.join()

    assert len(loads) == 1
    assert len({id(policy) for policy in got}) == 1
    registry.close()


def test_a_closed_registry_lets_go_and_loads_again(models: Path) -> None:
    registry = Registry.from_toml(models)
    first = registry.policy("taped")
    registry.judge()
    registry.close()
    registry.close()

    assert registry.policy("taped") is not first


def test_a_checkpoint_is_loaded_with_its_adapter_and_the_flags(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Any, ...]] = []

    def load_transformers(source: str, **settings: Any) -> ScriptedBackend:
        calls.append((source, settings))
        return ScriptedBackend(["x"])

    # A stand-in for the whole module: torch takes its time to be imported.
    pool = SimpleNamespace(load_transformers=load_transformers)
    monkeypatch.setitem(sys.modules, "compeer_core.model_pool", pool)  # type: ignore[arg-type]
    folder = models.parent
    for name in ("base", "lora"):
        (folder / name).mkdir()
    registry = (
        Registry.from_toml(models, quantize="4bit", device="cpu")
        .adding(entry(name="local", source="base", adapter=Path("lora")))
        .adding(entry(name="hub", source="hf:org/model"))
    )
    registry.policy("local")
    registry.policy("hub")

    flags = {"quantize": "4bit", "device": "cpu"}
    assert calls == [
        (str(folder / "base"), {"adapter": folder / "lora", **flags}),
        ("org/model", {"adapter": None, **flags}),
    ]


def test_a_judge_may_be_two_adapters_on_the_weights_of_a_policy(
    qwen_folder: Path, adapter_folders: list[Path]
) -> None:
    first, second = adapter_folders
    registry = Registry(
        [
            entry(source=str(qwen_folder)),
            entry(
                name="pair",
                kind="judge",
                source=str(qwen_folder),
                adapter=first,
                reply_adapter=second,
            ),
        ],
        device="cpu",
    )
    judge = registry.judge("pair")

    assert judge is not None
    assert not judge.is_unified
    assert judge.scorer.name != judge.reply_scorer.name  # type: ignore[union-attr]
    [judgement] = judge.judge(
        Dialogue.from_messages([{"role": "user", "content": "Hi"}]), ["Hello."], ["Go away."]
    )
    assert judgement.reward().unscorable == 0
    registry.close()


def test_the_learned_check_of_a_policy_is_loaded_once_and_adds_to_the_phrases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[tuple[str, Path]] = []

    def load(folder: str, file: Path, **options: Any) -> Any:
        loads.append((folder, file))
        return lambda text, language: RiskSign(RiskKind.SUICIDE, is_hint=True)

    monkeypatch.setattr("compeer_core.model_pool.load_risk_check", load)
    with_check = entry(source="base", risk_check=Path("risk.safetensors"))
    check = Registry([with_check], tmp_path).risk_check()

    sign = check("My husband hits me", "en")
    assert sign is not None
    assert (sign.kind, sign.is_hint) == (RiskKind.VIOLENCE_SUFFERED, False)
    assert loads == []  # help does not wait for a model
    assert check("hello", "en") == RiskSign(RiskKind.SUICIDE, is_hint=True)
    assert check("hello again", "en") == RiskSign(RiskKind.SUICIDE, is_hint=True)
    assert loads == [(str(tmp_path / "base"), tmp_path / "risk.safetensors")]
    assert Registry([entry(source="base")], tmp_path).risk_check() is find_risk


def test_the_phrases_remain_if_the_learned_check_cannot_be_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with_check = entry(source="nowhere", risk_check=Path("risk.safetensors"))
    check = Registry([with_check], tmp_path).risk_check()

    assert [check(text, "en") for text in ("hello", "hello again")] == [None, None]
    sign = check("My husband hits me", "en")
    assert sign is not None
    assert sign.kind is RiskKind.VIOLENCE_SUFFERED
    [record] = caplog.records
    assert "could not be loaded" in record.message
    assert "hello" not in record.message


def test_a_learned_check_needs_a_policy_in_a_folder(tmp_path: Path) -> None:
    file = Path("risk.safetensors")

    for wrong in ({"kind": "judge", "source": "base"}, {"source": "hf:org/base"}):
        with pytest.raises(ValidationError, match="a policy whose source is a checkpoint folder"):
            entry(risk_check=file, **wrong)
    with pytest.raises(CheckpointError, match=r"risk\.safetensors"):
        Registry([entry(source=str(tmp_path), risk_check=file)], tmp_path).check()


def test_the_second_model_of_a_judge_is_checked_like_the_first(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    listed = Registry(
        [entry(name="pair", kind="judge", source="base", reply_adapter=Path("nowhere"))],
        folder=tmp_path,
    )
    with pytest.raises(CheckpointError, match=r"model 'pair': there is no folder .*nowhere"):
        listed.check()
    with pytest.raises(
        ValidationError, match="reply_source and reply_adapter are only for a judge"
    ):
        entry(reply_adapter=Path("lora"))


def test_the_temperatures_of_a_judge_are_those_of_the_list(tmp_path: Path) -> None:
    script = tmp_path / "judge.json"
    script.write_text('{"answers": ["True"]}', encoding="utf-8")
    listed = entry(
        name="calm",
        kind="judge",
        source=f"scripted:{script}",
        temperatures={"steps": 1.5},
    )

    judge = Registry([listed]).judge("calm")

    assert judge is not None
    assert (judge.temperatures.steps, judge.temperatures.replies) == (1.5, 1.0)
    with pytest.raises(ValidationError, match="temperatures is only for a judge"):
        entry(temperatures={"steps": 1.5})
    with pytest.raises(ValidationError, match="greater than 0"):
        entry(name="calm", kind="judge", temperatures={"steps": 0})


def test_opening_words_are_for_strategies_of_a_policy(tmp_path: Path) -> None:
    script = tmp_path / "turns.json"
    script.write_text('{"turns": [{"text": "Hello."}]}', encoding="utf-8")
    source = f"scripted:{script}"
    words = {"Question": "A question about"}

    policy = Registry([entry(source=source, strategy_openings=words)]).policy("m")
    assert policy.strategy_openings == words
    with pytest.raises(
        ConfigError, match=r"strategy_openings: Asking not in the strategies Question, "
    ):
        Registry([entry(source=source, strategy_openings={"Asking": "A"})]).policy("m")
    for unfit_entry in ({"kind": "judge"}, {"source": "openai:http://localhost:8000/v1#m"}):
        with pytest.raises(ValidationError, match="strategy_openings is only for a policy"):
            entry(**unfit_entry, strategy_openings=words)
    for unfit in ("", "Two\nlines", "A <tag", "A space "):
        with pytest.raises(ValidationError, match="strategy_openings"):
            entry(strategy_openings={"Question": unfit})


def test_only_a_judge_gets_findings(tmp_path: Path) -> None:
    script = tmp_path / "judge.json"
    script.write_text('{"answers": ["True"]}', encoding="utf-8")
    listed = entry(name="told", kind="judge", source=f"scripted:{script}", findings=True)

    judge = Registry([listed]).judge("told")

    assert judge is not None and judge.findings(Dialogue(())) is not None
    with pytest.raises(ValidationError, match="findings is only for a judge"):
        entry(findings=True)


# --- flags ---------------------------------------------------------------------------------------


def test_a_flag_becomes_the_default_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "My Model").mkdir()
    hub = ModelEntry.from_flag("hf:Qwen/Qwen2.5-VL-3B-Instruct")
    remote = ModelEntry.from_flag("openai:http://h:1/v1#org/llava:7b")
    local = ModelEntry.from_flag("hf:My Model")
    script = ModelEntry.from_flag("scripted:turns.toml")

    assert (hub.name, hub.style, hub.default) == ("Qwen2.5-VL-3B-Instruct", "prompted", True)
    assert (remote.name, remote.title) == ("llava-7b", "org/llava:7b")
    assert (local.name, local.source) == ("My-Model", str(tmp_path / "My Model"))
    assert (script.name, script.style) == ("turns.toml", "trained")
    assert script.source == f"scripted:{tmp_path / 'turns.toml'}"
    assert str(tmp_path) not in str(
        Registry([local, hub.model_copy(update={"default": False})]).public()
    )


def test_a_judge_may_stand_behind_an_endpoint() -> None:
    written = {"verdicts": "parsed", "sampling": {"max_new_tokens": 99}, "languages": ("zh",)}
    brought = ModelEntry.from_flag("openai:http://h:1/v1#org/llava:7b", kind="judge")
    listed = brought.model_copy(update={"name": "listed", "default": False})
    listed = ModelEntry.model_validate(listed.model_dump(exclude_unset=True) | written)
    registry = Registry([listed, brought])
    registry.check()

    judge, parsed = registry.judge(), registry.judge("listed")

    assert judge is not None
    assert parsed is not None
    assert isinstance(judge.scorer, OpenAIScorer)
    assert isinstance(parsed.scorer, OpenAIScorer)
    assert (judge.name, judge.scorer.name) == ("llava-7b-judge", "org/llava:7b")
    assert (judge.scorer.verdicts, judge.language) == ("logprobs", "en")
    assert (parsed.scorer.verdicts, parsed.scorer.max_written_tokens) == ("parsed", 99)
    assert parsed.language == parsed.scorer.language == "zh"
    assert "http" not in str(registry.public())
    registry.close()


def test_a_flag_that_is_no_source_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError):
        ModelEntry.from_flag("openai:http://h/v1")
    with pytest.raises(ConfigError):
        ModelEntry.from_flag("openai:http://h/v1", kind="judge")
    with pytest.raises(ValidationError):
        entry(source="")
