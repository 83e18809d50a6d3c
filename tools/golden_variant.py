"""Writes a golden model with other settings, and its logits: for settings that another program cannot represent.

    python3 tools/golden_variant.py crates/refrain-models/tests/goldens/qwen35 OUT rms_norm_eps=1e-6

Needs torch, transformers and safetensors. Values are JSON.
"""

import json
import pathlib
import shutil
import sys

import torch
import transformers
from safetensors.torch import load_file, save_file


def main():
    folder, out = map(pathlib.Path, sys.argv[1:3])
    changes = {key: json.loads(value) for key, value in (pair.split("=", 1) for pair in sys.argv[3:])}
    out.mkdir(parents=True, exist_ok=True)
    settings = json.loads((folder / "config.json").read_text()) | changes
    (out / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    shutil.copyfile(folder / "model.safetensors", out / "model.safetensors")
    tokens = load_file(folder / "golden.safetensors")["tokens"]
    model = transformers.AutoModelForCausalLM.from_pretrained(
        out, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    with torch.no_grad():
        logits = model.eval()(tokens[None], use_cache=False).logits[0]
    save_file(dict(tokens=tokens, logits=logits.contiguous()), out / "golden.safetensors")


if __name__ == "__main__":
    main()
