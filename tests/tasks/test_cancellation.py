from __future__ import annotations

import signal
import threading

import pytest

from mens_exp.tasks.run import Cancelled, cancellable, end_at_once

HANDLED = [signal.SIGINT, signal.SIGTERM]


@pytest.mark.parametrize("number", HANDLED)
def test_the_first_signal_cancels(number):
    """The first signal raises Cancelled with its name, and the handlers are restored."""
    before = [signal.getsignal(each) for each in HANDLED]
    with pytest.raises(Cancelled, match=number.name), cancellable(lambda: False):
        signal.raise_signal(number)
    assert [signal.getsignal(each) for each in HANDLED] == before


def test_after_the_first_signal_the_system_ends_the_process():
    """The default handler is back in place, so a second signal ends the process at once."""
    with cancellable(lambda: False):
        with pytest.raises(Cancelled):
            signal.raise_signal(signal.SIGINT)
        assert [signal.getsignal(each) for each in HANDLED] == [signal.SIG_DFL] * 2


def test_a_closing_run_is_not_cancelled():
    """A closing run has its status already: a signal does not cancel it, and a second ends it."""
    with cancellable(lambda: True):
        signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL


def test_outside_of_the_main_thread_nothing_is_installed():
    """Python accepts signal handlers only in the main thread; elsewhere the block runs without."""
    seen = []
    before = signal.getsignal(signal.SIGINT)

    def work():
        with cancellable(lambda: False):
            seen.append(signal.getsignal(signal.SIGINT))
        end_at_once()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
    assert signal.getsignal(signal.SIGINT) is before
