"""The one place where pages are made of templates and values."""

from __future__ import annotations

import functools
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

import mens_exp
from mens_exp.report import wording

__all__ = ["rendered"]


def rendered(template: str, **values: Any) -> str:
    """Render a page of the package's templates; a name that it lacks is an error.

    Args:
        template: the file, which escapes what it shows.
        values: what it shows, beside the program's version and the words it is said in.
    """
    page = _environment().get_template(template)
    return page.render(version=mens_exp.__version__, say=wording, **values)


@functools.cache  # it keeps the templates that it has compiled
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("mens_exp.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
