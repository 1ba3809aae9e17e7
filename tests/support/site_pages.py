"""mkdocs hooks: pages outside docs/, and a check of every link.

mkdocs loads this module (`hooks` in mkdocs.yml). Its own strict mode checks the links of Markdown;
:func:`problems` reads the finished HTML, so that it also sees links of raw HTML, anchors, pages of
the gallery, and files that a reader without a network could not load.
"""

from __future__ import annotations

import logging
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

LOG = logging.getLogger("mkdocs.hooks.site_pages")
ROOT = Path(__file__).parents[2]
OUTSIDE = {  # files in the repository's root that are pages of the site
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "CODE_OF_CONDUCT.md": "code-of-conduct.md",
}
ELSEWHERE = {"README.md": "index.md", "SECURITY.md": "measured/security.md"}
LOADED = {"img": "src", "script": "src", "link": "href", "iframe": "src", "source": "src"}


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are files in the repository's root."""
    from mkdocs.structure.files import File

    for name, place in OUTSIDE.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, place, content=with_site_links(text)))
    return files


def with_site_links(text: str) -> str:
    """Rewrite the links of a file in the root; files that are no pages become plain names."""

    def rewritten(found: re.Match[str]) -> str:
        label, target = found.groups()
        place, hash_, anchor = target.partition("#")
        page = {**OUTSIDE, **ELSEWHERE}.get(place, place.removeprefix("docs/"))
        is_page = place in {**OUTSIDE, **ELSEWHERE} or place.startswith("docs/")
        return f"[{label}]({page}{hash_}{anchor})" if is_page else label

    return re.sub(r"\[([^\]]+)\]\((?!https?:|#)([^)]+)\)", rewritten, text)


def with_linked_words(text: str) -> str:
    """Link the terms that a gallery page explains to their pages of the site."""
    page = r"(<span class=\"detail\">)(docs/([\w/-]+)\.md)(</span></dd>)"
    return re.sub(page, r'\1<a href="../\3.html">\2</a>\4', text)


def on_post_build(config: Any) -> None:
    """Finish the gallery and warn about broken links, which are errors in strict mode."""
    for page in (Path(config.site_dir) / "gallery").glob("*.html"):
        page.write_text(with_linked_words(page.read_text(encoding="utf-8")), encoding="utf-8")
    for problem in problems(Path(config.site_dir)):
        LOG.warning(problem)


def problems(site: Path) -> list[str]:
    """Return the problems with a site's links, one line each."""
    pages = {path: _Page.of(path) for path in sorted(site.rglob("*.html"))}
    found: list[str] = []
    for path, page in pages.items():
        name = path.relative_to(site).as_posix()
        if name == "404.html":  # its links are absolute, as it is shown at any address
            continue
        found += [f"{name}: loads {url} from the network" for url in page.fetched]
        beside = (
            "./" if path.parent.name == "gallery" else None
        )  # the runs of a page of the gallery
        for link in page.links:
            fault = None if beside and link.startswith(beside) else _fault(link, path, pages)
            if fault:
                found.append(f"{name}: {link} {fault}")
    return found


def _fault(link: str, path: Path, pages: dict[Path, _Page]) -> str | None:
    """Return the problem with a link of a page, if any; external links are not followed."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return None
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if not target.is_file():
        return "leads to no file"
    known = pages.get(target)
    if parts.fragment and known and unquote(parts.fragment) not in known.anchors:
        return "leads to no anchor"
    return None


class _Page(HTMLParser):
    """The links, anchors and external files of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.anchors: set[str] = set()
        self.fetched: set[str] = set()

    @classmethod
    def of(cls, path: Path) -> _Page:
        page = cls()
        page.feed(path.read_text(encoding="utf-8"))
        page.links = {link for link in page.links if not link.startswith(("data:", "mailto:"))}
        return page

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Record an element's anchor and links."""
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.add(given["href"])
        url = given.get(LOADED.get(tag, ""), "")
        if url and urlsplit(url).scheme in {"http", "https"}:
            if given.get("rel") not in {"canonical", "license"}:
                self.fetched.add(url)
        elif url:
            self.links.add(url)
