"""Converts a trained GGUF file to the one that is built in: Q8_0 matrices, a name, and a description.

    python3 pack.py TRAINED.gguf OUT.gguf --name NAME --description TEXT [--chat-template FILE]
"""

import argparse
import pathlib

import numpy as np

import gguf_io as g

LIMIT = 8_000_000


def packed(reader, name):
    """The tensor and its type in the output."""
    w = reader.tensor(name)
    return name, g.Q8_0 if w.ndim == 2 else g.F32, w


def metadata(reader, own):
    """Metadata of the trained file, with the entries of `own` replaced or appended."""
    own = {key: (key, kind, value) for key, kind, value in own}
    kept = [own.pop(key, (key, reader.types[key], value)) for key, value in reader.meta.items()]
    return kept + list(own.values())


def main():
    args = argparse.ArgumentParser()
    args.add_argument("trained")
    args.add_argument("out", type=pathlib.Path)
    args.add_argument("--name", required=True)
    args.add_argument("--description", required=True)
    args.add_argument("--chat-template", type=pathlib.Path, help="the template to store, instead of the file's own")
    a = args.parse_args()
    reader = g.Reader(a.trained)
    tensors = [packed(reader, name) for name in reader.tensors]
    n_parameters = sum(w.size for *_, w in tensors)
    own = [
        ("general.type", g.STRING, "model"),
        ("general.name", g.STRING, a.name),
        ("general.description", g.STRING, a.description),
        ("general.size_label", g.STRING, f"{n_parameters / 1e6:.1f}M"),
        ("general.license", g.STRING, "apache-2.0"),
        ("general.languages", (g.ARRAY, g.STRING), ["en"]),
        ("general.quantization_version", g.UINT32, 2),
        ("general.file_type", g.UINT32, 7),
    ]
    if a.chat_template:
        own.append(("tokenizer.chat_template", g.STRING, a.chat_template.read_text()))
    g.write(a.out, metadata(reader, own), tensors)
    again = g.Reader(a.out)
    off = 0.0
    for name, _, w in tensors:
        scale = np.abs(w).max()
        off = max(off, np.abs(again.tensor(name) - w).max() / scale if scale else 0.0)
    size = a.out.stat().st_size
    print(f"{a.out}: {n_parameters:,} parameters, {size:,} bytes, largest error {off:.1e} of a tensor's largest value")
    # Half a quantisation step, which is 1/127 of a block's largest value, plus the rounding of the scale to 11 bits.
    assert off < 0.5 / 127 + 2**-11
    assert size <= LIMIT, f"{size} bytes, at most {LIMIT} are allowed"


if __name__ == "__main__":
    main()
