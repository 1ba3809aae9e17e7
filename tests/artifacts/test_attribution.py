from __future__ import annotations

import json

import pytest

from mens_exp.artifacts.attribution import Attribution
from mens_exp.errors import DataError, MensError, Problems


def changed(golden, dotted, value):
    """Return the committed record with one value changed; a number in the path is a list index."""
    record = json.loads((golden / "attribution_v1.json").read_text("utf-8"))
    *parents, last = dotted.split(".")
    node = record
    for name in parents:
        node = node[int(name)] if name.isdigit() else node[name]
    node[last] = value
    return record


def test_the_committed_attribution_of_version_1_is_written_as_read(golden, tmp_path):
    """The bytes are the same; an unknown SQNR stays null."""
    record = Attribution.read(golden / "attribution_v1.json")
    assert record.modules[1]["variants"]["nf4"]["sqnr_db"] is None
    record.write(tmp_path / "a.json")
    assert (tmp_path / "a.json").read_bytes() == (golden / "attribution_v1.json").read_bytes()


@pytest.mark.parametrize(
    ("dotted", "value", "message"),
    [
        ("format", "mens_exp_run", "not this format"),
        ("version", 2, "newer version"),
        ("token", 3, "token: unknown key.*the nearest is tokens"),
        ("modules.0.kl", "1", r"modules\[0\]\.kl: wrong value"),
        ("modules.0.klx", 1.0, r"modules\[0\]\.klx: unknown key"),
        ("modules.0.rank", 2, "1 to 2 in the order of falling kl"),
        ("modules.1.kl", 9.0, "1 to 2 in the order of falling kl"),
        ("modules.0.variants.fp4", {}, r"variants\.fp4\.sqnr_db: missing key"),
        ("variants", ["nf4", "nf4_double"], "nf4_double first"),
        ("whole", {}, "whole: wrong value"),
        ("parity.by_position.0.last", "no", "last: wrong value"),
    ],
)
def test_an_attribution_is_refused(golden, tmp_path, dotted, value, message):
    """The message names each problem with its path."""
    (tmp_path / "a.json").write_text(json.dumps(changed(golden, dotted, value)))
    with pytest.raises((DataError, Problems), match=message):
        Attribution.read(tmp_path / "a.json")


def test_a_module_without_one_of_the_variants_is_refused(golden, tmp_path):
    """Every module needs an entry for every variant."""
    record = changed(golden, "version", 1)
    del record["modules"][1]["variants"]["nf4"]
    (tmp_path / "a.json").write_text(json.dumps(record))
    with pytest.raises(DataError, match=r"modules\[1\]\.variants"):
        Attribution.read(tmp_path / "a.json")


def test_an_attribution_that_is_not_finite_is_not_written(golden, tmp_path):
    """The file is not created."""
    record = Attribution.read(golden / "attribution_v1.json")
    record.modules[0]["kl"] = float("inf")
    with pytest.raises(MensError, match="kl"):
        record.write(tmp_path / "a.json")
    assert list(tmp_path.iterdir()) == []
