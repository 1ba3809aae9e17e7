"""format=gguf: a directory with the model as one GGUF file, a Modelfile and the hand-off record."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mens_exp.artifacts import atomic
from mens_exp.export import ollama
from mens_exp.export.gguf import write_gguf
from mens_exp.export.handoff import BackendFamily, Handoff, write_handoff
from mens_exp.tokenizer.hf import HfTokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from mens_exp.config.task import GgufDtype

__all__ = ["FILE", "export_gguf"]

FILE = "model.gguf"


def export_gguf(source: Path, target: Path, dtype: GgufDtype, *, base: str) -> None:
    """Write the export; its directory appears whole or not at all.

    Args:
        source: a complete Hugging Face directory.
        target: the directory to write.
        dtype: of the matrices.
        base: what the record calls the model.

    Raises:
        MissingExtra: gguf is not installed.
        ModelFileError: the model's files are missing or contradictory.
        RequestError: the model cannot be said in GGUF exactly.
        Problems: several of these.
    """
    tokenizer = HfTokenizer.from_directory(source)
    with atomic.directory(target) as directory:
        write_gguf(source, directory / FILE, dtype)
        text = ollama.modelfile(tokenizer, base=f"./{FILE}")
        (directory / ollama.FILE).write_text(text, encoding="utf-8", newline="\n")
        write_handoff(
            Handoff(
                backend_family=BackendFamily.OLLAMA,
                base_model=base,
                artifact_dir=".",
                tokenizer_source=FILE,
                prompt_format=(
                    "chatml" if ollama.is_chatml(tokenizer) else "the tokenizer's chat template"
                ),
                notes=f"{dtype.value}; also read by llama.cpp: llama-server -m {FILE}",
            ),
            directory,
        )
