from __future__ import annotations

from importlib.resources import files

import pytest

from mens_exp.artifacts.run_dir import RunDir
from mens_exp.errors import MensError
from mens_exp.report.write import write_report


def test_write_report_writes_four_files_and_nothing_else(
    write_run,
):
    """No temporary file remains, and writing again gives the same bytes."""
    run = write_run()
    before = set(run.path.iterdir())
    write_report(run)
    written = (run.report, run.model_card, run.run_summary, run.skip_stats)
    first = [file.read_bytes() for file in written]
    assert set(run.path.iterdir()) - before == {*written}
    write_report(run)
    assert [file.read_bytes() for file in written] == first


def test_write_report_of_a_failed_run(failed_run):
    """A failed run gets a report too."""
    write_report(failed_run)
    assert failed_run.report.is_file()


def test_write_report_of_no_run_writes_nothing(tmp_path):
    """Without a manifest there is nothing to report."""
    with pytest.raises(MensError):
        write_report(RunDir(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_templates_are_part_of_the_package():
    """They are found from a checkout and from a wheel."""
    names = {entry.name for entry in files("mens_exp.report").joinpath("templates").iterdir()}
    pages = {f"{name}.html.j2" for name in ("fragment", "page", "parts")}
    assert names == {*pages, "model_card.md.j2", "report.css", "report.js", "terms.yaml"}
