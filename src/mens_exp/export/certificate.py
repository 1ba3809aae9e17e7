"""Parts of a certificate that do not need torch: the probe, adapter deltas, and the verdict.

The probe is real text, encoded once, on which both models are compared. Two forms of an adapter are
compared in f64 by their deltas to every weight. The verdict decides whether an output is kept or
set aside.

Shapes: R rank, I inputs and O outputs of a projection.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mens_exp.artifacts import atomic
from mens_exp.artifacts.adapter_tensors import HALVES
from mens_exp.artifacts.certificate import ProbeRecord, TensorError
from mens_exp.artifacts.digest import CERTIFICATE, digest, sha256_file
from mens_exp.errors import DataError, GateError
from mens_exp.rows.encode import encode

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import numpy.typing as npt

    from mens_exp.artifacts.adapter_v3 import AdapterManifest
    from mens_exp.rows.documents import Labelling
    from mens_exp.rows.schema import TrainingPair
    from mens_exp.tokenizer.load import Tokenizer

    Tensors = Mapping[str, npt.NDArray[np.float32]]
    from mens_exp.artifacts.certificate import Certificate

_LEAST = 2  # minimum tokens of a document, so that one can be predicted


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """Documents as ids, each of at least two tokens.

    Attributes:
        documents: the documents, in order.
        source: description of their origin.
    """

    documents: tuple[tuple[int, ...], ...]
    source: str

    @property
    def tokens(self) -> int:
        """Number of tokens of all documents."""
        return sum(map(len, self.documents))

    def record(self) -> ProbeRecord:
        """Describe the probe by content."""
        return ProbeRecord(
            source=self.source,
            documents=len(self.documents),
            tokens=self.tokens,
            sha256=digest([list(ids) for ids in self.documents]),
        )


def probe_of_rows(
    sides: Mapping[str, Sequence[TrainingPair]],
    tokenizer: Tokenizer,
    labelling: Labelling,
    tokens: int,
) -> Probe:
    """Take complete rows, encoded as for training, until there are enough tokens.

    Args:
        sides: sides of the split by name, in order of preference; later ones are used if a small
            corpus has too few held-out rows.
        tokenizer: the tokenizer, with its chat template.
        labelling: settings that turn rows into documents, with their length limit.
        tokens: minimum number of tokens, if there are enough rows.

    Raises:
        DataError: the template corrupts a row, or no row has two tokens.
    """
    documents: list[tuple[int, ...]] = []
    used = []
    for name, pairs in sides.items():
        missing = tokens - sum(map(len, documents))
        if missing <= 0:
            break
        found = _taken(pairs, tokenizer, labelling, missing)
        if found:
            used.append(f"{len(found)} of {name}")
        documents += found
    if not documents:
        raise DataError("there is no row to compare on", where="parity", expected="held-out rows")
    return Probe(documents=tuple(documents), source=f"rows: {', '.join(used)}")


def _taken(
    pairs: Sequence[TrainingPair], tokenizer: Tokenizer, labelling: Labelling, tokens: int
) -> list[tuple[int, ...]]:
    """Encode a few rows at a time until there are enough tokens."""
    found: list[tuple[int, ...]] = []
    for start in range(0, len(pairs), 16):
        encoded = encode(pairs[start : start + 16], tokenizer, labelling)
        for i in range(len(encoded)):
            ids = encoded.ids[encoded.offsets[i] : encoded.offsets[i + 1]].tolist()
            if len(ids) >= _LEAST:
                found.append(tuple(ids))
            tokens -= len(ids)
            if tokens <= 0:
                return found
    return found


def probe_of_text(path: Path, tokenizer: Tokenizer, *, seq_len: int, tokens: int) -> Probe:
    """Take a file's text from its beginning, in pieces of ``seq_len`` tokens.

    Raises:
        DataError: the file cannot be read, is not UTF-8, or is too short.
    """
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            "is not readable text",
            where="parity.text",
            found=f"{path}: {error}",
            expected="a file in UTF-8",
        ) from error
    (ids,) = tokenizer.encode_all([text])
    if len(ids) < tokens:
        raise DataError(
            "the text is too short to compare on",
            where="parity.text",
            found=f"{path}: {len(ids)} tokens",
            expected=f"parity.tokens={tokens} or more",
            remedy="name a longer text, or lower parity.tokens",
        )
    pieces = [tuple(ids[start : start + seq_len]) for start in range(0, tokens, seq_len)]
    documents = tuple(piece for piece in pieces if len(piece) >= _LEAST)
    return Probe(documents=documents, source=f"text: {path.name}")


def adapter_errors(
    manifest: AdapterManifest, tensors: Tensors, after: AdapterManifest, after_tensors: Tensors
) -> dict[str, TensorError]:
    """Compare ``s · B A`` and every other tensor, layer by layer.

    Args:
        manifest: manifest of the source adapter.
        tensors: tensors of the source adapter.
        after: manifest of the output, read back.
        after_tensors: tensors of the output.

    Returns:
        The errors by logical layer, plus ``….<part>`` for other tensors, such as magnitudes.

    Raises:
        DataError: the layers of the two forms differ.
    """
    if set(manifest.layer_order) != set(after.layer_order):
        odd = sorted(set(manifest.layer_order) ^ set(after.layer_order))
        raise DataError("the written adapter has other layers", found=", ".join(odd[:8]))
    errors = {}
    parts = dict.fromkeys((*manifest.form.tensors, *after.form.tensors))
    others = [part for part in parts if part not in HALVES]
    for layer in manifest.layer_order:
        if manifest.form.has_pair:
            before_OI = _delta(manifest, tensors, layer)
            errors[layer] = _error(before_OI, _delta(after, after_tensors, layer))
        for name in (f"{layer}.{part}" for part in others):
            errors[name] = _error(_values(tensors, name), _values(after_tensors, name))
    return errors


def _delta(manifest: AdapterManifest, tensors: Tensors, layer: str) -> npt.NDArray[np.float64]:
    A_RI, B_OR = _values(tensors, f"{layer}.lora_a"), _values(tensors, f"{layer}.lora_b")
    return manifest.scale_of(layer) * (B_OR @ A_RI)


def _values(tensors: Tensors, name: str) -> npt.NDArray[np.float64]:
    if name not in tensors:
        raise DataError("the two forms have other tensors", found=f"no {name} in one of them")
    return tensors[name].astype(np.float64)


def _error(before: npt.NDArray[np.float64], after: npt.NDArray[np.float64]) -> TensorError:
    if before.shape != after.shape:
        raise DataError(
            "the written adapter has another shape", found=after.shape, expected=str(before.shape)
        )
    apart, size = after - before, float(np.linalg.norm(before))
    return TensorError(
        max_abs=float(np.abs(apart).max()),
        relative=float(np.linalg.norm(apart)) / (size or 1.0),
    )


CARD_NAME = "README.md"
_LISTED = 4


def hashes_of(directory: Path) -> dict[str, str]:
    """Return the SHA-256 of a file, or of all files below a directory except its certificate."""
    if directory.is_file():
        return {"": sha256_file(directory)}
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {
        path.relative_to(directory).as_posix(): sha256_file(path)
        for path in files
        if path != directory / CERTIFICATE
    }


def rejected_place(out: Path) -> Path:
    """Return the path for an output that its certificate rejected."""
    return out.with_name(f"{out.name}.rejected")


def certificate_place(out: Path) -> Path:
    """Return the path of a certificate: inside a directory, or next to a file."""
    return out / CERTIFICATE if out.is_dir() else out.with_name(f"{out.name}.{CERTIFICATE}")


def certified_place(certificate: Path) -> Path:
    """Return the output, or the run that wrote it, of a certificate's path."""
    if certificate.name == CERTIFICATE:
        return certificate.parent
    return certificate.with_name(certificate.name.removesuffix(f".{CERTIFICATE}"))


def keep_or_set_aside(temporary: Path, out: Path, certificate: Certificate, card: str = "") -> None:
    """Store the certificate with its output, and set both aside if it failed.

    Args:
        temporary: the directory or file, before the move into place.
        out: the final path; the caller moves ``temporary`` there.
        certificate: certificate of ``temporary``.
        card: Markdown section for the directory's model card, if it has one.

    Raises:
        GateError: it is over the budget and not accepted; it is now next to ``out``.
    """
    kept = certificate.passed or certificate.accepted
    aside = rejected_place(out)
    if temporary.is_dir():
        _tell(temporary, certificate, card)
        certificate.write(temporary / CERTIFICATE)
    else:
        certificate.write(certificate_place(out if kept else aside))
    if kept:
        return
    if aside.is_dir():
        shutil.rmtree(aside)
    temporary.replace(aside)
    over = certificate.exceeded()
    more = f" and {len(over) - _LISTED} more" if len(over) > _LISTED else ""
    raise GateError(
        "the written model differs from the trained one",
        where=str(aside),
        found="; ".join(over[:_LISTED]) + more,
        expected="within parity.budget",
        remedy=f"read {CERTIFICATE} there; parity.accept=true accepts it and records that",
    )


def _tell(directory: Path, certificate: Certificate, section: str) -> None:
    """Add the measurements to the model card of a directory, if it has one."""
    card = directory / CARD_NAME
    if card.is_file() and section:
        atomic.write_text(card, f"{card.read_text('utf-8')}\n{section}")
        certificate.files[CARD_NAME] = sha256_file(card)
