"""Keep the libraries' own progress bars and notices off the terminal."""

from __future__ import annotations

import logging
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["quiet"]


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' bars and notices inside the block; errors still come through."""
    from transformers.utils import logging as hf_logging

    level, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    bitsandbytes = logging.getLogger("bitsandbytes")
    before = bitsandbytes.level
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    bitsandbytes.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # the libraries', about each other
            yield
    finally:
        hf_logging.set_verbosity(level)
        bitsandbytes.setLevel(before)
        if bars:
            hf_logging.enable_progress_bar()
