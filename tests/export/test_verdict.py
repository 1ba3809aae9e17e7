"""Accepting or rejecting a written model by its parity certificate."""

from __future__ import annotations

import pytest

from mens_exp.artifacts.certificate import Certificate, Comparison, Evidence, TensorError
from mens_exp.errors import GateError
from mens_exp.export.certificate import (
    certificate_place,
    hashes_of,
    keep_or_set_aside,
    rejected_place,
)
from mens_exp.report.evidence_views import card_section, verdict


def comparison(*exceeded):
    return Comparison(
        what="written",
        tokens=9,
        mean_kl=0.25,
        p99_kl=0.5,
        max_kl=1.0,
        top1_agreement=0.5,
        nll_difference=-0.125,
        worst_layer={"layer": "l3", "relative_error": 0.75},
        exceeded=list(exceeded),
    )


def of_graphs(*exceeded, accepted=False):
    return Certificate(
        evidence=Evidence.GRAPH,
        reference="as trained",
        reference_nll=1.0,
        probe={"source": "rows: 3 of held out", "documents": 3, "tokens": 12, "sha256": "0" * 64},
        judged="written",
        comparisons={"written": comparison(*exceeded)},
        tensors={},
        budget={"mean_kl": 0.002},
        passed=not exceeded,
        accepted=accepted,
        sources={},
        files={},
    )


def of_tensors(relative, **changes):
    tensors = {"a": TensorError(max_abs=1.0, relative=relative)}
    usual = {
        "evidence": Evidence.WEIGHTS,
        "reference": "W + delta in f64",
        "reference_nll": None,
        "probe": None,
        "judged": None,
        "comparisons": {},
        "tensors": tensors,
        "budget": {"weight_error": 0.004},
        "passed": relative <= 0.004,
        "accepted": False,
        "sources": {},
        "files": {},
    }
    return Certificate(**{**usual, **changes})


def written(tmp_path):
    directory = tmp_path / ".merged.tmp"
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(b"weights")
    return directory


@pytest.mark.parametrize("certificate", [of_graphs(), of_tensors(0.001)])
def test_what_is_within_the_budget_stays_with_its_certificate(tmp_path, certificate):
    """Nothing is moved, and the certificate is next to the weights."""
    directory = written(tmp_path)
    keep_or_set_aside(directory, tmp_path / "merged", certificate)
    assert Certificate.read(directory / "parity.json") == certificate
    assert not (tmp_path / "merged.rejected").exists()


@pytest.mark.parametrize(
    ("certificate", "figure"),
    [
        (of_graphs("mean_kl 0.25 > 0.002"), "mean_kl 0.25"),
        (of_tensors(0.5), "a: relative error 0.5"),
    ],
)
def test_what_is_over_the_budget_is_set_aside(tmp_path, certificate, figure):
    """Exit code 4 with the figure; the output goes to .rejected and replaces an older one."""
    directory = written(tmp_path)
    (tmp_path / "merged.rejected").mkdir()
    (tmp_path / "merged.rejected" / "older").touch()
    with pytest.raises(GateError, match=figure) as raised:
        keep_or_set_aside(directory, tmp_path / "merged", certificate)
    assert raised.value.exit_code == 4
    assert not directory.exists()
    assert sorted(path.name for path in rejected_place(tmp_path / "merged").iterdir()) == [
        "model.safetensors",
        "parity.json",
    ]


def test_what_is_accepted_stays_and_says_so(tmp_path):
    """The certificate and the model card state that it failed and that it was accepted."""
    directory = written(tmp_path)
    (directory / "README.md").write_text("# Merged\n")
    certificate = of_graphs("mean_kl 0.25 > 0.002", accepted=True)
    keep_or_set_aside(directory, tmp_path / "merged", certificate, card_section(certificate))
    found = Certificate.read(directory / "parity.json")
    assert (found.passed, found.accepted) == (False, True)
    card = (directory / "README.md").read_text().replace("\\", "")
    assert card.startswith("# Merged\n")
    assert "over the budget (mean_kl 0.25 > 0.002), and accepted" in card
    assert found.files == {"README.md": hashes_of(directory)["README.md"]}


@pytest.mark.parametrize("relative", [0.001, 0.5])
def test_the_certificate_of_a_file_lies_beside_it(tmp_path, relative):
    """It is named after the file, also after a file that was rejected."""
    temporary, out = tmp_path / ".tmp", tmp_path / "merged.safetensors"
    temporary.write_bytes(b"weights")
    if relative < 0.004:
        keep_or_set_aside(temporary, out, of_tensors(relative))
        temporary.replace(out)
    else:
        with pytest.raises(GateError):
            keep_or_set_aside(temporary, out, of_tensors(relative))
        out = rejected_place(out)
    assert out.read_bytes() == b"weights"
    assert Certificate.read(certificate_place(out)).passed is (relative < 0.004)
    assert hashes_of(out) == {"": hashes_of(out)[""]}


def test_hashes_are_of_every_file_but_the_certificate(tmp_path):
    """Paths are relative and include subdirectories."""
    directory = written(tmp_path)
    (directory / "below").mkdir()
    (directory / "below" / "x").write_bytes(b"")
    (directory / "parity.json").write_bytes(b"{}")
    found = hashes_of(directory)
    assert sorted(found) == ["below/x", "model.safetensors"]
    assert found["below/x"].startswith("e3b0c442")  # SHA-256 of empty input


def test_the_card_shows_every_figure():
    """One row per graph; for tensors, their number and the worst one."""
    text = card_section(of_graphs())
    assert "| written ← | 0.25 | 1 | 50.00% | \N{MINUS SIGN}0.12 | l3 0.75 |" in text
    assert "12 tokens (rows: 3 of held out)" in text
    tensors = card_section(of_tensors(0.001))
    assert "**Worst of 1 tensors, against W + ΔW in f64**" in tensors
    assert "| a | 1 | 0.001 |" in tensors
    equal = of_tensors(0.001)
    equal.tensors["b"] = TensorError(max_abs=0.0, relative=0.0)
    assert "| b |" not in card_section(equal)
    equal.tensors["a"] = equal.tensors["b"]
    text = card_section(equal)
    assert "All 2 tensors were read back and compared in f64" in text
    assert "they are equal" in text
    assert "largest error" not in text
    assert verdict(of_graphs()) == "within the budget"
