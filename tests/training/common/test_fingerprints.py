"""Fingerprints of files and values."""

import pytest

from compeer_core.errors import ConfigError
from training.common.fingerprints import digest, fingerprint


def test_fingerprint_changes_with_the_files(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("a", encoding="utf-8")
    before = fingerprint(tmp_path / "in")

    assert fingerprint(tmp_path / "in") == before
    (tmp_path / "in" / "b.txt").write_text("b", encoding="utf-8")
    assert fingerprint(tmp_path / "in") != before
    with pytest.raises(ConfigError, match="no such file"):
        fingerprint(tmp_path / "out")


def test_digest_ignores_the_order_of_keys():
    # echo -n '{"a": "ü", "b": [1, null]}' | sha256sum
    known = "9b22c704c676cc5c554eb1586435d7f565d1457ad21c02be9c356e11b323f5f0"

    assert digest({"b": [1, None], "a": "ü"}) == known
    assert digest({"b": [1, 0], "a": "ü"}) != known
