"""Suppress progress bars and notices of the libraries."""

from __future__ import annotations

import logging
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


# Of torchao, which PEFT imports where it is installed: kernels that it does not find here.
_LOUD = ("bitsandbytes", "gguf", "torchao", "torch.utils._pytree")


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' progress bars and notices in the context; errors still propagate.

    A level that is set already is not set again: each time, Python visits every logger there is.
    """
    from transformers.utils import logging as hf_logging

    level, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    loggers = [logging.getLogger(name) for name in _LOUD]
    before = [logger.level for logger in loggers]
    if level != logging.ERROR:
        hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    for logger in loggers:
        _set_level(logger, logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # the libraries', about each other
            yield
    finally:
        if level != logging.ERROR:
            hf_logging.set_verbosity(level)
        for logger, its in zip(loggers, before, strict=True):
            _set_level(logger, its)
        if bars:
            hf_logging.enable_progress_bar()


def _set_level(logger: logging.Logger, level: int) -> None:
    if logger.level != level:
        logger.setLevel(level)
