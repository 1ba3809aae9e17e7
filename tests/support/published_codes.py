"""Write small layers as published checkpoints store them, with the packages that write those.

The files in tests/model/published were made by this program and are what the readers are held to.
It needs packages that the project does not: `pip install auto-round compressed-tensors`, then
`python tests/support/published_codes.py tests/model/published`. Each file has the tensors of one
layer of 64 outputs and 64 inputs, ``expected``, the values that the package itself gives, in f32,
and, as metadata, `quantization_config` and the package that wrote it.
"""

from __future__ import annotations

import json
import sys
from importlib import metadata
from pathlib import Path

import torch
from safetensors.torch import save_file

OUT = IN = 64
GROUP = 32


def weight():
    return torch.randn(OUT, IN, generator=torch.Generator().manual_seed(0)) * 0.1


def asymmetric(bits, group=GROUP):
    """Return scales that are exact in float16, and zero points ``[O, N]``, of plain rounding."""
    blocks = weight().view(OUT, -1, group)
    low, high = blocks.amin(-1).clamp(max=0), blocks.amax(-1).clamp(min=0)
    scales = ((high - low) / (2**bits - 1)).half().float()
    return scales, torch.round(-low / scales).clamp(1, 2**bits - 1)


def dense(module):
    """Return a layer's weight from its outputs for unit vectors, float32 ``[O, I]``."""
    module.scales = module.scales.float()
    with torch.no_grad():
        return module(torch.eye(IN)).T.contiguous()


def gptq(layout, bits, *, ordered=False):
    if layout == "gptq":
        from auto_round_extension.torch.qlinear_torch_zp import QuantLinear
    else:
        from auto_round_extension.torch.qlinear_torch import QuantLinear
    scales, zeros = asymmetric(bits)
    linear = torch.nn.Linear(IN, OUT, bias=False)
    order = torch.randperm(IN, generator=torch.Generator().manual_seed(1))
    linear.weight.data = weight()
    module = QuantLinear(bits, GROUP, IN, OUT, bias=False, g_idx=True)
    module.device = "cpu"
    module.pack(linear, scales, zeros, None, device="cpu")
    if ordered:  # like act-order, columns of a group are scattered
        module.g_idx = (torch.arange(IN) // GROUP)[order].to(torch.int32)
    names = ("qweight", "qzeros", "scales", "g_idx")
    tensors = {name: getattr(module, name).clone() for name in names}
    config = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": ordered}
    if layout != "gptq":
        config["checkpoint_format"] = layout
    return tensors, dense(module), config, "auto-round"


def awq():
    from auto_round.export.export_to_awq.utils import WQLinear_GEMM

    scales, zeros = asymmetric(4)
    linear = torch.nn.Linear(IN, OUT, bias=False)
    linear.weight.data = weight()
    module = WQLinear_GEMM.from_linear(
        linear, 4, GROUP, scales=scales.T.contiguous(), zeros=zeros.T.contiguous(), device="cpu"
    )
    tensors = {name: getattr(module, name).clone() for name in ("qweight", "qzeros", "scales")}
    from auto_round.export.export_to_awq.utils import dequantize_gemm

    values = dequantize_gemm(module.qweight, module.qzeros, module.scales.float(), 4, GROUP)
    config = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}
    return tensors, values.T.contiguous(), config, "auto-round"


def compressed(layout, **weights):
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    args = QuantizationArgs(**weights)
    of_float = args.type == "float" or layout == "int-quantized"
    inputs = QuantizationArgs(num_bits=8, type=args.type, dynamic=True, strategy="token")
    scheme = QuantizationScheme(
        targets=["Linear"], weights=args, input_activations=inputs if of_float else None
    )
    blocks, state = weight(), {"weight": weight()}
    if args.strategy in {"group", "tensor_group"}:
        blocks = blocks.view(OUT, -1, args.group_size)
    elif args.strategy == "block":
        rows, columns = args.block_structure
        tiles = blocks.view(OUT // rows, rows, IN // columns, columns)
        blocks = tiles.transpose(1, 2).flatten(2)
    elif args.strategy == "tensor":
        blocks = blocks.view(1, -1)
    elif args.strategy == "channel":
        blocks = blocks[:, None, :]
    extra = {}
    if layout == "nvfp4-pack-quantized":
        extra["global_scale"] = 448.0 * 6.0 / weight().abs().amax().reshape(1)
        state["weight_global_scale"] = extra["global_scale"]
    scale, zero = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args, **extra)
    if args.strategy == "tensor":
        scale, zero = scale.reshape(1), zero.reshape(1)
    state |= {"weight_scale": scale, "weight_zero_point": zero}
    compressor = BaseCompressor.get_value_from_registry(layout)
    tensors = compressor.compress(state, scheme)
    values = compressor.decompress(tensors, scheme)["weight"].float()
    if layout == "nvfp4-pack-quantized":  # the package's default is bf16
        from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
        from compressed_tensors.quantization.lifecycle.forward import dequantize

        values = dequantize(
            unpack_fp4_from_uint8(tensors["weight_packed"], OUT, IN, torch.float32),
            tensors["weight_scale"].float(),
            args=args,
            dtype=torch.float32,
            global_scale=tensors["weight_global_scale"],
        )
    tensors = {name: one.contiguous() for name, one in tensors.items() if one is not None}
    config = {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": json.loads(scheme.model_dump_json())},
        "ignore": ["lm_head"],
    }
    return tensors, values, config, "compressed-tensors"


FILES = {
    "gptq": lambda: gptq("gptq", 4),
    "gptq_8": lambda: gptq("gptq", 8),
    "gptq_2_ordered": lambda: gptq("gptq", 2, ordered=True),
    "gptq_v2": lambda: gptq("gptq_v2", 4),
    "awq": awq,
    "packed": lambda: compressed(
        "pack-quantized", num_bits=4, strategy="group", group_size=GROUP, symmetric=True
    ),
    "packed_zeros": lambda: compressed(
        "pack-quantized", num_bits=8, strategy="channel", symmetric=False
    ),
    "int8": lambda: compressed("int-quantized", num_bits=8, strategy="channel"),
    "fp8_block": lambda: compressed(
        "float-quantized", num_bits=8, type="float", strategy="block", block_structure=[32, 32]
    ),
    "fp8_tensor": lambda: compressed(
        "float-quantized", num_bits=8, type="float", strategy="tensor"
    ),
    "nvfp4": lambda: compressed(
        "nvfp4-pack-quantized",
        num_bits=4,
        type="float",
        strategy="tensor_group",
        group_size=16,
        scale_dtype="torch.float8_e4m3fn",
    ),
    "mxfp4": lambda: compressed(
        "mxfp4-pack-quantized",
        num_bits=4,
        type="float",
        strategy="group",
        group_size=32,
        scale_dtype="torch.uint8",
    ),
}


if __name__ == "__main__":
    place = Path(sys.argv[1])
    place.mkdir(parents=True, exist_ok=True)
    for name, make in FILES.items():
        tensors, expected, config, package = make()
        about = {
            "quantization_config": json.dumps(config),
            "written_by": f"{package} {metadata.version(package)}",
        }
        kept = {key: one.detach().contiguous() for key, one in tensors.items()}
        save_file(kept | {"expected": expected.detach()}, place / f"{name}.safetensors", about)
        shapes = {key: (list(one.shape), str(one.dtype)[6:]) for key, one in kept.items()}
        sys.stdout.write(f"{name}: {shapes}\n")
