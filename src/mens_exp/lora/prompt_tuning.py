"""Prompt tuning (arXiv:2104.08691): trained vectors before the tokens of each document.

The model is frozen, and only the vectors learn. They extend the embedding table: in a table of V
rows, virtual token j has the id V + j. A sequence of ids with virtual tokens thus passes through
any code for ids: packing, padding, a cache of keys and values. As in PEFT, a vector replaces the
output of the embedding, whatever scale or position the model adds before or after it.

Shapes: B sequences, T tokens, K virtual tokens, D hidden width, V rows of the embedding table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from mens_exp.errors import ConfigError, ModelFileError
from mens_exp.lora.keyed import key_of
from mens_exp.lora.method import AdaptedLayer, AdapterMethod
from mens_exp.model.quiet import quiet

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path

    from mens_exp.config.lora import LoraConfig, PromptTuningConfig
    from mens_exp.layout.families import Family
    from mens_exp.layout.modules import LinearModule
    from mens_exp.rows.answers import TextEncoder


class PromptEmbedding(AdaptedLayer):
    """An embedding table with trained vectors ``[K, D]`` for the ids from V on."""

    def __init__(self, base: torch.nn.Module, one: LinearModule, lora: PromptTuningConfig) -> None:
        """Start with vectors of zero; `PromptTuning.draw` sets their values."""
        super().__init__(base)
        self.rows, self.start = one.out, lora.prompt_tuning_init.value
        device = next(base.parameters()).device
        zeros_KD = torch.zeros(lora.num_virtual_tokens, one.width, device=device)
        self.prompt_embeddings = torch.nn.Parameter(zeros_KD)

    @property
    def weight(self) -> Any:
        """The table ``[V, D]``; code of some models (Llama 4) asks for its device."""
        return self.get_base_layer().weight

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """Return the embeddings ``[B, T, D]``, in the dtype of the table."""
        if not self.adapts:
            found: torch.Tensor = self.base_layer(ids_BT)
            return found
        is_virtual_BT = ids_BT >= self.rows
        plain_BTD: torch.Tensor = self.base_layer(ids_BT.masked_fill(is_virtual_BT, 0))
        many = len(self.prompt_embeddings)
        # Other tokens look up a row of zeros without a gradient.
        extended_KD = torch.nn.functional.pad(self.prompt_embeddings, (0, 0, 0, 1))
        which_BT = (ids_BT - self.rows).masked_fill(~is_virtual_BT, many)
        virtual_BTD = torch.nn.functional.embedding(which_BT, extended_KD, padding_idx=many)
        return torch.where(is_virtual_BT[..., None], virtual_BTD.to(plain_BTD.dtype), plain_BTD)


class PromptTuning(AdapterMethod):
    """Prompt tuning on the input embedding of a causal model."""

    def layer(self, base: torch.nn.Module, one: LinearModule, lora: Any) -> AdaptedLayer:
        """Return the embedding with its vectors."""
        return PromptEmbedding(base, one, lora)

    def place(
        self, model: Any, lora: LoraConfig, modules: Sequence[LinearModule], family: Family
    ) -> tuple[Any, dict[str, Any]]:
        """Wrap the embedding table of a model in place; see `AdapterMethod.place`.

        Raises:
            ModelFileError: the model's code looks ids up in several tables.
        """
        (one,) = modules
        tables = _tables_of_ids(model, one.out)
        if tables != [one.path]:
            raise ModelFileError(
                "prompt tuning needs a model that looks token ids up in one table",
                where=type(model).__name__,
                found=", ".join(tables) or "no table",
                expected=f"{one.path}, of {one.out} rows",
                remedy="choose lora=all_linear, or another model",
            )
        return super().place(model, lora, modules, family)

    def virtual_ids(self, layers: Collection[Any]) -> list[int]:
        """Return the ids after those of the vocabulary, unless the adapter is disabled."""
        (layer,) = layers
        return list(range(layer.rows, layer.rows + len(layer.prompt_embeddings) * layer.adapts))

    def draw(self, layer: Any, *, seed: int, logical: str) -> None:
        """Draw vectors: a standard normal distribution, or embeddings of random tokens.

        A start from a text needs a tokenizer: see :meth:`start_from`.
        """
        generator = torch.Generator().manual_seed(key_of(seed, "prompt_embeddings", logical))
        shape_KD = layer.prompt_embeddings.shape
        if layer.start == "random":
            with torch.no_grad():
                layer.prompt_embeddings.copy_(torch.randn(shape_KD, generator=generator))
        else:
            ids_K = torch.randint(layer.rows, shape_KD[:1], generator=generator)
            self.start_from(layer, ids_K.tolist())

    def start_from(self, layer: Any, ids: Sequence[int]) -> None:
        """Start with the embeddings of tokens, repeated or cut to the number of vectors."""
        many = len(layer.prompt_embeddings)
        cycled = [ids[place % len(ids)] for place in range(many)]
        with torch.no_grad():
            ids_K = torch.tensor(cycled, device=layer.prompt_embeddings.device)
            layer.prompt_embeddings.copy_(layer.get_base_layer()(ids_K))

    def write_peft(self, model: Any, directory: Path, *, base: str, revision: str | None) -> None:
        """Write the files of a PEFT directory.

        The initialization is given as random, because PEFT would ask for the tokenizer of a text.
        """
        from peft import PromptTuningConfig as Settings
        from safetensors.torch import save_file

        (layer,) = (one for one in model.modules() if isinstance(one, PromptEmbedding))
        values_KD = layer.prompt_embeddings.detach().cpu().contiguous()
        settings = Settings(
            task_type="CAUSAL_LM",
            base_model_name_or_path=base,
            revision=revision,
            inference_mode=True,
            num_virtual_tokens=len(values_KD),
            token_dim=values_KD.shape[1],
            num_transformer_submodules=1,
            num_layers=model.config.num_hidden_layers,
            num_attention_heads=getattr(model.config, "num_attention_heads", 1),  # not read
        )
        settings.save_pretrained(directory)
        tensors = {"prompt_embeddings": values_KD}
        save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})


PROMPT_TUNING = PromptTuning()


def _tables_of_ids(model: Any, rows: int) -> list[str]:
    """Return the embedding tables that token ids are looked up in; a pass tells several apart."""
    tables = {
        module: path
        for path, module in model.named_modules()
        if isinstance(module, torch.nn.Embedding)
    }
    if len(tables) == 1:
        return [*tables.values()]
    ids_BT = torch.tensor([[rows - 1, rows - 3, rows - 2]], device=model.device)
    found: list[str] = []

    def note(module: Any, args: Any) -> None:
        if args and isinstance(args[0], torch.Tensor) and torch.equal(args[0], ids_BT):
            found.append(tables[module])

    hooks = [module.register_forward_pre_hook(note) for module in tables]
    try:
        with torch.no_grad(), quiet():
            model(input_ids=ids_BT, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def start_from_text(backend: Any, encoder: TextEncoder, text: str) -> dict[str, Any]:
    """Start the virtual tokens of a backend as those of a text, without special tokens.

    Returns:
        Facts for the record.

    Raises:
        ConfigError: the text has no tokens.
    """
    (ids,) = encoder.encode_all([text])
    if not ids:
        raise ConfigError(
            "the tokenizer finds no token in the text",
            where="lora.prompt_tuning_init_text",
            found=text,
            expected="a text of at least one token",
        )
    (layer,) = backend.layers.values()
    backend.method.start_from(layer, ids)
    return {"init_text_tokens": len(ids)}
