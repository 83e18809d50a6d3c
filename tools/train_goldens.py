"""Writes reference losses and gradients of training, computed with PyTorch, for the tests of refrain-models.

    python3 tools/train_goldens.py [GOLDENS [CASE ..]]      (default: crates/refrain-models/tests/goldens, all cases)

Needs torch, transformers and safetensors; the versions used are in each file's metadata. Runs on the CPU in a minute.
The models are those of tools/goldens.py. Each of their folders gets:

    train.safetensors     tokens, targets, positions, documents int64 [n]: two rows of 24 tokens; the first holds two
                          documents, the second one and padding (-1)
                          f32.losses [10], bf16.losses [10]: AdamW with clipping, with a decreasing learning rate
                          f32.norms [10]: gradient norms before clipping
                          f32.grad.NAME, bf16.grad.NAME: the gradient of each weight in the first step
                          f32.last.NAME: each weight after the tenth step (llama only)
                          f64.losses, f64.norms [10]: the same run in f64, for models whose steps amplify rounding (CHAOTIC):
                          the distance between f32 and f64 bounds that between two f32 runs

bf16 weights have f32 master weights: the optimiser updates those, and the model uses bf16 copies of them.
"""

import json
import pathlib
import sys

import torch
import transformers
from safetensors.torch import load_file, save_file

CASES = [
    "llama",
    "llama-tied",
    "mistral-window",
    "qwen2",
    "qwen3",
    "gemma3",
    "gemma4-e2b",
    "gemma4-e4b",
    "gemma4-dense",
    "gemma2",
    "olmo2",
    "granite",
    "cohere2",
]
CHAOTIC = ["gemma4-e2b"]
ROW, STEPS = 24, 10
BETAS, EPS, DECAY, CLIP = (0.9, 0.95), 1e-8, 0.1, 1.0


def rate(step):
    return 1e-3 * (1.0 - 0.05 * step)


def batch(vocab):
    """Two rows: documents of 10 and 14 tokens, and one of 20 tokens followed by padding."""
    generator = torch.Generator().manual_seed(5)
    lengths = [10, 14, 20]
    tokens, targets, positions, documents = [], [], [], []
    for document, length in enumerate(lengths):
        text = torch.randint(3, vocab, (length + 1,), generator=generator)
        tokens.append(text[:-1])
        target = text[1:].clone()
        target[2] = -1  # One position without a target.
        targets.append(target)
        positions.append(torch.arange(length))
        documents.append(torch.full((length,), document))
    padding = torch.full((2 * ROW - sum(lengths),), -1)
    join = lambda parts: torch.cat(parts + [padding])
    return join(tokens), join(targets), join(positions), join(documents)


def masks(documents, window):
    """Attention mask over all rows, concatenated to one sequence."""
    n = len(documents)
    i, j = torch.arange(n)[:, None], torch.arange(n)[None]
    sees = (documents[:, None] == documents[None]) & (j <= i) & (documents[:, None] >= 0)
    if window is not None:
        sees &= i - j < window
    sees |= i == j  # Padding must attend to something; it has no target.
    return torch.where(sees, 0.0, torch.finfo(torch.float32).min)[None, None]


def loss_of(model, tokens, targets, positions, documents, dtype):
    config = model.config
    window = getattr(config, "sliding_window", None)
    full, sliding = masks(documents, None).to(dtype), masks(documents, window).to(dtype)
    if hasattr(config, "layer_types") and "sliding_attention" in (config.layer_types or []):
        mask = {"full_attention": full, "sliding_attention": sliding}
    else:
        mask = sliding if window else full
    out = model(
        input_ids=tokens.clamp(min=0)[None],
        position_ids=positions.clamp(min=0)[None],
        attention_mask=mask,
        use_cache=False,
    )
    logits = out.logits[0] if dtype == torch.float64 else out.logits[0].float()
    return torch.nn.functional.cross_entropy(logits, torch.where(targets < 0, -100, targets))


def optimiser(parameters):
    matrices = [p for p in parameters if p.dim() >= 2]
    vectors = [p for p in parameters if p.dim() < 2]
    groups = [dict(params=matrices, weight_decay=DECAY), dict(params=vectors, weight_decay=0.0)]
    return torch.optim.AdamW(groups, lr=rate(0), betas=BETAS, eps=EPS)


def train(folder, dtype, out):
    config = transformers.AutoConfig.from_pretrained(folder)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    weights = load_file(folder / "model.safetensors")
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and all(name == "lm_head.weight" for name in missing), (missing, unexpected)
    model.tie_weights()
    model.train()
    names = {id(p): name for name, p in model.named_parameters()}
    # The bf16 module uses copies of the master weights, which the optimiser updates.
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    masters = {name: p.detach().to(wide, copy=True).requires_grad_() for name, p in model.named_parameters()}
    model = model.to(dtype)
    adam = optimiser(list(masters.values()))
    data = batch(config.vocab_size)
    key = {torch.float64: "f64", torch.float32: "f32", torch.bfloat16: "bf16"}[dtype]
    losses, norms = [], []
    for step in range(STEPS):
        for name, p in model.named_parameters():
            p.data.copy_(masters[name].data.to(dtype))
            p.grad = None
        loss = loss_of(model, *data, dtype)
        loss.backward()
        for name, p in model.named_parameters():
            masters[name].grad = p.grad.to(wide)
            if step == 0 and dtype != torch.float64:
                out[f"{key}.grad.{name}"] = p.grad.clone()
        norms.append(torch.nn.utils.clip_grad_norm_(masters.values(), CLIP).item())
        for group in adam.param_groups:
            group["lr"] = rate(step)
        adam.step()
        losses.append(loss.item())
    out[f"{key}.losses"] = torch.tensor(losses)
    if dtype != torch.bfloat16:
        out[f"{key}.norms"] = torch.tensor(norms)
        if dtype == torch.float32 and folder.name == "llama":
            out |= {f"f32.last.{name}": p.detach().clone() for name, p in masters.items()}
    return data


def main():
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "crates/refrain-models/tests/goldens")
    for case in sys.argv[2:] or CASES:
        out = {}
        for dtype in [torch.float64] * (case in CHAOTIC) + [torch.float32, torch.bfloat16]:
            tokens, targets, positions, documents = train(root / case, dtype, out)
        out |= dict(tokens=tokens, targets=targets, positions=positions, documents=documents)
        made_with = dict(
            torch=torch.__version__,
            transformers=transformers.__version__,
            adamw=json.dumps(dict(betas=BETAS, eps=EPS, weight_decay=DECAY, clip=CLIP, lr="1e-3 * (1 - 0.05 step)")),
        )
        save_file({k: v.contiguous() for k, v in out.items()}, root / case / "train.safetensors", metadata=made_with)
        print(case, [round(x, 4) for x in out["f32.losses"].tolist()], out["f32.norms"][0].item())
        print("  bf16", [round(x, 4) for x in out["bf16.losses"].tolist()])


if __name__ == "__main__":
    main()
