"""Directories of teacher models."""

from __future__ import annotations

import shutil

from mens_exp.config.model import RandomModel
from mens_exp.model.sources import resolve
from mens_exp.rows.cache import cache_root


def model_directory(directory, **settings):
    """Write a model with random weights into a directory, as if a user had downloaded it."""
    made = resolve(RandomModel(name="teacher", **settings), cache_root())
    shutil.copytree(made.directory, directory, dirs_exist_ok=True)
    return directory
