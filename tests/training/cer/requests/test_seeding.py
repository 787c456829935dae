"""Draws depend on names alone."""

from hypothesis import given
from hypothesis import strategies as st

from training.cer.requests.seeding import generator_for, seed_for, stable_hash


def test_a_hash_is_the_same_in_every_process() -> None:
    # The first 16 bytes of sha256(b"5:order3:r-1"), as sha256sum prints them.
    assert stable_hash("order", "r-1") == 0xC1045B7A711000D08D5460EF60ABFEA4


@given(st.lists(st.text(), max_size=3), st.lists(st.text(), max_size=3))
def test_other_names_give_another_hash(names: list[str], other: list[str]) -> None:
    assert (stable_hash(*names) == stable_hash(*other)) == (names == other)


def test_a_draw_does_not_depend_on_earlier_draws() -> None:
    alone = generator_for(3, "order", "b").integers(1000, size=4).tolist()
    generator_for(3, "order", "a").integers(1000, size=4)

    assert generator_for(3, "order", "b").integers(1000, size=4).tolist() == alone
    assert generator_for(4, "order", "b").integers(1000, size=4).tolist() != alone


@given(st.integers(0, 2**40), st.text())
def test_a_seed_is_accepted_by_every_server(seed: int, name: str) -> None:
    assert 0 <= seed_for(seed, name) < 2**31
