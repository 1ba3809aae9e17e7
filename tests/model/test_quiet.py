from __future__ import annotations

import logging
import warnings

import pytest

from mens_exp.model.quiet import quiet


def state():
    from transformers.utils import logging as hf_logging

    return (
        hf_logging.get_verbosity(),
        hf_logging.is_progress_bar_enabled(),
        logging.getLogger("bitsandbytes").level,
    )


@pytest.mark.parametrize("bars", [True, False])
def test_levels_and_bars_are_as_before_afterwards(bars):
    """The user's settings are restored."""
    from transformers.utils import logging as hf_logging

    original = state()
    try:
        hf_logging.set_verbosity_info()
        (hf_logging.enable_progress_bar if bars else hf_logging.disable_progress_bar)()
        logging.getLogger("bitsandbytes").setLevel(logging.DEBUG)
        before = state()
        with quiet():
            assert state() == (logging.ERROR, False, logging.ERROR)
        assert state() == before
    finally:
        hf_logging.set_verbosity(original[0])
        (hf_logging.enable_progress_bar if original[1] else hf_logging.disable_progress_bar)()
        logging.getLogger("bitsandbytes").setLevel(original[2])


def test_levels_are_as_before_after_an_error():
    """The error propagates."""
    before = state()
    with pytest.raises(OSError, match="lost"), quiet():
        raise OSError("lost")
    assert state() == before


def test_only_future_warnings_are_silenced():
    """Other warnings still reach the user."""
    with quiet():
        warnings.warn("about each other", FutureWarning, stacklevel=1)
    with pytest.warns(UserWarning, match="about the user"), quiet():
        warnings.warn("about the user", UserWarning, stacklevel=1)
