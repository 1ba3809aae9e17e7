"""The terminal view of an inspection shows the whole record and nothing else."""

from __future__ import annotations

from mens_exp.artifacts.certificate import (
    Ancestor,
    ArtifactKind,
    BaseRecord,
    Check,
    CheckpointRecord,
    Inspection,
    LayerRecord,
    Outcome,
    Replay,
    Role,
    Verification,
)
from mens_exp.report import terminal
from mens_exp.report.evidence_views import inspection_document


def shown(found):
    document = inspection_document(found)
    lines = terminal.lines(document.parts, 240, is_plain=False)
    return "\n".join([document.title, *(line.plain for line in lines)])


def inspection(**fields):
    layer = LayerRecord(
        base_key="model.layers.0.self_attn.q_proj.weight",
        shape=[48, 64],
        rank=4,
        scale=2.0,
        frobenius=0.5,
        spectral=0.25,
        effective_rank=3.125,
        stable_rank=None,
        magnitude_change=None,
    )
    base = BaseRecord(
        name="tiny",
        revision="abc",
        weights_sha256="f" * 64,
        base_quant="nf4",
        double_quant=True,
        quantizer=None,
    )
    usual = {
        "kind": ArtifactKind.RUN,
        "path": "outputs/run",
        "what": "a training run, succeeded",
        "base": base,
        "variant": "rslora",
        "parameters": 1234,
        "layers": {"l0.q": layer},
    }
    return Inspection(**usual | fields)


def check(outcome, recorded, found, note=None):
    return Check(
        name="outputs.adapter",
        step=2,
        outcome=outcome,
        recorded=recorded,
        found=found,
        note=note,
        link=None,
        of=None,
    )


def test_base_layers_and_figures_are_shown():
    """Shown are name, revision, quantization, keys, shapes, ranks, scales and norms."""
    text = shown(inspection())
    for part in (
        *("tiny @ abc, nf4, double quantized", "rslora, rank 4, 1 layers, 1,234 parameters"),
        *("model.layers.0.self_attn.q_proj.weight", "48 × 64", "0.25", "3.125"),
    ):
        assert part in text
    assert "row lengths" not in text


def test_lineage_says_what_is_missing():
    """Entries are in order, each but the first after an arrow."""
    line = [
        Ancestor(role=role, name=name, place=None, hashes={}, missing=missing)
        for role, name, missing in (
            (Role.BASE, "tiny", None),
            (Role.RUN, "first", "no run has it"),
        )
    ]
    text = shown(inspection(lineage=line))
    assert "→ run" in text
    assert "no run has it" in text
    assert "→ base" not in text


def test_of_a_verification_only_what_is_not_equal_is_listed():
    """Differences come first with both values in full; equal items are counted."""
    checks = [
        check(Outcome.EQUAL, "a" * 64, "a" * 64),
        check(Outcome.NOT_HERE, "b" * 64, None, "the base is elsewhere"),
        check(Outcome.DIFFERS, "c" * 64, "d" * 64),
    ]
    text = shown(
        inspection(verification=Verification(checks=checks, unchecked=["run/report.html"]))
    )
    assert text.index("c" * 64) < text.index("bbbb")
    assert "d" * 64 in text
    assert "aaaa" not in text
    assert "Verified: 1 equal, 1 differs, 1 not here" in text
    assert "the base is elsewhere" in text


def test_a_replay_says_how_far_it_was_the_same():
    """The steps are equal up to the end or the first difference; other conditions are labelled."""
    replay = Replay(
        steps=3, identical_through=3, conditions=["packages"], first_difference=None, checks=[]
    )
    text = shown(inspection(replay=replay))
    assert "identical through step 3" in text
    assert "other conditions: packages" in text
    other = Replay(
        steps=3,
        identical_through=1,
        conditions=[],
        first_difference="step 2: train/loss",
        checks=[check(Outcome.DIFFERS, 1.0, 2.0)],
    )
    assert "first difference: step 2: train/loss" in shown(inspection(replay=other))


def test_a_state_says_whether_it_goes_on():
    """It shows step, optimizer and reason."""
    state = CheckpointRecord(
        step=7, bytes=2**20, optimizer_tensors=0, optimizer_bytes=0, resumable=False, why="because"
    )
    text = shown(inspection(checkpoint=state))
    for part in ("step 7, 1.0 MiB", "no state", "no: because"):
        assert part in text


def test_markup_in_a_record_is_text():
    """Markup in a path is escaped."""
    assert "[bold]run" in shown(inspection(path="[bold]run"))
