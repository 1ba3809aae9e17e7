from __future__ import annotations

import io

import pytest
from lightning import Callback
from rich.console import Console

from mens_exp.training.callbacks.progress import Progress


def with_console(record, *, terminal, every=10):
    text = io.StringIO()
    callback = Progress(record, plain_every_n_steps=every)
    callback.console = Console(file=text, force_terminal=terminal, width=100)
    return callback, text


def test_lines_where_the_output_is_no_terminal(fit):
    """There is a line for the first step, every second one and the last, without control codes."""
    callback, text = with_console(fit.record, terminal=False, every=2)
    fit.run(fit.trainer(callback, max_steps=5))
    lines = text.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/5", "2/5", "4/5", "5/5"]
    assert all("loss 5." in line and "lr 1.0e-03" in line for line in lines)
    assert "\x1b" not in text.getvalue()


def test_a_bar_on_a_terminal_that_ends_with_training(fit):
    """The bar shows the steps and restores the cursor at the end."""
    callback, text = with_console(fit.record, terminal=True)
    fit.run(fit.trainer(callback))
    assert "2/2" in text.getvalue()
    assert text.getvalue().rstrip().endswith("\x1b[?25h")  # shows the cursor


def test_the_bar_stops_at_an_error(fit):
    """Later output on the terminal is not overwritten."""

    class Fails(Callback):
        def on_train_batch_end(self, *_):
            raise ValueError("here")

    callback, text = with_console(fit.record, terminal=True)
    with pytest.raises(ValueError, match="here"):
        fit.run(fit.trainer(Fails(), callback))
    assert text.getvalue().rstrip().endswith("\x1b[?25h")


def test_rates_and_time_left_are_shown_where_they_are_known(fit):
    """The remaining 75 seconds are shown as 1:15."""
    callback, text = with_console(fit.record, terminal=False)

    class Rates(Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            pl_module.record("perf/supervised_tokens_per_s", 467.4)
            pl_module.record("perf/eta_s", 75.0)

    fit.run(fit.trainer(Rates(), callback, max_steps=1))
    assert "467 supervised tok/s · 1:15 left" in text.getvalue()


def test_a_notebook_shows_one_bar_that_moves(fit, monkeypatch):
    """The bar is created once and updated in place; its text is escaped."""
    import IPython.display

    drawn = []

    class Handle:
        def update(self, shown):
            drawn.append(("update", shown.data))

    def display(shown, *, display_id):
        assert display_id is True
        drawn.append(("display", shown.data))
        return Handle()

    monkeypatch.setattr(IPython.display, "display", display)
    callback, text = with_console(fit.record, terminal=False)
    callback.console = Console(file=io.StringIO(), force_jupyter=True)
    fit.run(fit.trainer(callback))
    assert [what for what, _ in drawn] == ["display", "update", "update"]
    assert 'value="2" max="2"' in drawn[-1][1]
    assert "step 2/2 · loss 5." in drawn[-1][1]
    assert text.getvalue() == ""
