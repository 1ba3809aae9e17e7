"""The data-contract certificate of a training run: measured, recorded, and judged before step 1."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

from mens_exp.artifacts.code_digest import code_digest
from mens_exp.artifacts.data_contract import DataContract, StoredReference
from mens_exp.artifacts.digest import digest, sha256_file
from mens_exp.config.suite import AnsweredSuite
from mens_exp.corpus import contract_rules
from mens_exp.corpus.row_part import heldout_part, overlap_part, rows_part
from mens_exp.corpus.source import cache_key, labelling_of
from mens_exp.corpus.split import Side
from mens_exp.corpus.token_part import token_part
from mens_exp.errors import DataError, Problems, Refusals
from mens_exp.evals.catalogue import frozen_suite
from mens_exp.plan.parts import is_in_parts
from mens_exp.plan.preflight import writable_cache

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from mens_exp.artifacts.data_contract import OverlapPart
    from mens_exp.config.root import RunConfig
    from mens_exp.config.suite import SuiteConfig
    from mens_exp.corpus.source import Rows
    from mens_exp.data.datamodule import RowsDataModule
    from mens_exp.errors import MensError
    from mens_exp.model.resolve import BaseModel
    from mens_exp.tasks.run import Run
    from mens_exp.tokenizer.protocol import Tokenizer
    from mens_exp.training.contract_probe import Reference
    from mens_exp.training.module import TrainingModule

__all__ = ["certify_rows", "certify_steps", "compared_whole", "suite_part"]


def certify_rows(
    config: RunConfig, run: Run, rows: Rows, data: RowsDataModule, tokenizer: Tokenizer, cache: Path
) -> None:
    """Record what the rows became, and refuse what is over a limit; a run that passed does so once.

    Raises:
        GateError: a limit is passed.
        Refusals: several are.
    """
    known = run.manifest.data_contract
    if known is not None and not known["violations"]:
        return
    key = cache_key(config, rows, Side.TRAIN, tokenizer)
    documents, limits, labelling = data.train_documents, config.data.contract, labelling_of(config)
    kept = token_part(
        rows.train, documents, tokenizer, cache=cache, key=key, counts=data.train_counts
    )
    contract = DataContract(
        tokens=kept.tokens,
        rows=rows_part(rows, documents, tokenizer, labelling),
        overlap=[part for part in (heldout_part(rows), suite_part(config.suite, rows)) if part],
        probe=None,
        limits=dataclasses.asdict(limits),
        unknown={**kept.unknown, "probe": "not reached: it runs just before step 1"},
    )
    if not contract.overlap:
        contract.unknown["overlap"] = "no row is held out, and no suite has items of its own"
    notes = contract_rules.notes_of_tokens(contract.tokens, labelling)
    run.manifest.notes += [note for note in notes if note not in run.manifest.notes]
    found = [
        *contract_rules.of_tokens(contract.tokens, limits, labelling),
        *contract_rules.of_rows(contract.rows, limits),
        *(one for part in contract.overlap for one in contract_rules.of_overlap(part, limits)),
    ]
    _record(run, contract, found)


def certify_steps(
    config: RunConfig,
    run: Run,
    base: BaseModel,
    module: TrainingModule,
    data: RowsDataModule,
    compared: Reference | None = None,
) -> None:
    """Try the first batches on the model, once a run, and refuse what is out of tolerance.

    Args:
        config: the whole configuration.
        run: the open run.
        base: its base model.
        module: what will train.
        data: the rows.
        compared: what `compared_whole` returned, for a base that is in parts now.

    Raises:
        GateError: a trial failed.
        Refusals: several did.
    """
    node = run.manifest.data_contract
    assert node is not None, "the rows come first"
    contract = DataContract(**node)
    if contract.probe is not None:
        return
    if not config.data.contract.probe:
        contract.unknown["probe"] = "switched off by data.contract.probe=false"
        _record(run, contract, [])
        return
    from mens_exp.training.contract_probe import probe

    kept = _reference_path(config, run, base, module)
    known = _known_reference(kept)
    contract.probe = probe(config, module, data, compared if known is None else (known.part, None))
    del contract.unknown["probe"]
    _record(run, contract, list(contract_rules.of_probe(contract.probe)))
    found = contract.probe["reference"]
    if known is None and found is not None:  # within its tolerances
        kept.parent.mkdir(parents=True, exist_ok=True)
        StoredReference(part={**found, "from_cache": True}).write(kept)


def compared_whole(
    config: RunConfig, run: Run, base: BaseModel, module: TrainingModule, data: RowsDataModule
) -> Reference | None:
    """Compare a graph with transformers before its base is taken apart.

    Args:
        config: the whole configuration.
        run: the open run.
        base: its base model.
        module: what will train, with its base whole.
        data: the rows.

    Returns:
        None where it is known already, or nothing is to be tried.
    """
    node = run.manifest.data_contract
    assert node is not None, "the rows come first"
    if DataContract(**node).probe is not None or not config.data.contract.probe:
        return None
    from mens_exp.training.contract_probe import compare

    kept = _reference_path(config, run, base, module)
    return compare(module, data) if _known_reference(kept) is None else None


def _reference_path(config: RunConfig, run: Run, base: BaseModel, module: TrainingModule) -> Path:
    """Return where the comparison with transformers is kept for runs of the same graph and code.

    Weights are not a graph: config.json, and code beside it, say what is made of them.
    """
    graph = sorted([*base.directory.glob("*.py"), base.directory / "config.json"])
    # A base that will be in parts is whole in the host's memory alone.
    device = "cpu" if is_in_parts(config) else next(module.parameters()).device.type
    key = {
        "base": run.manifest.inputs["base_weights_sha256"],
        "graph": {file.name: sha256_file(file) for file in graph},
        "checkpointing": config.model.gradient_checkpointing,
        "backend": config.backend._target_,  # Hydra's own spelling
        "quant": repr(config.quant),
        "lora": repr(config.lora),
        "packing": config.data.packing,
        "device": device,
        "packages": run.manifest.provenance["packages"],
        "code": _code(),
    }
    return writable_cache() / "reference" / f"{digest(key)}.json"


_code = functools.cache(code_digest)  # of what this process has loaded


def _known_reference(path: Path) -> StoredReference | None:
    try:
        return StoredReference.read(path)
    except (DataError, Problems):
        return None


def suite_part(
    suite: SuiteConfig, rows: Rows, *, calls_functions: bool = False
) -> OverlapPart | None:
    """Compare rows to train on with the items of a suite.

    Args:
        suite: the suite; None comes back where it has no items of its own.
        rows: of the run.
        calls_functions: whether Python that task files name may be run in this process.
    """
    if not isinstance(suite, AnsweredSuite):
        return None
    items = frozen_suite(suite, calls_functions=calls_functions).items
    texts = ((item.id, f"{item.prompt}\n{item.reference}") for item in items)
    return overlap_part(rows.train, texts, f"suite={suite.name}")


def _record(run: Run, contract: DataContract, found: Sequence[MensError]) -> None:
    contract.violations += map(str, found)
    run.manifest.data_contract = contract.as_json()
    run.save()
    Refusals.raise_if(found)
