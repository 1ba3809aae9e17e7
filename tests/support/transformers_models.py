"""Models loaded by transformers alone, as references."""

from __future__ import annotations


def of_transformers(directory, dtype, *, quant=None, **settings):
    """Load a model on the CPU as transformers' documentation does.

    bitsandbytes' own inference kernel for AVX512-BF16 is left out, which rounds otherwise:
    SmolLM2's loss is 2.2206 with it, and 2.2223 without it, in f32, and by ours (12 documents,
    experiments/LOG.md).

    Args:
        directory: of the model.
        dtype: of what is not quantized, and of the products.
        quant: "nf4" with double quantization, "int8", or None.
        settings: more arguments of `from_pretrained`.
    """
    from bitsandbytes.nn import Linear4bit
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    from mens_exp.model.quiet import quiet

    asked = {
        None: None,
        "int8": {"load_in_8bit": True},
        "nf4": {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
            "bnb_4bit_compute_dtype": dtype,
        },
    }[quant]
    config = None if asked is None else BitsAndBytesConfig(**asked)
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, quantization_config=config, **settings
        )
    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False
    return model
