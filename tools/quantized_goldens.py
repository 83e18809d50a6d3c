"""Writes small models with quantised safetensors weights, and what their libraries decode from them.

    python3 tools/quantized_goldens.py [OUT [CASE ..]]   (default: crates/refrain-models/tests/goldens/quantized)

Needs torch, transformers, safetensors and compressed-tensors; the versions used are in each golden's metadata. Runs on
the CPU in a few seconds. Each case is a folder:

    config.json           with its quantization_config
    model.safetensors     the weights in parts, as the format stores them
    golden.safetensors    decoded: the last projection of the layer, tokens int64 [n], logits f32 [n, vocab]

The decoded weights are those of the format's own code: `compressed_tensors` decompresses its formats, `transformers`
dequantises fp8 (where blocks divide the matrix). AWQ and GPTQ have no code that runs without a GPU library, so their
formulas are written out here, from AutoAWQ 0.2.9 (`dequantize_gemm`) and GPTQModel 7.7 (`dequantize_weight` after adding 1 to
all zero points of the first version); `--autoawq FILE` compares with AutoAWQ's packing_utils.py itself. The logits are those of
`transformers` with the decoded weights. For formats that `transformers` loads on a CPU, the script also loads the folder with it
and compares.
"""

import importlib.util
import json
import pathlib
import sys

import torch
import transformers
from compressed_tensors.compressors import (
    FloatQuantizationCompressor,
    IntQuantizationCompressor,
    MXFP4PackedCompressor,
    PackedQuantizationCompressor,
)
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

CONFIG = dict(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=1,
    head_dim=16,
    max_position_embeddings=64,
    rms_norm_eps=1e-3,
    tie_word_embeddings=True,
    bos_token_id=1,
    eos_token_id=2,
)
N_TOKENS = 16
DECODED = "model.layers.0.mlp.down_proj"
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
generator = torch.Generator()


def normal(*shape):
    return torch.randn(*shape, generator=generator)


# fp8 in blocks, as DeepSeek and Qwen store it.


def fp8(config, block, static=False):
    def quantise(name, weight):
        rows, columns = block or weight.shape
        n_out, n_in = weight.shape
        down, across = -(-n_out // rows), -(-n_in // columns)
        padded = torch.zeros(down * rows, across * columns)
        padded[:n_out, :n_in] = weight
        largest = padded.view(down, rows, across, columns).abs().amax(dim=(1, 3))
        scale = largest / torch.finfo(torch.float8_e4m3fn).max
        spread = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[:n_out, :n_in]
        codes = (weight / spread).to(torch.float8_e4m3fn)
        decoded = codes.float() * spread
        if n_out % rows == 0 and n_in % columns == 0:
            library = Fp8Dequantize(None)._dequantize_one(codes, scale, output_dtype=torch.float32)
            assert torch.equal(library, decoded), name
        parts = dict(weight=codes, weight_scale_inv=scale if block else scale.reshape(()))
        if static:
            parts["activation_scale"] = torch.tensor(0.5)
        return parts, decoded

    scheme = "static" if static else "dynamic"
    settings = dict(quant_method="fp8", activation_scheme=scheme, weight_block_size=block, fmt="e4m3")
    return settings, quantise


# compressed-tensors.


def compressed(groups, format, overall=None, reordered=False):
    """`groups`: (targets, compressor, weight arguments, dtype of the scales). `reordered` columns have a group each, as
    older versions of the library stored them."""
    schemes = [
        (targets, compressor, QuantizationScheme(targets=targets, weights=QuantizationArgs(**args)), dtype)
        for targets, compressor, args, dtype in groups
    ]

    def scheme_of(name):
        for targets, *rest in schemes:
            if targets == ["Linear"] or any(target.removeprefix("re:.*") in name for target in targets):
                return rest
        raise ValueError(name)

    def quantise(name, weight):
        compressor, scheme, dtype = scheme_of(name)
        args = scheme.weights
        n_out, n_in = weight.shape
        size = dict(tensor=n_in, channel=n_in).get(args.strategy, args.group_size)
        parts = dict(weight=weight)
        g_idx = None
        groups = weight.reshape(n_out, n_in // size, size)
        if reordered:
            g_idx = torch.arange(n_in) // size
            g_idx = g_idx[torch.randperm(n_in, generator=generator)].to(torch.int32)
            groups = weight[:, torch.argsort(g_idx, stable=True)].reshape(n_out, n_in // size, size)
        if compressor is MXFP4PackedCompressor:
            scale = torch.exp2(torch.floor(torch.log2(groups.abs().amax(-1))) - 2).to(torch.bfloat16)
        else:
            low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
            if args.strategy == "tensor":
                low, high = low.min().reshape(1), high.max().reshape(1)
            most = 448.0 if args.type == "float" else 2 ** (args.num_bits - 1) - 0.5
            scale = torch.maximum(-low, high) / most
            if not args.symmetric:
                scale = (high - low) / (2**args.num_bits - 1)
                middle = 2 ** (args.num_bits - 1)
                parts["weight_zero_point"] = (torch.round(-low / scale) - middle).clamp(-middle, middle - 1).to(torch.int8)
            scale = scale.to(dtype)
        parts["weight_scale"] = scale
        if g_idx is not None:
            order = torch.argsort(g_idx, stable=True)
            parts["weight"] = weight[:, order]
        parts = compressor.compress(parts, scheme)
        decoded = compressor.decompress(dict(parts, weight_scale=scale_of(parts)), scheme)["weight"].float()
        assert ("weight_zero_point" in parts) != args.symmetric
        if g_idx is not None:
            # Groups of the stored columns, which are in their own order, are given by weight_g_idx.
            codes = dict(parts)
            back = torch.argsort(order)
            decoded = decoded[:, back]
            unpacked = compressor.decompress(dict(codes, weight_scale=torch.ones_like(scale)), scheme)["weight"]
            ordered = QuantizationScheme(targets=["Linear"], weights=args)
            whole = compressor.compress(
                dict(weight=unpacked[:, back].float(), weight_scale=torch.ones_like(scale)), ordered
            )
            parts["weight_packed"] = whole["weight_packed"]
            parts["weight_g_idx"] = g_idx
        return {name: part.contiguous() for name, part in parts.items()}, decoded

    def settings_of(targets, compressor, scheme, dtype):
        weights = json.loads(scheme.weights.model_dump_json(exclude_none=True))
        if reordered:
            weights["actorder"] = "group"
        return dict(targets=targets, weights=weights, format=format[compressor])

    def scale_of(parts):
        # As in a model of float32: otherwise values are rounded to the type of the scales.
        scale = parts["weight_scale"]
        return scale.float() if scale.is_floating_point() else scale

    settings = dict(
        quant_method="compressed-tensors",
        format=overall or format[schemes[0][1]],
        quantization_status="compressed",
        ignore=["lm_head"],
        config_groups={f"group_{i}": settings_of(*group) for i, group in enumerate(schemes)},
    )
    return settings, quantise


FORMATS = {
    FloatQuantizationCompressor: "float-quantized",
    IntQuantizationCompressor: "int-quantized",
    PackedQuantizationCompressor: "pack-quantized",
    MXFP4PackedCompressor: "mxfp4-pack-quantized",
}


def one_group(compressor, dtype=torch.bfloat16, reordered=False, **args):
    return compressed([(["Linear"], compressor, args, dtype)], FORMATS, reordered=reordered)


# AWQ and GPTQ.


def integers(weight, size, bits, symmetric):
    """Codes [n_in, n_out], zero points and F16 scales [n_groups, n_out] of the transposed matrix."""
    n_out, n_in = weight.shape
    groups = weight.T.reshape(n_in // size, size, n_out)
    top = 2**bits - 1
    if symmetric:
        scales = (groups.abs().amax(1) / (top / 2)).half()
        zeros = torch.full(scales.shape, 2 ** (bits - 1), dtype=torch.int32)
    else:
        low, high = groups.amin(1).clamp(max=0), groups.amax(1).clamp(min=0)
        scales = ((high - low) / top).half()
        zeros = torch.round(-low / scales.float()).clamp(1, top).to(torch.int32)
    codes = torch.round(groups / scales.float()[:, None] + zeros[:, None]).clamp(0, top)
    return codes.to(torch.int32).reshape(n_in, n_out), zeros, scales


def packed_columns(values, bits, order=None):
    """Neighbours in a row share a word."""
    per_word = 32 // bits
    values = values.reshape(values.shape[0], -1, per_word).long()
    order = order or range(per_word)
    words = sum(values[:, :, of] << (bits * i) for i, of in enumerate(order))
    return as_i32(words)


def as_i32(words):
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32).contiguous()


def awq(size):
    def quantise(name, weight):
        codes, zeros, scales = integers(weight, size, 4, symmetric=False)
        parts = dict(
            qweight=packed_columns(codes, 4, AWQ_ORDER),
            qzeros=packed_columns(zeros, 4, AWQ_ORDER),
            scales=scales,
        )
        spread = lambda values: values.repeat_interleave(size, 0)
        decoded = (codes - spread(zeros)).float() * spread(scales).float()
        if AUTOAWQ is not None:
            library = AUTOAWQ.dequantize_gemm(parts["qweight"], parts["qzeros"], scales.float(), 4, size)
            assert torch.equal(library, decoded), name
        return parts, decoded.T

    settings = dict(
        quant_method="awq", bits=4, group_size=size, zero_point=True, version="gemm", modules_to_not_convert=None
    )
    return settings, quantise


def gptq(size, bits, symmetric, version, reordered=False):
    def quantise(name, weight):
        n_in = weight.shape[1]
        group = n_in if size == -1 else size
        order = torch.randperm(n_in, generator=generator) if reordered else torch.arange(n_in)
        g_idx = (torch.argsort(order) // group).to(torch.int32)
        codes, zeros, scales = integers(weight[:, order], group, bits, symmetric)
        codes = codes[torch.argsort(order)]
        stored = zeros - 1 if version == "gptq" else zeros
        parts = dict(
            qweight=packed_columns(codes.T, bits).T.contiguous(),
            qzeros=packed_columns(stored, bits),
            scales=scales,
            g_idx=g_idx,
        )
        decoded = scales.float()[g_idx.long()] * (codes - zeros[g_idx.long()])
        return parts, decoded.T

    settings = dict(
        quant_method="gptq", bits=bits, group_size=size, desc_act=reordered, sym=symmetric, checkpoint_format=version
    )
    return settings, quantise


FP8 = dict(num_bits=8, type="float", symmetric=True)
INT4 = dict(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32)
CASES = {
    "fp8-block": lambda c: fp8(c, [32, 32]),
    "fp8-odd": lambda c: fp8(c, [24, 40]),
    "fp8-tensor": lambda c: fp8(c, None, static=True),
    "ct-fp8-channel": lambda c: one_group(FloatQuantizationCompressor, **FP8, strategy="channel"),
    "ct-fp8-tensor": lambda c: one_group(FloatQuantizationCompressor, torch.float32, **FP8, strategy="tensor"),
    "ct-int4": lambda c: one_group(PackedQuantizationCompressor, **INT4),
    "ct-int4-zeros": lambda c: one_group(PackedQuantizationCompressor, **INT4 | dict(symmetric=False)),
    "ct-int4-order": lambda c: one_group(PackedQuantizationCompressor, reordered=True, **INT4),
    "ct-int8": lambda c: one_group(
        IntQuantizationCompressor, num_bits=8, type="int", symmetric=True, strategy="channel"
    ),
    "ct-mixed": lambda c: compressed(
        [
            (["re:.*self_attn"], PackedQuantizationCompressor, INT4, torch.bfloat16),
            (["re:.*mlp"], PackedQuantizationCompressor, INT4 | dict(num_bits=8), torch.bfloat16),
        ],
        FORMATS,
        "mixed-precision",
    ),
    "ct-mxfp4": lambda c: one_group(
        MXFP4PackedCompressor, num_bits=4, type="float", symmetric=True, strategy="group", group_size=32
    ),
    "awq": lambda c: awq(32),
    "gptq": lambda c: gptq(32, 4, True, "gptq"),
    "gptq-order": lambda c: gptq(32, 4, False, "gptq_v2", reordered=True),
    "gptq-zeros": lambda c: gptq(32, 4, False, "gptq"),
    "gptq-int8": lambda c: gptq(-1, 8, True, "gptq"),
}
# Others need a GPU or a library for it; zero points and MXFP4 of compressed-tensors fail there.
LOADED_BY_TRANSFORMERS = ["ct-fp8-channel", "ct-fp8-tensor", "ct-int4", "ct-int8", "ct-mixed"]


@torch.no_grad()
def logits_of(model, tokens):
    return model(tokens[None], use_cache=False).logits[0]


@torch.no_grad()
def write_case(out, name, seed):
    generator.manual_seed(seed)
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(**CONFIG)
    config._attn_implementation = "eager"
    model = transformers.LlamaForCausalLM(config).float().eval()
    settings, quantise = CASES[name](config)
    for parameter, p in sorted(model.named_parameters()):
        p.copy_(1.0 + 0.3 * normal(*p.shape) if "norm" in parameter else 0.2 * normal(*p.shape))
    file = {}
    for parameter, p in sorted(model.named_parameters()):
        if not parameter.endswith("_proj.weight"):
            file[parameter] = p.detach().clone()
            continue
        module = parameter.removesuffix(".weight")
        parts, decoded = quantise(module, p.detach().clone())
        assert (decoded - p).norm() < 0.2 * p.norm(), f"{name}: {module} is decoded to something else"
        file |= {f"{module}.{part}": value for part, value in parts.items()}
        p.copy_(decoded)
    tokens = torch.randint(3, CONFIG["vocab_size"], (N_TOKENS,), generator=generator)
    logits = logits_of(model, tokens)

    folder = out / name
    folder.mkdir(parents=True, exist_ok=True)
    save_file(file, folder / "model.safetensors", metadata=dict(format="pt"))
    config = config.to_diff_dict() | dict(
        architectures=["LlamaForCausalLM"], dtype="float32", quantization_config=settings
    )
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    decoded = model.get_submodule(DECODED).weight.detach().contiguous()
    save_file(
        {"decoded": decoded, "tokens": tokens, "logits": logits.contiguous()},
        folder / "golden.safetensors",
        metadata=dict(torch=torch.__version__, transformers=transformers.__version__, seed=str(seed)),
    )
    for each in folder.iterdir():
        each.chmod(0o644)
    note = ""
    if name in LOADED_BY_TRANSFORMERS:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        moved = ((logits_of(loaded, tokens) - logits).norm() / logits.norm()).item()
        note = f", loaded by transformers the logits differ by {moved:.1e}"
    n_bytes = sum(f.stat().st_size for f in folder.iterdir())
    print(f"{name:15} {n_bytes / 1e3:4.0f} kB, logits {logits.std():.2f} std{note}")


AUTOAWQ = None


def main():
    global AUTOAWQ
    args = sys.argv[1:]
    if args[:1] == ["--autoawq"]:
        spec = importlib.util.spec_from_file_location("packing_utils", args[1])
        AUTOAWQ = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(AUTOAWQ)
        args = args[2:]
    torch.set_num_threads(1)
    here = pathlib.Path(__file__).resolve().parent.parent
    out = pathlib.Path(args[0]) if args else here / "crates/refrain-models/tests/goldens/quantized"
    for seed, name in enumerate(CASES):
        if len(args) < 2 or name in args[1:]:
            write_case(out, name, 100 * seed)


if __name__ == "__main__":
    main()
