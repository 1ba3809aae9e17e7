"""Training speed compared with TRL and with the step's own matrix products, in turns.

    python benchmarks/throughput.py [overrides …]

Non-padding tokens a second over whole optimizer steps. Each arm trains the main job's model on the
main job's rows in a process of its own, and the arms step in turns: mens_exp with and without
LoRA dropout, and TRL's SFTTrainer, padded and packed, each with as many tokens per step as the
batches of mens_exp have. The products of a step are also computed alone: every matrix product of
its forward and backward pass, with the same shapes, strides and types, in another process, so that
they do not count in a peak. No training loop over the same products takes less time than they do.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import tempfile
import time
import warnings
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import record
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mens_exp.artifacts.host import peak_rss_bytes
from mens_exp.config.overrides import check
from mens_exp.corpus.source import load_rows
from mens_exp.data.datamodule import RowsDataModule
from mens_exp.errors import Problems
from mens_exp.model.sources import resolve
from mens_exp.objective.causal import Passed
from mens_exp.planning.preflight import writable_cache
from mens_exp.tokenizer.load import load_tokenizer
from mens_exp.training.build import build_backend, build_module, lightning_quiet
from mens_exp.training.optimizer import build_optimizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from mens_exp.config.root import RunConfig

QUESTION = "How many tokens a second does the main job train on, compared with TRL?"
ROUNDS = 4
STEPS = 2  # optimizer steps timed in each round
GEMM_WIDTH = 2048
SMALLEST = (
    *("model=tiny_llama", "data=synthetic", "data.rows=40", "data.seq_len=1024"),
    "trainer.accumulate_grad_batches=1",
)
SMALLEST_GEMM_WIDTH = 256
PADDED = 4  # documents per micro-batch of TRL's padded arm
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "addmm_", "baddbmm_")


def main() -> None:
    """Measure the arms in turns."""
    parser = record.command_line(__file__, __doc__)
    parser.add_argument("overrides", nargs="*", help="of the main job")
    given = record.begin(parser)
    small = given.smallest
    rounds, width = (1, SMALLEST_GEMM_WIDTH) if small else (ROUNDS, GEMM_WIDTH)
    overrides = ["trainer=cpu", *(SMALLEST if small else ()), *given.overrides]
    arms = {name: Remote(name, overrides, width) for name in _names()}
    for arm in arms.values():
        arm.ask("step")
    rates: dict[str, list[float]] = {name: [] for name in arms}
    main_arm, alone = arms["dropout 0.05"], Remote("dropout 0.05", overrides, width)
    gemm, seconds, products = [], [], []
    for _ in range(rounds):
        for name, arm in arms.items():
            tokens, duration = arm.ask("step")
            rates[name].append(tokens / duration)
            if arm is main_arm:
                seconds.append(duration / STEPS)
                products.append(alone.ask("products"))
                gemm.append(alone.ask("gemm"))
    higher, lower = record.Better.HIGHER, record.Better.LOWER
    ours = rates["dropout 0.05"]
    figures = [
        record.figure(name, rates[name], "tokens/s", higher, ("bf16 GEMM, GFLOP/s", gemm))
        for name in ("dropout 0.0", "dropout 0.05")
    ]
    figures += [
        record.figure(f"dropout 0.05 against {name}", ours, "tokens/s", higher, (name, rates[name]))
        for name in arms
        if name.startswith("TRL")
    ]
    reference = ("its matrix products alone", products)
    figures.append(record.figure("a step, dropout 0.05", seconds, "s", lower, reference))
    for name, arm in arms.items():
        figures.append(record.figure(f"peak memory, {name}", arm.ask("peak"), "GB", lower))
        arm.end()
    alone.end()
    record.finish(QUESTION, figures, given)


def _names() -> list[str]:
    ours = ["dropout 0.0", "dropout 0.05"]
    has_trl = all(importlib.util.find_spec(name) is not None for name in ("trl", "datasets"))
    return [*ours, *(["TRL, padded", "TRL, packed"] if has_trl else [])]


class Remote:
    """An arm in a process of its own."""

    def __init__(self, name: str, overrides: list[str], width: int) -> None:
        """Fork the process; this one computes nothing, so it has no threads that a fork loses."""
        context = multiprocessing.get_context("fork")
        self._here, there = context.Pipe()
        serve = _serve_trl if name.startswith("TRL") else _serve
        self._process = context.Process(target=serve, args=(there, name, overrides, width))
        self._process.start()
        there.close()

    def ask(self, what: str) -> Any:
        """Return the arm's answer to ``step``, ``products``, ``gemm`` or ``peak``."""
        self._here.send(what)
        return self._here.recv()

    def end(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.join()


@dataclass(frozen=True, slots=True)
class Inputs:
    """The configuration of an arm, its base model and its rows."""

    config: RunConfig
    base: Any
    tokenizer: Any
    data: RowsDataModule

    @classmethod
    def of(cls, overrides: list[str]) -> Inputs:
        """Resolve a command of the main job."""
        checked = check(overrides)
        Problems.raise_if(checked.problems)
        config, cache = checked.cells[0].config, writable_cache()
        base = resolve(config.model, cache)
        tokenizer = load_tokenizer(config.tokenizer, base.directory)
        rows = load_rows(config.data, cache)
        return cls(config, base, tokenizer, RowsDataModule(config, rows, tokenizer, cache))


# ------------------------------------------------------------------ mens_exp


def _serve(connection: Any, name: str, overrides: list[str], width: int) -> None:
    torch.use_deterministic_algorithms(mode=True)  # as in training on a CPU
    arm = Arm([*overrides, f"lora.dropout={name.split()[1]}"])
    answers: dict[str, Callable[[], Any]] = {
        "step": arm.steps,
        "products": arm.products,
        "gemm": lambda: gemm_gflops(width),
        "peak": _peak_gb,
    }
    while True:
        connection.send(answers[connection.recv()]())


class Arm:
    """One configuration in a manual training loop: forward, backward, optimizer."""

    def __init__(self, overrides: list[str]) -> None:
        """Build model, data, objective and optimizer as training does."""
        inputs = Inputs.of(overrides)
        self.config = inputs.config
        with lightning_quiet():
            self.backend = build_backend(self.config, inputs.base)
        self.objective = build_module(self.config, self.backend, inputs.data).objective
        self.stream = inputs.data.train_dataloader()
        self.optimizer = build_optimizer(self.config.optim, self.backend.trainable())
        self.position = 0

    def step(self) -> int:
        """Take one optimizer step and return its tokens."""
        tokens = 0
        for _ in range(self.config.trainer.accumulate_grad_batches):
            batch = self.stream.batch(self.position)
            self.position += 1
            self.backend.begin(batch.index)
            passed = Passed(batch, self.backend(batch), self.backend.head)
            loss = self.objective.loss(passed)
            loss.total.backward()  # type: ignore[no-untyped-call]
            tokens += batch.tokens
        self.optimizer.step()
        self.optimizer.zero_grad()
        return tokens

    def steps(self) -> tuple[int, float]:
        """Take a few steps, and return their tokens and seconds."""
        start = time.perf_counter()
        tokens = sum(self.step() for _ in range(STEPS))
        return tokens, time.perf_counter() - start

    def products(self) -> float:
        """Return the seconds that the matrix products of one step take alone."""
        with _Recorded() as recorded:
            self.step()
        return float(sum(many * _seconds(*one) for one, many in recorded.products.items()))


_Operand = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # shape, strides, type
_Product = tuple[str, tuple[_Operand, ...]]


class _Recorded(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own subclass hook
    """Counts the matrix products that are computed, by their operands."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.products: Counter[_Product] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in PRODUCTS:
            operands = [one for one in args if isinstance(one, torch.Tensor)]
            described = tuple((tuple(x.shape), tuple(x.stride()), x.dtype) for x in operands)
            self.products[name, described] += 1
        return func(*args, **(kwargs or {}))


def _seconds(name: str, operands: tuple[_Operand, ...]) -> float:
    """Return the seconds of one product, the shorter of two measurements."""
    tensors = [
        torch.randn(1 + sum((n - 1) * by for n, by in zip(shape, strides, strict=True)))
        .to(dtype)
        .as_strided(shape, strides)
        for shape, strides, dtype in operands
    ]
    function = getattr(torch.Tensor if name.endswith("_") else torch, name)
    function(*tensors)
    durations = []
    for _ in range(2):
        start = time.perf_counter()
        function(*tensors)
        durations.append(time.perf_counter() - start)
    return min(durations)


def gemm_gflops(width: int) -> float:
    """Return the bf16 GEMM rate of the CPU, in GFLOP/s."""
    a = torch.randn(width, width, dtype=torch.bfloat16)
    _ = a @ a
    start = time.perf_counter()
    for _ in range(10):
        _ = a @ a
    return 10 * 2 * width**3 / (time.perf_counter() - start) / 1e9


def _peak_gb() -> float:
    return (peak_rss_bytes() or 0) / 1e9


# ------------------------------------------------------------------ TRL


def _serve_trl(connection: Any, name: str, overrides: list[str], _: int) -> None:
    """Train with TRL as its QLoRA recipes do, except that activations are kept, as in mens_exp."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "TRL_EXPERIMENTAL_SILENCE": "1"}
    from datasets import Dataset, disable_progress_bars
    from peft import LoraConfig
    from transformers import AutoTokenizer, TrainerCallback
    from transformers.utils import logging
    from trl import SFTConfig, SFTTrainer

    disable_progress_bars()
    logging.disable_progress_bar()
    warnings.simplefilter("ignore")  # of deprecated names
    inputs = Inputs.of(overrides)
    config, documents = inputs.config, inputs.data.train_documents
    ids = [
        documents.ids[start:end].tolist()
        for start, end in zip(documents.offsets, documents.offsets[1:], strict=False)
    ]
    is_packed = name.endswith("packed")
    step_tokens = (
        config.data.seq_len * config.data.micro_batch_size * config.trainer.accumulate_grad_batches
    )
    mean = sum(map(len, ids)) / len(ids)
    batches = step_tokens / config.data.seq_len if is_packed else step_tokens / mean / PADDED
    tokens = Counter[str]()
    turns = _turns(connection, tokens)

    class Counted(SFTTrainer):  # type: ignore[misc]
        """Counts the tokens that are no padding."""

        def training_step(self, model: Any, inputs: Any, *further: Any) -> Any:
            """Count the batch, and train on it."""
            mask = inputs.get("attention_mask")
            tokens["seen"] += int(inputs["input_ids"].numel() if mask is None else mask.sum())
            return super().training_step(model, inputs, *further)

    class Steps(TrainerCallback):  # type: ignore[misc]
        """Waits at the start of a step until it is asked for."""

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            """Answer for the step before, and wait."""
            next(turns)

    with tempfile.TemporaryDirectory() as place:
        adapter = LoraConfig(
            r=config.lora.r,
            lora_alpha=config.lora.alpha,
            lora_dropout=0.05,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        )
        settings = SFTConfig(
            output_dir=place,
            max_length=config.data.seq_len,
            packing=is_packed,
            per_device_train_batch_size=config.data.micro_batch_size if is_packed else PADDED,
            gradient_accumulation_steps=max(round(batches), 1),
            gradient_checkpointing=False,  # as mens_exp decides for this model
            max_steps=10_000,  # the parent ends it
            bf16=True,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = Counted(
            model=_quantized(inputs.base.directory),
            args=settings,
            train_dataset=Dataset.from_list([{"input_ids": one} for one in ids]),
            processing_class=AutoTokenizer.from_pretrained(inputs.base.directory),
            peft_config=adapter,
            callbacks=[Steps()],
        )
        trainer.train()


def _quantized(directory: Path) -> Any:
    """Load a model in NF4 with double quantization, as QLoRA recipes do."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    return AutoModelForCausalLM.from_pretrained(
        directory,
        dtype=torch.bfloat16,
        quantization_config=quantization,
        device_map={"": "cpu"},
    )


def _turns(connection: Any, tokens: Counter[str]) -> Iterator[None]:
    """Answer the parent's requests; advance once per optimizer step."""
    while True:
        asked = connection.recv()
        if asked == "peak":
            connection.send(_peak_gb())
            continue
        tokens.clear()
        start = time.perf_counter()
        for _ in range(STEPS):
            yield
        connection.send((tokens["seen"], time.perf_counter() - start))


if __name__ == "__main__":
    main()
