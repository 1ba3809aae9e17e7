from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import site_pages
import tutorial
from yaml import safe_load

from mens_exp.config.overrides import check

ROOT = Path(__file__).resolve().parents[1]
PAGES = [tutorial.TUTORIAL / f"{name}.md" for name in tutorial.PAGES]


def _navigation(node):
    for entry in node:
        value = entry if isinstance(entry, str) else next(iter(entry.values()))
        yield from [value] if isinstance(value, str) else _navigation(value)


def test_every_page_is_in_the_navigation_once():
    """The pages of docs/ and of the root, and no page that does not exist."""
    listed = list(_navigation(safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["nav"]))
    written = {path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/**/*.md")}
    assert sorted(listed) == sorted({*written, *site_pages.OUTSIDE.values()})


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ('<a href="other.html#there">', []),
        ('<a href="https://example.org/x">', []),
        ('<p id="here"><a href="#here">', []),
        ('<a href="gone.html">', ["page.html: gone.html leads to no file"]),
        ('<img src="gone.svg">', ["page.html: gone.svg leads to no file"]),
        ('<a href="other.html#gone">', ["page.html: other.html#gone leads to no anchor"]),
        (
            '<script src="https://cdn.example/x.js"></script>',
            ["page.html: loads https://cdn.example/x.js from the network"],
        ),
    ],
)
def test_links_of_a_built_page_are_followed(tmp_path, body, told):
    """Raw HTML included: files, anchors, and nothing that is loaded from the network."""
    (tmp_path / "page.html").write_text(f"<html><body>{body}</body></html>", "utf-8")
    (tmp_path / "other.html").write_text('<h2 id="there">There</h2>', "utf-8")
    assert site_pages.problems(tmp_path) == told


def test_pages_of_the_gallery_may_lead_to_runs_that_are_not_there(tmp_path):
    """The runs exist only where the page was made; other broken links are reported."""
    (tmp_path / "gallery").mkdir()
    page = '<a href="./0_run/report.html"><a href="gone.html">'
    (tmp_path / "gallery" / "sweep.html").write_text(page, "utf-8")
    assert site_pages.problems(tmp_path) == ["gallery/sweep.html: gone.html leads to no file"]


def test_links_of_the_root_s_pages_lead_into_the_site():
    """Links to pages of docs/ keep their anchor, and links to other files become text."""
    text = "[a](docs/method/sandbox.md#probes) [b](SECURITY.md) [c](src/x.py) [d](https://e.org)"
    assert site_pages.with_site_links(text) == (
        "[a](method/sandbox.md#probes) [b](measured/security.md) c [d](https://e.org)"
    )


def test_words_of_a_page_of_the_gallery_lead_to_their_pages():
    """Every glossary word on a gallery page is linked to an existing page."""
    pages = sorted(tutorial.GALLERY.glob("*.html"))
    assert len(pages) == len(tutorial.SHOWN)
    for page in pages:
        text = page.read_text("utf-8")
        linked = re.findall(r'<a href="\.\./([^"]+)\.html">', site_pages.with_linked_words(text))
        assert len(linked) == text.count('<dt id="word-')
        assert linked or page.stem == "corpus"  # which has only general words
        assert [place for place in linked if not (ROOT / f"docs/{place}.md").is_file()] == []


def test_an_output_of_the_tutorial_is_replaced_and_cut(tmp_path, monkeypatch):
    """The file is written first; a block without a marker runs, but shows nothing."""
    monkeypatch.setattr(tutorial, "WORK", tmp_path)
    page = (
        '```python title="a.py"\nprint(1)\n```\n\n```bash\npython a.py\n```\n\n'
        "<!-- output: last 2 -->\nold\n<!-- end of output -->\n\n```bash\nls\n```\n"
    )
    typed = []

    def runner(commands):
        typed.append(commands)
        return tutorial.Ran(text="one\ntwo\nthree  \n", seconds=200)

    filled = tutorial.filled(page, runner)
    assert (tmp_path / "a.py").read_text("utf-8") == "print(1)\n"
    assert typed == ["python a.py\n", "ls\n"]
    assert (
        "<!-- output: last 2 -->\n```text\n…\ntwo\nthree\n```\n\n*Took 3 min.*\n"
        "<!-- end of output -->\n\n```bash\nls\n```\n"
    ) in filled
    assert tutorial.filled(filled, runner) == filled


def _commands(page):
    """Return the commands of a page, each on one line."""
    blocks = re.findall(r"^```bash\n(.*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line.split(" > ")[0].split(" || ")[0] for line in lines if "mens_exp" in line]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_of_the_tutorial_are_accepted(page):
    """Except for the one that shows a refusal; missing files of the tutorial are ignored."""
    for command in _commands(page):
        words = shlex.split(command)[3:]
        checked = check([word for word in words if word != "-m"], multirun="-m" in words)
        wrong = [str(problem) for problem in checked.problems if "no such file" not in str(problem)]
        assert bool(wrong) == (words == ["lora.rank=8"]), (command, wrong)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_step_of_the_tutorial_shows_a_real_output(page):
    """`make tutorial` has filled every marker, and no output has a path of its machine."""
    text = page.read_text("utf-8")
    shown = re.findall(r"<!-- output.*? -->\n(.*?)<!-- end of output -->", text, re.DOTALL)
    assert shown
    for output in shown:
        assert re.match(r"```text\n.+\n```\n\n\*Took .+\.\*\n$", output, re.DOTALL), output
        assert not re.search(r"(?<![\w.~])/(?:root|tmp|home|work)/", output)
