"""Suppress progress bars and notices of the libraries."""

from __future__ import annotations

import logging
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


# torchao, which PEFT imports if installed, logs the kernels that it does not find.
_LOUD = ("bitsandbytes", "gguf", "torchao", "torch.utils._pytree")


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' progress bars and notices in the context; errors still propagate.

    A level is set only if it differs, because setting one makes Python visit every logger. A loop
    that enters this often should itself be inside.
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
