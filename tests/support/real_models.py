"""Real weights and code: SmolLM2, a reduced SmolLM2, and functions of the standard library."""

from __future__ import annotations

import ast
import bisect
import calendar
import fractions
import heapq
import json
import shutil
import statistics
import string
import textwrap
from pathlib import Path

import pytest

CUT_LAYERS, CUT_TOKENS = 4, 8192


@pytest.fixture(scope="session")
def smollm2(shelf, cache):
    """Return SmolLM2 from the wheel, converted once for all workers."""
    pytest.importorskip("gguf", reason="needs mens-exp[gguf]: pip install 'mens-exp[gguf]'")
    from mens_exp.config.compose import compose, typed
    from mens_exp.model.sources import resolve

    model = typed(compose([["model=smollm2_135m"]])[0].values).model
    (made,) = (shelf("smollm2", lambda place: resolve(model, place)) / "models").glob("SmolLM2*")
    models = cache / "models"
    models.mkdir(exist_ok=True)
    if not (models / made.name).exists():
        (models / made.name).symlink_to(made)
    return resolve(model, cache)


@pytest.fixture(scope="session")
def smollm2_cut(shelf, smollm2):
    """Return a reduced SmolLM2 directory: real weights for a fraction of the work.

    Four of its thirty layers, and the first 8,192 of its 49,152 tokens: a byte-level BPE is whole
    at any number of merges.
    """
    from safetensors.torch import load_file, save_file

    def cut(place):
        whole = smollm2.directory
        shutil.copytree(whole, place, ignore=shutil.ignore_patterns("*.safetensors", "mens_exp*"))
        config = json.loads((place / "config.json").read_text("utf-8"))
        config |= {"num_hidden_layers": CUT_LAYERS, "vocab_size": CUT_TOKENS}
        (place / "config.json").write_text(json.dumps(config), "utf-8")
        tokenizer = json.loads((place / "tokenizer.json").read_text("utf-8"))
        bpe = tokenizer["model"]
        bpe["vocab"] = {text: id_ for text, id_ in bpe["vocab"].items() if id_ < CUT_TOKENS}
        bpe["merges"] = [pair for pair in bpe["merges"] if "".join(pair) in bpe["vocab"]]
        (place / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
        weights = {
            name: values[:CUT_TOKENS].clone() if "embed_tokens" in name else values
            for name, values in load_file(whole / "model.safetensors").items()
            if not name.startswith("model.layers.") or int(name.split(".")[2]) < CUT_LAYERS
        }
        save_file(weights, place / "model.safetensors", metadata={"format": "pt"})

    return shelf("smollm2_cut", cut)


@pytest.fixture(scope="session")
def code_rows(shelf):
    """Return about a hundred documented library functions as rows that a model knows."""

    def write(path):
        rows = []
        for module in (bisect, calendar, fractions, heapq, shutil, statistics, string, textwrap):
            text = Path(module.__file__ or "").read_text("utf-8")
            for node in ast.walk(ast.parse(text)):
                words = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
                if words and len(words) < 400:
                    answer = ast.get_source_segment(text, node) or ""
                    rows.append({"prompt": f"Write {node.name}(). {words}", "response": answer})
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")

    return shelf("code_rows.jsonl", write)
