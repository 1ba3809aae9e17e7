"""Other fine-tuners' names for our settings, so that a message can give the name we use.

Names as their documentation has them; a name that several use stands for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mens_exp.config.store import declarations

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["PEERS", "Peer", "peer_of"]


@dataclass(frozen=True, slots=True)
class Peer:
    """One foreign name.

    Attributes:
        ours: the key or the group that it means here; None where we offer no such thing.
        used_by: who calls it so.
        how: what to write, where a key alone would not do.
    """

    ours: str | None
    used_by: str
    how: str | None = None


_HF = "Transformers and TRL"
_AX = "Axolotl"
_LF = "LLaMA-Factory"
_PEFT = "PEFT"
_BNB = "bitsandbytes"
_UN = "Unsloth"

# Names of what is more, or other, than one setting of ours; the rest stand in the declarations.
_OTHERS: dict[str, Peer] = {
    "adam_beta1": Peer("optim.betas", _HF, "optim.betas=[<beta1>,<beta2>]"),
    "adam_beta2": Peer("optim.betas", f"{_HF} and {_AX}", "optim.betas=[<beta1>,<beta2>]"),
    "optimizer": Peer("optim", f"{_AX}, torchtune and LitGPT", "optim=adamw"),
    "global_batch_size": Peer(
        "trainer.accumulate_grad_batches",
        "LitGPT",
        "data.micro_batch_size=… and trainer.accumulate_grad_batches=…, whose product it is",
    ),
    "lora_target_linear": Peer("lora", _AX, "lora=all_linear"),
    "finetuning_type": Peer("backend", _LF, "backend=qlora"),
    "load_in_4bit": Peer("backend", f"Transformers, {_AX} and {_UN}", "backend=qlora"),
    "load_in_8bit": Peer("quant", f"Transformers, {_AX} and {_UN}", "quant=int8"),
    "quantization_bit": Peer("backend", _LF, "backend=qlora"),
    "lr_scheduler_type": Peer("schedule", f"{_HF} and {_LF}", "schedule=cosine"),
    "lr_scheduler": Peer("schedule", _AX, "schedule=cosine"),
    "base_model": Peer("model.id", _AX, "model=hf model.id=<hub id or directory>"),
    "model_name_or_path": Peer(
        "model.id", f"{_HF} and {_LF}", "model=hf model.id=<hub id or directory>"
    ),
    "model_name": Peer("model.id", _UN, "model=hf model.id=<hub id or directory>"),
    "checkpoint_dir": Peer(
        "model.id", "torchtune and LitGPT", "model=hf model.id=<hub id or directory>"
    ),
    "dataset_path": Peer("data.path", "TRL", "data=jsonl data.path=<file>"),
    "dataset_name": Peer("data.id", "TRL", "data=hub data.id=<id>, or data=jsonl data.path=<file>"),
    "dataset": Peer("data.path", _LF, "data=jsonl data.path=<file>"),
    "datasets": Peer("data.path", _AX, "data=jsonl data.path=<file>"),
    "train_on_inputs": Peer("objective", _AX, "objective=causal (true), objective=assistant"),
    "train_on_prompt": Peer("objective", _LF, "objective=causal (true), objective=assistant"),
    "assistant_only_loss": Peer("objective", "TRL", "objective=assistant (true)"),
    "mask_prompt": Peer("objective", "LitGPT", "objective=assistant (true)"),
    "output_dir": Peer("hydra.run.dir", f"{_HF}, {_AX} and {_LF}"),
    "out_dir": Peer("hydra.run.dir", "LitGPT"),
    "report_to": Peer("logger", _HF, "logger=wandb, logger=tensorboard or logger=csv"),
    "use_wandb": Peer("logger", _AX, "logger=wandb"),
    "load_best_model_at_end": Peer("adapter.select", _HF, "adapter.select=best"),
    "resume_from_checkpoint": Peer("resume", f"{_HF}, {_AX} and torchtune", "resume=<run>|latest"),
    "neftune_noise_alpha": Peer(None, f"TRL, {_AX} and {_LF}"),
    "use_flash_attention_2": Peer(None, "Transformers"),
    "flash_attention": Peer(None, _AX),
    "deepspeed": Peer(None, f"{_HF} and {_AX}"),
}


def _of_settings() -> Iterator[tuple[str, Peer]]:
    """Yield the names that declarations of settings say others have for them."""
    for path, several in declarations().items():
        for about in several:
            for name, used_by in (about.aliases or {}).items():
                yield name, Peer(path, used_by)


PEERS: dict[str, Peer] = {**dict(_of_settings()), **_OTHERS}


def peer_of(key: str) -> Peer | None:
    """Return what a key that we do not know means elsewhere; its last part counts."""
    return PEERS.get(key.rpartition(".")[2])
