"""The processes that benchmarks/gpu.py steps in turns: mens_exp, TRL and Unsloth on one GPU.

    python benchmarks/gpu_arms.py <arm> <shape> <mailbox> <cuda|cpu>

Each arm is a separate process with its own allocator, so that peaks are separate and no library
patches another. All arms train on the same token ids, with a model of the same shape whose random
weights are drawn on the device; only the header of a checkpoint is on disk. The training loop of
each library is unchanged. `Turns` blocks it at the start of a step until the parent gives it a
turn, and measures the time from the start of one step to the start of the next.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import string
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from mens_exp.config.overrides import Cell
    from mens_exp.config.root import RunConfig
    from mens_exp.data.datamodule import RowsDataModule
    from mens_exp.model.sources import BaseModel

# Dimensions of Llama-3.1-8B; 16 GB of bf16 weights are drawn for it.
LLAMA_8B = (
    *("model=random", "model.name=llama_8b_shape", "model.dtype=bf16"),
    *("model.hidden_size=4096", "model.intermediate_size=14336", "model.num_hidden_layers=32"),
    *("model.num_attention_heads=32", "model.num_key_value_heads=8", "model.vocab_size=128256"),
    *("model.max_position_embeddings=8192", "model.tie_word_embeddings=false"),
)
# Common to all arms: NF4 with double quantization, r 16 on seven projections, every token
# supervised. Unsloth's kernels require LoRA without dropout.
ALIKE = (
    *("backend=qlora", "objective=causal", "lora=all_linear", "lora.r=16", "lora.alpha=16"),
    *("lora.dropout=0", "optim.lr=2e-4", "schedule=constant", "schedule.warmup_steps=0"),
    *("trainer.accumulate_grad_batches=1", "logger=none", "suite=none", "data=jsonl"),
    *("data.val_frac=0.1", "data.heldout_frac=0.1", "data.contract.probe=false"),
    "trainer.max_steps=10000",  # the parent ends it
)
R, ALPHA, RATE = 16, 16, 2e-4
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
STD = 0.02  # of the weights, as in Llama's initialization
OURS, UNCHECKPOINTED = "mens_exp", "mens_exp without checkpointing"
FP8 = "mens_exp in FP8"
LIGER = "mens_exp with Liger-Kernel"  # our other arms run without it
TRL, UNSLOTH = "TRL", "Unsloth"
NEEDS = {
    LIGER: ("liger_kernel", "triton"),
    TRL: ("trl", "datasets"),
    UNSLOTH: ("unsloth", "trl", "datasets"),
}
WARM_UP = 2  # steps in which kernels are selected and moments allocated
POLL_S = 0.005
ROWS = 60
GIB = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A micro-batch: ``blocks`` of ``seq_len`` tokens, filled with documents of one length."""

    blocks: int
    seq_len: int
    document: int
    model: tuple[str, ...]
    steps: int  # per turn

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.blocks * self.seq_len


TINY = ("model=tiny_llama", "model.dtype=bf16", "model.tie_word_embeddings=false")
SHAPES = {
    "2x2048": Shape(blocks=2, seq_len=2048, document=2048, model=LLAMA_8B, steps=4),
    "1x8192": Shape(blocks=1, seq_len=8192, document=1024, model=LLAMA_8B, steps=3),
}
DRY = {
    "2x2048": Shape(blocks=2, seq_len=64, document=64, model=TINY, steps=2),
    "1x8192": Shape(blocks=1, seq_len=256, document=64, model=TINY, steps=2),
}


class Turns:
    """An arm's side of a mailbox, a directory for messages between parent and arm.

    The arm appends JSON lines to ``<slot>.said``. The parent creates ``<slot>.go.<number>`` for
    each turn, and ends the process after the last one.
    """

    def __init__(self, place: Path, slot: str, shape: Shape, *, on_gpu: bool) -> None:
        """Attach to the mailbox."""
        self.place, self.slot, self.shape, self.on_gpu = place, slot, shape, on_gpu
        self.facts: dict[str, Any] = {}
        self._starts: list[float] = []
        self._started, self._turn = 0, -1
        self._parent = os.getppid()

    def boundary(self) -> None:
        """Record the time at the start of a step, and wait before each turn."""
        if self._started == 0:
            reset_peak(on_gpu=self.on_gpu)
        self._synchronize()
        self._started += 1
        if self._started <= WARM_UP:
            return
        self._starts.append(time.perf_counter())
        if self._turn < 0:
            self._say({"ready": self.facts})
        elif len(self._starts) <= self.shape.steps:
            return
        else:
            pairs = zip(self._starts, self._starts[1:], strict=False)
            seconds = [after - before for before, after in pairs]
            self._say({"turn": self._turn, "seconds": seconds, **peaks(on_gpu=self.on_gpu)})
        self._wait()
        self._starts = [time.perf_counter()]

    def _wait(self) -> None:
        self._turn += 1
        while not (self.place / f"{self.slot}.go.{self._turn}").exists():
            if os.getppid() != self._parent:
                os._exit(1)  # the parent was killed, and nothing else would end this process
            time.sleep(POLL_S)

    def _say(self, line: dict[str, Any]) -> None:
        with (self.place / f"{self.slot}.said").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _synchronize(self) -> None:
        if self.on_gpu:
            import torch

            torch.cuda.synchronize()


def reset_peak(*, on_gpu: bool) -> None:
    """Reset the memory peak, which so far is that of loading."""
    if on_gpu:
        import torch

        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    else:
        from mens_exp.artifacts.host import reset_peak_rss

        reset_peak_rss()


def peaks(*, on_gpu: bool) -> dict[str, float]:
    """Return the allocator's peak in GiB, or the peak resident memory without a GPU."""
    if on_gpu:
        import torch

        return {
            "allocated_gib": torch.cuda.max_memory_allocated() / GIB,
            "reserved_gib": torch.cuda.max_memory_reserved() / GIB,
        }
    from mens_exp.artifacts.host import peak_rss_bytes

    return {"allocated_gib": (peak_rss_bytes() or 0) / GIB}


def main() -> None:
    """Run one arm until the parent ends it."""
    arm, shape, mailbox, device = sys.argv[1:]
    place, on_gpu = Path(mailbox), device == "cuda"
    os.environ["MENS_EXP_CACHE"] = str(place / "cache")
    os.environ |= {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "TRL_EXPERIMENTAL_SILENCE": "1"}
    chosen = (SHAPES if on_gpu else DRY)[shape]
    turns = Turns(place, slot_of(arm), chosen, on_gpu=on_gpu)
    own = place / slot_of(arm)
    own.mkdir()
    if arm in {OURS, UNCHECKPOINTED, FP8, LIGER}:
        _train_ours(arm, turns, own)
    elif arm == TRL:
        _train_trl(turns, own)
    else:
        _train_unsloth(turns, own)


def slot_of(arm: str) -> str:
    """Return an arm's name in the mailbox."""
    return arm.lower().replace(" ", "_").replace("-", "_")


def composed(arm: str, shape: Shape, rows: Path, *, on_gpu: bool) -> Cell:
    """Compose the configuration of an arm as the command line does.

    Raises:
        Problems: overrides are invalid.
    """
    from mens_exp.config.overrides import check
    from mens_exp.errors import Problems

    sizes = (f"data.seq_len={shape.seq_len}", f"data.micro_batch_size={shape.blocks}")
    recomputes = "off" if arm == UNCHECKPOINTED else "on"
    device = "trainer=gpu" if on_gpu else "trainer=cpu"
    overrides = [*shape.model, *ALIKE, *sizes, f"data.val_max_tokens={shape.seq_len}"]
    overrides.append(f"model.kernels={'liger' if arm == LIGER else 'torch'}")
    overrides.append(f"model.fp8={arm == FP8}")
    checked = check(
        [*overrides, device, f"data.path={rows}", f"model.gradient_checkpointing={recomputes}"]
    )
    Problems.raise_if(checked.problems)
    return checked.cells[0]


def prepared(
    arm: str, turns: Turns, own: Path
) -> tuple[Cell, BaseModel, RowsDataModule, dict[str, Any]]:
    """Return configuration, base, rows and plan of an arm; the weight file has only a header."""
    from mens_exp.corpus.source import load_rows
    from mens_exp.data.datamodule import RowsDataModule
    from mens_exp.planning.estimate import make_plan
    from mens_exp.planning.preflight import writable_cache
    from mens_exp.tokenizer.load import load_tokenizer

    rows = own / "rows.jsonl"
    write_rows(rows, turns.shape.document)
    cell = composed(arm, turns.shape, rows, on_gpu=turns.on_gpu)
    config, cache = cell.config, writable_cache()
    base = headers_only(config, own / "base")
    tokenizer = load_tokenizer(config.tokenizer, base.directory)
    # The length of a document is that of its text plus the template.
    spare = RowsDataModule(config, load_rows(config.data, cache), tokenizer, cache)
    added = int(spare.train_documents.lengths.max()) - turns.shape.document
    if added > 0:
        write_rows(rows, turns.shape.document - added)
    data = RowsDataModule(config, load_rows(config.data, cache), tokenizer, cache)
    lengths = {int(one) for one in data.train_documents.lengths}
    assert lengths == {turns.shape.document}, f"documents of {sorted(lengths)} tokens"
    return cell, base, data, make_plan(config, cache)


def write_rows(path: Path, letters: int) -> None:
    """Write rows whose answers have `letters` letters of one token each."""
    generator = random.Random(0)  # noqa: S311  # text to fill sequences with
    lines = [
        {
            "prompt": f"Write text {number:03}.",
            "response": "".join(generator.choices(string.ascii_lowercase, k=letters)),
        }
        for number in range(ROWS)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")


def headers_only(config: RunConfig, directory: Path) -> BaseModel:
    """Write a model directory whose weight file is sparse: names and shapes without values."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from mens_exp.artifacts.digest import digest
    from mens_exp.config.model import RandomModel
    from mens_exp.layout.checkpoint_files import SINGLE
    from mens_exp.layout.model_cache import random_config
    from mens_exp.model.sources import BaseModel, write_byte_level_tokenizer

    directory.mkdir()
    assert isinstance(config.model, RandomModel), "the shapes are of random models"
    values = random_config(config.model)
    described = AutoConfig.for_model(**values)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(described)
    skeleton.config.save_pretrained(directory)
    write_byte_level_tokenizer(directory)
    header, end = {}, 0
    for name, parameter in skeleton.state_dict().items():
        if name == "lm_head.weight" and skeleton.config.tie_word_embeddings:
            continue
        start, end = end, end + 2 * math.prod(parameter.shape)
        shape = [*parameter.shape]
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    with (directory / SINGLE).open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        file.truncate(file.tell() + end)  # sparse: uses no disk blocks
    return BaseModel(
        directory=directory,
        name=config.model.name,
        source="random",
        weights_sha256=digest(header),
        license=None,
    )


@contextlib.contextmanager
def weights_drawn_on(device: torch.device, mailbox: Path) -> Iterator[None]:
    """Make transformers load random weights drawn on the device instead of those of a file.

    The rest of loading is unchanged, including quantization. The bf16 weights exist until it is
    done, so only one arm loads at a time.
    """
    import torch
    from transformers import AutoConfig, PreTrainedModel

    from mens_exp.artifacts.host import file_lock

    real = vars(PreTrainedModel)["from_pretrained"]

    def drawn(cls: Any, /, name: Any, *arguments: Any, config: Any = None, **options: Any) -> Any:
        described = AutoConfig.from_pretrained(name) if config is None else config
        with torch.device("meta"):
            skeleton = cls(described)
        generator = torch.Generator(device).manual_seed(0)
        weights = {
            name: _drawn(one, generator, device) for name, one in skeleton.named_parameters()
        }
        options |= {"config": described, "state_dict": weights}
        return real.__func__(cls, None, *arguments, **options)

    with file_lock(mailbox / "loading.lock"):
        PreTrainedModel.from_pretrained = classmethod(drawn)
        try:
            yield
        finally:
            PreTrainedModel.from_pretrained = real
            torch.cuda.empty_cache()  # no-op without a GPU


def _drawn(like: torch.Tensor, generator: torch.Generator, device: torch.device) -> torch.Tensor:
    """Draw a weight; vectors, which are norm scales, are ones."""
    import torch

    made = torch.empty(like.shape, dtype=torch.bfloat16, device=device)
    return made.fill_(1) if like.dim() == 1 else made.normal_(0, STD, generator=generator)


def _train_ours(arm: str, turns: Turns, own: Path) -> None:
    """Build module and trainer as in a run, and fit."""
    from lightning import Callback

    from mens_exp.tasks.run import open_run
    from mens_exp.training.build import (
        build_backend,
        build_module,
        build_trainer,
        device_of,
        lightning_quiet,
    )

    class Steps(Callback):
        """Calls `Turns` at the start of each step."""

        def on_train_batch_start(self, *_: Any) -> None:
            """Wait for a turn, if this step begins one."""
            turns.boundary()

    cell, base, data, plan = prepared(arm, turns, own)
    config = cell.config
    with open_run(own / "run", cell) as run, lightning_quiet():
        with weights_drawn_on(device_of(config.trainer.accelerator), turns.place):
            backend = build_backend(config, base)
        module = build_module(config, backend, data)
        trainer = build_trainer(config, run, max_steps=data.max_steps)
        trainer.callbacks.append(Steps())  # type: ignore[attr-defined]
        memory = plan["memory_bytes"]
        turns.facts = {
            "plan_gib": memory["formula" if turns.on_gpu else "estimate"] / GIB,
            "recomputed": bool(backend.facts()["gradient_checkpointing"]),
            "kernels": backend.facts()["kernels"],
        }
        trainer.fit(module, data)


def documents_of(turns: Turns, own: Path) -> tuple[Any, Any]:
    """Return our training documents as a dataset of token ids, and the base."""
    from datasets import Dataset

    _, base, data, _ = prepared(OURS, turns, own)
    documents = data.train_documents
    ids = [
        documents.ids[start:end].tolist()
        for start, end in zip(documents.offsets, documents.offsets[1:], strict=False)
    ]
    return Dataset.from_list([{"input_ids": one} for one in ids]), base


def _sft(turns: Turns, own: Path, model: Any, rows: Any, tokenizer: Any, **options: Any) -> None:
    """Fit with TRL; documents of one length fill a batch without padding."""
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    class Steps(TrainerCallback):  # type: ignore[misc]
        """Calls `Turns` at the start of each step."""

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            """Wait for a turn, if this step begins one."""
            turns.boundary()

    shape, peft_config = turns.shape, options.pop("peft_config", None)
    settings = SFTConfig(
        output_dir=str(own / "sft"),
        max_length=shape.document,
        per_device_train_batch_size=shape.tokens // shape.document,
        gradient_accumulation_steps=1,
        max_steps=10_000,  # the parent ends it
        learning_rate=RATE,
        lr_scheduler_type="constant",
        bf16=True,
        use_cpu=not turns.on_gpu,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        **options,
    )
    trainer = SFTTrainer(
        model=model,
        args=settings,
        train_dataset=rows,
        processing_class=tokenizer,
        peft_config=peft_config,
        callbacks=[Steps()],
    )
    turns.facts = {"recomputed": bool(settings.gradient_checkpointing)}
    trainer.train()


def _train_trl(turns: Turns, own: Path) -> None:
    """Load with bitsandbytes' NF4 as in QLoRA recipes, and fit with TRL's defaults."""
    import torch
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

    rows, base = documents_of(turns, own)
    device = torch.device("cuda" if turns.on_gpu else "cpu")
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    with weights_drawn_on(device, turns.place):
        model = AutoModelForCausalLM.from_pretrained(
            base.directory,
            dtype=torch.bfloat16,
            quantization_config=quantization,
            device_map={"": device},
        )
    adapter = LoraConfig(
        r=R,
        lora_alpha=ALPHA,
        lora_dropout=0.0,
        target_modules=[*PROJECTIONS],
        task_type="CAUSAL_LM",
    )
    tokenizer = AutoTokenizer.from_pretrained(base.directory)
    _sft(turns, own, model, rows, tokenizer, peft_config=adapter)


def _train_unsloth(turns: Turns, own: Path) -> None:
    """Load and adapt as in Unsloth's notebooks, and fit with TRL as patched by Unsloth."""
    import torch
    import unsloth  # first, because it patches later imports
    from transformers import AutoTokenizer

    rows, base = documents_of(turns, own)
    with weights_drawn_on(torch.device("cuda"), turns.place):
        model, _ = unsloth.FastLanguageModel.from_pretrained(
            model_name=str(base.directory),
            max_seq_length=turns.shape.seq_len,
            dtype=torch.bfloat16,
            load_in_4bit=True,
        )
    model = unsloth.FastLanguageModel.get_peft_model(
        model,
        r=R,
        lora_alpha=ALPHA,
        lora_dropout=0,
        bias="none",
        target_modules=[*PROJECTIONS],
        use_gradient_checkpointing="unsloth",
        random_state=0,
    )
    _sft(turns, own, model, rows, AutoTokenizer.from_pretrained(base.directory))


if __name__ == "__main__":
    main()
