from __future__ import annotations

from mens_exp.artifacts.provenance import code_digest


def test_only_code_counts(tmp_path):
    """Neither compiled files nor the config groups of an installed package change the digest."""
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "b.py").write_text("y = 2\n")
    before = code_digest(tmp_path)
    for folder in ("__pycache__", "conf"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "c").write_text("z")
    assert code_digest(tmp_path) == before
    (tmp_path / "deep" / "b.py").write_text("y = 3\n")
    changed = code_digest(tmp_path)
    assert changed != before
    (tmp_path / "deep" / "b.py").rename(tmp_path / "b.py")
    assert code_digest(tmp_path) not in {before, changed}


def test_the_running_code_has_one():
    """Two calls return the same digest."""
    assert code_digest() == code_digest()
