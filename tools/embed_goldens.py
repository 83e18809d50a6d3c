"""Writes reference vectors of encoders and decoders, computed with `transformers`, for the tests of embedding.

    python3 tools/embed_goldens.py [OUT]        (default: crates/refrain-models/tests/goldens)

Needs torch, transformers and safetensors; the versions used are in each golden's metadata. For encoders it writes a
folder with config.json, model.safetensors and embed.safetensors; for the decoders in DECODERS, whose folders
tools/goldens.py writes, only embed.safetensors:

    tokens   int64 [n]            the tokens of all texts, one after another
    lengths  int64 [n_texts]
    mean     f32 [n_texts, hidden]  pooled states after the last layer, before normalisation
    cls, last                       the states of the first and the last token

As in tools/goldens.py, weights are chosen so that mistakes show, and the script checks for each case that ignoring a
feature moves the vectors by far more than the tolerance of the tests, and that f32 and f64 agree.
"""

import copy
import pathlib
import sys

import torch
import transformers
from safetensors.torch import save_file

# Below the tenth part of what the tanh approximation of GELU changes.
TOLERANCE = 1e-5
LENGTHS = [1, 9, 2, 23, 64, 17, 3]
COMMON = dict(
    vocab_size=128,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=3,
    max_position_embeddings=64,
    type_vocab_size=2,
    # Large enough that ignoring the key causes an error above the tolerance.
    layer_norm_eps=1e-2,
    hidden_act="gelu",
)
# name: (settings, {name of a change: changed settings})
ENCODERS = {
    "bert": (
        COMMON,
        {
            "norm epsilon": dict(layer_norm_eps=1e-12),
            "tanh approximation": dict(hidden_act="gelu_new"),
            "number of heads": dict(num_attention_heads=6),
        },
    ),
    # Odd sizes, one token type, the tanh approximation.
    "bert-odd": (
        COMMON
        | dict(
            vocab_size=101,
            hidden_size=40,
            intermediate_size=52,
            num_hidden_layers=2,
            num_attention_heads=5,
            type_vocab_size=1,
            hidden_act="gelu_new",
        ),
        {"exact activation": dict(hidden_act="gelu")},
    ),
}
DECODERS = ["qwen3", "gemma3"]


def randomise(model, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in sorted(model.named_parameters()):
            noise = torch.randn(p.shape, generator=generator)
            if "LayerNorm.weight" in name:
                p.copy_(noise * 0.3 + 1.0)
            elif "LayerNorm" not in name and name.endswith("bias"):
                p.copy_(noise * 0.5)
            else:
                p.copy_(noise * 0.3)


def texts(n_vocab, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, n_vocab, (n,), generator=generator) for n in LENGTHS]


@torch.no_grad()
def pooled(model, all_tokens):
    """The three poolings of each text, evaluated alone."""
    rows = [model(tokens[None]).last_hidden_state[0] for tokens in all_tokens]
    return dict(
        mean=torch.stack([row.mean(0) for row in rows]),
        cls=torch.stack([row[0] for row in rows]),
        last=torch.stack([row[-1] for row in rows]),
    )


def difference(a, b):
    worst = 0.0
    for name in a:
        worst = max(worst, ((a[name].double() - b[name].double()).norm() / b[name].double().norm()).item())
    return worst


def write(folder, model, seed):
    all_tokens = texts(model.config.vocab_size, seed)
    vectors = pooled(model, all_tokens)
    rounding = difference(pooled(copy.deepcopy(model).double(), all_tokens), vectors)
    assert rounding < TOLERANCE / 5, f"{folder.name}: f32 and f64 differ by {rounding:.1e}"
    tensors = {name: value.contiguous() for name, value in vectors.items()}
    tensors |= dict(tokens=torch.cat(all_tokens), lengths=torch.tensor(LENGTHS))
    save_file(
        tensors,
        folder / "embed.safetensors",
        metadata=dict(
            torch=torch.__version__,
            transformers=transformers.__version__,
            seed=str(seed),
            f32_against_f64=f"{rounding:.1e}",
        ),
    )
    (folder / "embed.safetensors").chmod(0o644)
    return all_tokens, vectors, rounding


def eager(config):
    config._attn_implementation = "eager"
    return config


def encoder(out, name, seed):
    settings, shows = ENCODERS[name]
    model = transformers.BertModel(eager(transformers.BertConfig(**settings)), add_pooling_layer=False).eval()
    randomise(model, seed)
    folder = out / name
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    for file in folder.iterdir():
        file.chmod(0o644)
    all_tokens, vectors, rounding = write(folder, model, seed)
    least = (float("inf"), "")
    for what, change in shows.items():
        other = transformers.BertModel(eager(transformers.BertConfig(**settings | change)), add_pooling_layer=False)
        other.load_state_dict(model.state_dict())
        moved = difference(vectors, pooled(other.eval(), all_tokens))
        least = min(least, (moved, what))
    for parameter, p in model.named_parameters():
        if p.dim() > 1 and "token_type" not in parameter or "key.bias" in parameter:
            continue  # the softmax cancels biases of keys
        kept = p.detach().clone()
        with torch.no_grad():
            p.fill_(kept.mean())
            least = min(least, (difference(pooled(model, all_tokens), vectors), parameter))
            p.copy_(kept)
    assert least[0] > 10 * TOLERANCE, f"{name}: {least[1]} changes the vectors by only {least[0]:.1e}"
    print(f"{name:10} f32 against f64 {rounding:.1e}, least change noticed {least[0]:.1e} ({least[1]})")


def decoder(out, name, seed):
    model = transformers.AutoModel.from_pretrained(out / name, dtype=torch.float32, attn_implementation="eager").eval()
    _, _, rounding = write(out / name, model, seed)
    print(f"{name:10} f32 against f64 {rounding:.1e}")


def main():
    torch.set_num_threads(1)
    here = pathlib.Path(__file__).resolve().parent.parent
    out = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else here / "crates/refrain-models/tests/goldens"
    for seed, name in enumerate(ENCODERS):
        encoder(out, name, 100 * seed)
    for seed, name in enumerate(DECODERS):
        decoder(out, name, 1000 + 100 * seed)


if __name__ == "__main__":
    main()
