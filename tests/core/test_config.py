"""TOML files and overrides: what is right is read, what is wrong is all named at once."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from compeer_core.config import FrozenModel, load_toml
from compeer_core.errors import ConfigError


class Redundancy(FrozenModel):
    alpha: float = 0.5
    """Steepness."""
    beta: float = 5.0


class Stage(FrozenModel):
    name: str
    steps: int = 1
    redundancy: Redundancy = Redundancy()
    tags: tuple[str, ...] = ()
    others: tuple[Redundancy, ...] = ()
    maybe: Redundancy | None = None


@pytest.fixture
def written(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "stage.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_a_file_lists_only_differences_from_the_defaults(written):
    stage = load_toml(written('name = "sft"\n[redundancy]\nalpha = 0.25\n'), Stage)

    assert stage == Stage(name="sft", redundancy=Redundancy(alpha=0.25, beta=5.0))


def test_overrides_win_over_the_file_and_later_ones_over_earlier_ones(written):
    overrides = ["redundancy.beta=7", "steps=2", "steps = 3", 'tags=["a", "b"]']

    stage = load_toml(written('name = "sft"\nsteps = 9\n'), Stage, overrides)

    assert (stage.redundancy.beta, stage.steps, stage.tags) == (7.0, 3, ("a", "b"))


@pytest.mark.parametrize("value", ["policy", "a b", "hf:Qwen/Qwen2.5-VL", "x\ny = 2", "=", "1\n2"])
def test_an_override_that_is_not_toml_is_a_string(written, value):
    assert load_toml(written('name = "sft"'), Stage, [f"name={value}"]).name == value


@settings(deadline=None)  # each example writes a file
@given(value=st.text(alphabet=st.characters(codec="utf-8")))
def test_an_override_value_cannot_set_another_key(tmp_path_factory, value):
    path = tmp_path_factory.mktemp("config") / "stage.toml"
    path.write_text('name = "sft"', encoding="utf-8")

    try:
        stage = load_toml(path, Stage, [f"name={value}"])
    except ConfigError as error:
        assert "name" in str(error)  # it read as a number, a table ...
    else:
        assert stage == Stage(name=stage.name)


def test_every_invalid_key_is_reported_with_path_and_nearest_valid_key(written):
    path = written('nam = "x"\nsteps = "many"\n[redundancy]\naplha = 1\n')

    with pytest.raises(ConfigError) as caught:
        load_toml(path, Stage)

    lines = str(caught.value).splitlines()
    assert f"{path}: redundancy.aplha: unknown key, got 1 (did you mean 'alpha'?)" in lines
    assert f"{path}: nam: unknown key, got 'x' (did you mean 'name'?)" in lines
    assert f"{path}: name: is required" in lines
    assert any(line.startswith(f"{path}: steps: ") and "'many'" in line for line in lines)
    assert len(lines) == 4


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("[[others]]\nbta = 1", "others.0.bta"),
        ("[maybe]\nbta = 1", "maybe.bta"),
    ],
)
def test_the_nearest_key_is_found_inside_lists_and_optional_tables(written, text, place):
    with pytest.raises(ConfigError, match=rf"{place}: unknown key.*did you mean 'beta'"):
        load_toml(written(f'name = "x"\n{text}'), Stage)


def test_a_key_without_a_near_match_lists_all_valid_keys(written):
    with pytest.raises(ConfigError, match=r"known keys: alpha, beta"):
        load_toml(written('name = "x"\n[redundancy]\nzzz = 1'), Stage)


def test_a_long_value_is_truncated_in_the_message(written):
    with pytest.raises(ConfigError) as caught:
        load_toml(written(f'name = "x"\nzzz = "{"long " * 100}"'), Stage)

    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("steps", "must look like"),
        ("=3", "must look like"),
        ("a..b=3", "must look like"),
        ("name.first=3", "name is not a table"),
    ],
)
def test_an_override_that_cannot_be_applied_is_refused(written, override, reason):
    with pytest.raises(ConfigError, match=reason):
        load_toml(written('name = "x"'), Stage, [override])


def test_a_missing_file_is_reported(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.toml: cannot be read"):
        load_toml(tmp_path / "nowhere.toml", Stage)


@pytest.mark.parametrize("content", [b"name = ", b"\xff\xfe", b"a = 1\na = 2"])
def test_a_file_that_is_not_toml_is_named(tmp_path, content):
    path = tmp_path / "bad.toml"
    path.write_bytes(content)

    with pytest.raises(ConfigError, match=r"bad\.toml: is not TOML"):
        load_toml(path, Stage)


def test_a_config_is_immutable():
    with pytest.raises(ValidationError):
        Redundancy().alpha = 1.0


def test_the_docstring_under_a_field_becomes_its_description():
    assert Redundancy.model_fields["alpha"].description == "Steepness."
