"""Minimal GGUF support for the recipe: reads F32, BF16, Q4_1 and Q8_0 tensors, writes F32 and Q8_0 ones. Needs only numpy."""

import struct

import numpy as np

MAGIC, VERSION, ALIGNMENT = b"GGUF", 3, 32
F32, Q4_1, Q8_0, BF16 = 0, 3, 8, 30
BLOCK = 32
UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", UINT32: "I", INT32: "i", FLOAT32: "f", BOOL: "?", 10: "Q", 11: "q", 12: "d"}


class Reader:
    """`meta` maps keys to values and `types` to their types, `tensors` maps names to (type, shape with the longest stride
    first, offset)."""

    def __init__(self, path):
        self.data = np.memmap(path, dtype=np.uint8, mode="r")
        self.at = 0
        assert self._take(4) == MAGIC, f"{path} is not a GGUF file"
        version, n_tensors, n_meta = self._unpack("IQQ")
        assert version in (2, 3), f"GGUF version {version}"
        self.meta, self.types = {}, {}
        for _ in range(n_meta):
            key = self._string()
            (kind,) = self._unpack("I")
            if kind == ARRAY:
                kind = (ARRAY, *self._unpack("I"))
            self.types[key], self.meta[key] = kind, self._value(kind)
        infos = {}
        for _ in range(n_tensors):
            name = self._string()
            (n_dims,) = self._unpack("I")
            shape = tuple(reversed(self._unpack(f"{n_dims}Q")))
            infos[name] = (*self._unpack("I"), shape, *self._unpack("Q"))
        alignment = self.meta.get("general.alignment", ALIGNMENT)
        base = -(-self.at // alignment) * alignment
        self.tensors = {name: (kind, shape, base + offset) for name, (kind, shape, offset) in infos.items()}

    def _take(self, n):
        self.at += n
        return self.data[self.at - n : self.at].tobytes()

    def _unpack(self, layout):
        layout = "<" + layout
        return struct.unpack(layout, self._take(struct.calcsize(layout)))

    def _string(self):
        return self._take(*self._unpack("Q")).decode("utf-8", "surrogateescape")

    def _value(self, kind):
        if kind == STRING:
            return self._string()
        if isinstance(kind, tuple):
            (_, item), (n,) = kind, self._unpack("Q")
            if item == STRING:
                return [self._string() for _ in range(n)]
            return list(self._unpack(f"{n}{SCALARS[item]}"))
        return self._unpack(SCALARS[kind])[0]

    def tensor(self, name):
        """The tensor as f32."""
        kind, shape, offset = self.tensors[name]
        n = int(np.prod(shape))
        if kind == F32:
            return self.data[offset : offset + 4 * n].view(np.float32).reshape(shape).copy()
        if kind == BF16:
            upper = self.data[offset : offset + 2 * n].view(np.uint16).astype(np.uint32)
            return (upper << 16).view(np.float32).reshape(shape)
        n_bytes = {Q4_1: 20, Q8_0: 34}[kind] * n // BLOCK
        blocks = self.data[offset : offset + n_bytes].reshape(n // BLOCK, -1)
        scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
        if kind == Q8_0:
            values = blocks[:, 2:].view(np.int8) * scale
        else:
            least = blocks[:, 2:4].copy().view(np.float16).astype(np.float32)
            packed = blocks[:, 4:]
            values = np.concatenate([packed & 15, packed >> 4], axis=1) * scale + least
        return values.astype(np.float32).reshape(shape)


def quantise_q8_0(x):
    """Quantises [.., n] f32 to blocks of an f16 scale and 32 signed bytes, rounded as in ggml (half away from zero)."""
    blocks = np.ascontiguousarray(x, dtype=np.float32).reshape(-1, BLOCK)
    scale = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
    scaled = blocks * inverse
    rounded = np.sign(scaled) * np.floor(np.abs(scaled) + np.float32(0.5))
    return np.concatenate([scale.astype(np.float16).view(np.uint8), rounded.astype(np.int8).view(np.uint8)], axis=1)


def write(path, meta, tensors):
    """`meta`: (key, type, value) or (key, (ARRAY, item type), values); `tensors`: (name, type, f32 array)."""
    packed = [
        (name, kind, a.shape, (np.ascontiguousarray(a, dtype="<f4") if kind == F32 else quantise_q8_0(a)).tobytes())
        for name, kind, a in tensors
    ]
    head = bytearray(MAGIC + struct.pack("<IQQ", VERSION, len(packed), len(meta)))

    def string(text):
        raw = text.encode("utf-8")
        return struct.pack("<Q", len(raw)) + raw

    def value(kind, v):
        return string(v) if kind == STRING else struct.pack("<" + SCALARS[kind], v)

    for key, kind, v in meta:
        head += string(key)
        if isinstance(kind, tuple):
            head += struct.pack("<IIQ", ARRAY, kind[1], len(v)) + b"".join(value(kind[1], item) for item in v)
        else:
            head += struct.pack("<I", kind) + value(kind, v)
    offset = 0
    for name, kind, shape, raw in packed:
        head += string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, offset)
        offset += -(-len(raw) // ALIGNMENT) * ALIGNMENT
    with open(path, "wb") as f:
        f.write(head + bytes(-len(head) % ALIGNMENT))
        for *_, raw in packed:
            f.write(raw + bytes(-len(raw) % ALIGNMENT))
