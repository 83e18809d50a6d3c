"""Writes a small importance matrix in both forms of llama.cpp, for the tests of refrain-quant, and checks one of Refrain's.

    python3 tools/imatrix_goldens.py                          (writes crates/refrain-quant/tests/data/imatrix.{gguf,dat})
    python3 tools/imatrix_goldens.py REFRAIN MODEL TEXT       (checks a file that `refrain imatrix` makes, and both forms of
                                                               it as input of `refrain quantize`)

Needs gguf and numpy. The GGUF form has general.type = imatrix, imatrix.datasets, imatrix.chunk_count, imatrix.chunk_size,
and for each matrix NAME.in_sum2 and NAME.counts, as llama.cpp's tools/imatrix writes them. The older binary form is
described in crates/refrain-quant/src/imatrix/legacy.rs.
"""

import os
import pathlib
import struct
import subprocess
import sys
import tempfile

import gguf
import numpy as np

# For each matrix: sums [n_matrices, n_columns] and counts [n_matrices].
Entries = dict[str, tuple[np.ndarray, np.ndarray]]


def write_gguf(path, entries: Entries, datasets: list[str], n_chunks: int, chunk_tokens: int) -> None:
    writer = gguf.GGUFWriter(path, arch="")
    # The package sets an architecture, which importance matrices do not have.
    writer.kv_data[0].pop("general.architecture", None)
    writer.add_string("general.type", "imatrix")
    writer.add_array("imatrix.datasets", datasets)
    writer.add_uint32("imatrix.chunk_count", n_chunks)
    writer.add_uint32("imatrix.chunk_size", chunk_tokens)
    for name, (sums, counts) in entries.items():
        writer.add_tensor(name + ".in_sum2", sums.astype(np.float32))
        writer.add_tensor(name + ".counts", counts.reshape(-1, 1).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_binary(path, entries: Entries, dataset: str, n_chunks: int) -> None:
    with open(path, "wb") as file:
        text = lambda value: struct.pack("<i", len(value.encode())) + value.encode()
        file.write(struct.pack("<i", len(entries)))
        for name, (sums, counts) in entries.items():
            # One number of calls for all matrices.
            means = sums / np.maximum(counts.reshape(-1, 1), 1)
            n_calls = n_chunks
            values = (means * n_calls).astype("<f4").ravel()
            file.write(text(name) + struct.pack("<ii", n_calls, values.size) + values.tobytes())
        file.write(struct.pack("<i", n_chunks) + text(dataset))


def write_goldens(folder: pathlib.Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    columns = np.arange(1, 65, dtype=np.float64)
    experts = 0.25 * np.arange(1, 97, dtype=np.float64).reshape(3, 32)
    counts = np.array([4.0, 8.0, 2.0])
    entries = {
        "blk.0.attn_q.weight": ((0.5 * columns * 16).reshape(1, -1), np.array([16.0])),
        "blk.0.ffn_up_exps.weight": (experts * counts[:, None], counts),
    }
    write_gguf(folder / "imatrix.gguf", entries, ["a.txt", "b.txt"], 7, 512)
    write_binary(folder / "imatrix.dat", entries, "a.txt", 7)
    for path in folder.glob("imatrix.*"):
        print(f"{path}: {path.stat().st_size} bytes")


def check(program: str, model: str, text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        at = lambda name: os.path.join(folder, name)
        run = lambda *args: subprocess.run([program, *args], check=True, stdout=subprocess.DEVNULL)
        run("imatrix", model, "-f", text, "-c", "64", "--chunks", "4", "-o", at("ours.gguf"), "--quiet")
        reader = gguf.GGUFReader(at("ours.gguf"))
        field = lambda key: reader.fields[key].contents()
        assert field("general.type") == "imatrix"
        assert field("imatrix.datasets") == [os.path.basename(text)] or field("imatrix.datasets") == [text]
        n_chunks, chunk_tokens = field("imatrix.chunk_count"), field("imatrix.chunk_size")
        assert (n_chunks, chunk_tokens) == (4, 64), (n_chunks, chunk_tokens)
        for key in ["imatrix.chunk_count", "imatrix.chunk_size"]:
            assert reader.fields[key].types == [gguf.GGUFValueType.UINT32], key
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        entries = {}
        for name in sorted(name.removesuffix(".in_sum2") for name in tensors if name.endswith(".in_sum2")):
            sums, counts = tensors.pop(name + ".in_sum2"), tensors.pop(name + ".counts")
            assert sums.tensor_type == counts.tensor_type == gguf.GGMLQuantizationType.F32
            # The package gives sizes innermost first, as llama.cpp's ne.
            assert counts.shape[0] == 1 and counts.shape[1] == sums.shape[1], (name, sums.shape, counts.shape)
            values = np.array(sums.data, dtype=np.float64).reshape(int(sums.shape[1]), -1)
            entries[name] = (values, np.array(counts.data, dtype=np.float64).ravel())
            assert np.isfinite(values).all() and (values >= 0).all()
            assert (entries[name][1] == n_chunks * chunk_tokens).all() or "exps" in name, entries[name][1]
        assert not tensors, sorted(tensors)
        print(f"{len(entries)} matrices: keys, types and shapes are those of llama.cpp")
        write_gguf(at("theirs.gguf"), entries, [text], n_chunks, chunk_tokens)
        write_binary(at("theirs.dat"), entries, text, n_chunks)
        blocks = {}
        for name in ["ours.gguf", "theirs.gguf", "theirs.dat"]:
            out = at(name + ".q4.gguf")
            run("quantize", model, "Q4_K_M", "--imatrix", at(name), "-o", out, "--quiet", "--requantize")
            blocks[name] = {tensor.name: bytes(tensor.data) for tensor in gguf.GGUFReader(out).tensors}
        assert blocks["ours.gguf"] == blocks["theirs.gguf"]
        same = sum(blocks["ours.gguf"][name] == blocks["theirs.dat"][name] for name in blocks["ours.gguf"])
        # Means times calls are rounded once more, which may change a block.
        print(f"quantised alike with the file of the gguf package; {same} of {len(blocks['ours.gguf'])} tensors with .dat")
        assert same >= 0.5 * len(blocks["ours.gguf"])


if __name__ == "__main__":
    if len(sys.argv) == 4:
        check(*sys.argv[1:])
    else:
        write_goldens(pathlib.Path(__file__).parent.parent / "crates/refrain-quant/tests/data")
