"""Render a document as a self-contained page, and as a fragment for notebooks.

All text is escaped, because completions may contain anything; only drawings made by this package
are inserted unescaped. A page loads nothing, and links only to itself and to files in the same
directory. The only script belongs to tables with filters; the page's content security policy allows
it by hash, so that nothing in a completion can run.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from importlib import resources
from itertools import groupby
from typing import TYPE_CHECKING, Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

import mens_exp
from mens_exp.report.document import Note, Plot, Section, Table, as_cell
from mens_exp.report.wording import visible

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mens_exp.report.document import Document, Part


def page(document: Document) -> str:
    """Render a document as an HTML page; deterministic for a given document."""
    script = _asset("report.js") if _has_filters(document.parts) else ""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return _rendered(
        "page.html.j2",
        '<a class="term" href="#word-{0}" title="{1}">{2}</a>',
        document=document,
        script=Markup(script),  # noqa: S704  # our own
        policy=f"; script-src 'sha256-{digest}'" if script else "",
    )


def fragment(*parts: Part) -> str:
    """Render parts of a document with their styles, for ``_repr_html_``."""
    return _rendered("fragment.html.j2", '<abbr title="{1}">{2}</abbr>', parts=parts)


def drawing(svg: str) -> str:
    """Render one drawing as a page of its own."""
    style = f"{_asset('report.css')}\nsvg {{ max-width: 100% }}"
    return f"<!doctype html><meta charset=utf-8><style>{style}</style>{svg}"


def _rendered(template: str, link: str, **values: Any) -> str:
    """Render a template, in which each of our terms is a link (with its anchor, meaning and text).

    A fragment has no list of words to link to.
    """
    terms, pattern, heads = _terms()
    used: dict[str, tuple[str, str]] = {}  # terms that occurred, which a page explains at its end

    def explained(text: str, *, head: bool = False) -> Markup:
        """Link and explain each of our terms at its first occurrence.

        Words that are terms only as a `head` are linked only there.
        """

        def linked(found: re.Match[str]) -> str:
            term = found[1].lower()
            if term in used:
                return found[0]
            used[term] = terms[term]
            anchor = term.replace(" ", "-")
            return Markup(link).format(anchor, terms[term][0], found[0])  # noqa: S704  # our own

        whole = heads.fullmatch(text) if head else None
        if whole is not None:
            return Markup(linked(whole))  # noqa: S704  # one of our terms
        return Markup(pattern.sub(linked, str(escape(visible(text)))))  # noqa: S704  # escaped above

    return (
        _environment()
        .get_template(template)
        .render(
            explained=explained,
            used=used,
            style=Markup(_asset("report.css")),  # noqa: S704  # our own
            version=mens_exp.__version__,
            **values,
        )
    )


@functools.cache  # keeps compiled templates
def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader("mens_exp.report"),
        autoescape=True,
        finalize=lambda value: visible(value) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    made.filters |= {
        "cell": as_cell,
        "drawn": Markup,  # by this package
        "groups": lambda parts: [(kind, list(some)) for kind, some in groupby(parts, key=_kind)],
        "kind": lambda part: type(part).__name__.lower(),
    }
    return made


@functools.cache
def _terms() -> tuple[dict[str, tuple[str, str]], re.Pattern[str], re.Pattern[str]]:
    """Return the definition and page of each of our terms, and two patterns that find them.

    The first finds terms in a text, the second terms that are explained only as a head.
    """
    terms: dict[str, list[str]] = yaml.safe_load(_asset("terms.yaml"))
    found = {name: (meaning, page) for name, (meaning, page, *_) in terms.items()}

    def pattern(names: Iterable[str]) -> re.Pattern[str]:
        ordered = "|".join(sorted(map(re.escape, names), key=len, reverse=True))
        return re.compile(rf"\b({ordered})s?\b", re.IGNORECASE)

    heads = [name for name, (*_, last) in terms.items() if last == "head"]
    return found, pattern(terms.keys() - set(heads)), pattern(heads)


def _kind(part: Part) -> str:
    """Return the grouping key of a part: drawings, and items of a list, are grouped."""
    if isinstance(part, Note) and part.item:
        return "items"
    return "plots" if isinstance(part, Plot) else ""


def _has_filters(parts: Iterable[Part]) -> bool:
    return any(
        bool(part.filters) if isinstance(part, Table) else _has_filters(part.parts)
        for part in parts
        if isinstance(part, Table | Section)
    )


@functools.cache
def _asset(name: str) -> str:
    return resources.files("mens_exp.report").joinpath("templates", name).read_text("utf-8")
