"""Other fine-tuners' names for our settings, so that a message can give the name we use.

Names as their documentation has them; a name that several use stands for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

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

PEERS: dict[str, Peer] = {
    "learning_rate": Peer("optim.lr", f"{_HF}, {_AX} and {_LF}"),
    "weight_decay": Peer("optim.weight_decay", f"{_HF}, {_AX} and {_LF}"),
    "adam_beta1": Peer("optim.betas", _HF, "optim.betas=[<beta1>,<beta2>]"),
    "adam_beta2": Peer("optim.betas", f"{_HF} and {_AX}", "optim.betas=[<beta1>,<beta2>]"),
    "adam_epsilon": Peer("optim.eps", f"{_HF} and {_AX}"),
    "optimizer": Peer("optim", f"{_AX}, torchtune and LitGPT", "optim=adamw"),
    "num_train_epochs": Peer("trainer.max_epochs", f"{_HF} and {_LF}"),
    "num_epochs": Peer("trainer.max_epochs", _AX),
    "epochs": Peer("trainer.max_epochs", "torchtune and LitGPT"),
    "max_steps_per_epoch": Peer("trainer.max_steps", "torchtune"),
    "per_device_train_batch_size": Peer("data.micro_batch_size", f"{_HF} and {_LF}"),
    "micro_batch_size": Peer("data.micro_batch_size", f"{_AX} and LitGPT"),
    "batch_size": Peer("data.micro_batch_size", "torchtune and H2O LLM Studio"),
    "global_batch_size": Peer(
        "trainer.accumulate_grad_batches",
        "LitGPT",
        "data.micro_batch_size=… and trainer.accumulate_grad_batches=…, whose product it is",
    ),
    "gradient_accumulation_steps": Peer(
        "trainer.accumulate_grad_batches", f"{_HF}, {_AX}, {_LF} and torchtune"
    ),
    "accumulate": Peer("trainer.accumulate_grad_batches", "shorter command lines"),
    "cutoff_len": Peer("data.seq_len", _LF),
    "max_seq_length": Peer("data.seq_len", f"{_UN}, older TRL and LitGPT"),
    "max_seq_len": Peer("data.seq_len", "torchtune"),
    "max_length": Peer("data.seq_len", "TRL"),
    "sequence_len": Peer("data.seq_len", _AX),
    "lora_rank": Peer("lora.r", f"{_LF} and torchtune"),
    "lora_r": Peer("lora.r", f"{_AX} and LitGPT"),
    "lora_alpha": Peer("lora.alpha", f"{_PEFT}, {_AX}, {_LF}, torchtune and LitGPT"),
    "lora_dropout": Peer("lora.dropout", f"{_PEFT}, {_AX}, {_LF}, torchtune and LitGPT"),
    "lora_target": Peer("lora.targets", _LF),
    "lora_target_modules": Peer("lora.targets", f"{_AX} and TRL"),
    "target_modules": Peer("lora.targets", f"{_PEFT} and {_UN}"),
    "lora_target_linear": Peer("lora", _AX, "lora=all_linear"),
    "finetuning_type": Peer("backend", _LF, "backend=qlora"),
    "load_in_4bit": Peer("backend", f"Transformers, {_AX} and {_UN}", "backend=qlora"),
    "load_in_8bit": Peer("quant", f"Transformers, {_AX} and {_UN}", "quant=int8"),
    "quantization_bit": Peer("backend", _LF, "backend=qlora"),
    "quantize": Peer("quant.quant_type", "LitGPT"),
    "bnb_4bit_quant_type": Peer("quant.quant_type", f"Transformers and {_BNB}"),
    "bnb_4bit_use_double_quant": Peer("quant.double_quant", f"Transformers and {_BNB}"),
    "double_quantization": Peer("quant.double_quant", _LF),
    "bnb_4bit_compute_dtype": Peer("quant.compute_dtype", f"Transformers and {_BNB}"),
    "lr_scheduler_type": Peer("schedule", f"{_HF} and {_LF}", "schedule=cosine"),
    "lr_scheduler": Peer("schedule", _AX, "schedule=cosine"),
    "warmup_ratio": Peer("schedule.warmup_frac", f"{_HF}, {_AX} and {_LF}"),
    "warmup_steps": Peer("schedule.warmup_steps", f"{_HF}, {_AX} and {_LF}"),
    "num_warmup_steps": Peer("schedule.warmup_steps", "torchtune"),
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
    "val_size": Peer("data.val_frac", _LF),
    "val_set_size": Peer("data.val_frac", _AX),
    "packing": Peer("data.packing", f"TRL, {_LF} and {_UN}"),
    "sample_packing": Peer("data.packing", _AX),
    "train_on_inputs": Peer("objective", _AX, "objective=causal (true), objective=assistant"),
    "train_on_prompt": Peer("objective", _LF, "objective=causal (true), objective=assistant"),
    "assistant_only_loss": Peer("objective", "TRL", "objective=assistant (true)"),
    "mask_prompt": Peer("objective", "LitGPT", "objective=assistant (true)"),
    "chat_template": Peer("tokenizer.chat_template", f"{_AX} and TRL"),
    "output_dir": Peer("hydra.run.dir", f"{_HF}, {_AX} and {_LF}"),
    "out_dir": Peer("hydra.run.dir", "LitGPT"),
    "max_grad_norm": Peer("trainer.gradient_clip_val", f"{_HF}, {_AX} and {_LF}"),
    "gradient_clipping": Peer("trainer.gradient_clip_val", "DeepSpeed and H2O LLM Studio"),
    "gradient_checkpointing": Peer("model.gradient_checkpointing", f"{_HF}, {_AX} and {_UN}"),
    "report_to": Peer("logger", _HF, "logger=wandb, logger=tensorboard or logger=csv"),
    "use_wandb": Peer("logger", _AX, "logger=wandb"),
    "wandb_project": Peer("logger.project", _AX),
    "run_name": Peer("logger.name", _HF),
    "save_steps": Peer("checkpoint.every_n_steps", f"{_HF}, {_AX} and {_LF}"),
    "save_total_limit": Peer("checkpoint.keep", f"{_HF} and {_AX}"),
    "eval_steps": Peer("trainer.val_check_interval", f"{_HF}, {_AX} and {_LF}"),
    "load_best_model_at_end": Peer("adapter.select", _HF, "adapter.select=best"),
    "metric_for_best_model": Peer("adapter.metric", _HF),
    "early_stopping_patience": Peer("callbacks.early_stopping.patience", f"{_HF} and {_AX}"),
    "resume_from_checkpoint": Peer("resume", f"{_HF}, {_AX} and torchtune", "resume=<run>|latest"),
    "neftune_noise_alpha": Peer(None, f"TRL, {_AX} and {_LF}"),
    "use_flash_attention_2": Peer(None, "Transformers"),
    "flash_attention": Peer(None, _AX),
    "deepspeed": Peer(None, f"{_HF} and {_AX}"),
}


def peer_of(key: str) -> Peer | None:
    """Return what a key that we do not know means elsewhere; its last part counts."""
    return PEERS.get(key.rpartition(".")[2])
