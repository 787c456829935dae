"""Errors survive a process border, and are what a caller without this package would catch."""

import pickle

import pytest

from compeer_core import errors

EXAMPLES = (
    errors.CompeerError("x"),
    errors.ConfigError("x"),
    errors.UnknownModelError("small", ["compeer-small", "other"]),
    errors.PromptError("x"),
    errors.CompletionError("x", "<reply>", ["history is missing"]),
    errors.InputError("x", "message_too_long", {"limit": 4000}),
    errors.ImageError("x", "image_too_large", {"limit": 3}),
    errors.VoteRefusedError("x", "note_too_long", {"limit": 3}),
    errors.StoreError("x"),
    errors.BackendError("x"),
    errors.EndpointError("x", "has a fault (500)", errors.Fault.PASSING, 2.5),
    errors.CheckpointError("x"),
)


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_errors_round_trip_through_pickle(error):
    copy = pickle.loads(pickle.dumps(error))

    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def test_every_error_of_the_package_is_pickled_above():
    defined = {one for one in vars(errors).values() if isinstance(one, type)}

    assert {one for one in defined if issubclass(one, BaseException)} == set(map(type, EXAMPLES))


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (errors.ConfigError, ValueError),
        (errors.PromptError, ValueError),
        (errors.CompletionError, ValueError),
        (errors.InputError, ValueError),
        (errors.StoreError, RuntimeError),
        (errors.BackendError, RuntimeError),
    ],
)
def test_each_error_inherits_the_matching_builtin(error, builtin):
    assert issubclass(error, errors.CompeerError)
    assert issubclass(error, builtin)


def test_an_unknown_model_comes_with_the_nearest_and_all_known_names():
    error = errors.UnknownModelError("compeer-smal", ["compeer-small", "qwen"])

    assert str(error) == (
        "unknown model 'compeer-smal' (did you mean 'compeer-small'?); "
        "known models: compeer-small, qwen"
    )


def test_an_unknown_model_beside_an_empty_list_says_so():
    assert str(errors.UnknownModelError("a", [])) == "unknown model 'a'; known models: none"
