"""Draws size against KL divergence for both quantisers from the JSON of tools/quantize_llama.py.

    python3 tools/quantize_picture.py RESULTS.json [SVG]      (default: docs/quantize.svg)

Uses only the standard library.
"""

import json
import math
import pathlib
import sys

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 860, 440, 70, 20, 40, 50
INK, LINE, OURS, THEIRS = "#222222", "#cccccc", "#2a6fdb", "#d9480f"


def main() -> None:
    rows = json.loads(pathlib.Path(sys.argv[1]).read_text())
    to = pathlib.Path(sys.argv[2] if len(sys.argv) > 2 else "docs/quantize.svg")
    # Below this, differences are noise: a lossless file has no place on a logarithmic axis.
    floor = 1e-4
    sizes = [row["refrain_mb"] for row in rows]
    values = [max(row[key], floor) for row in rows for key in ("refrain_kl", "llama_kl")]
    margin = 0.06 * (max(sizes) - min(sizes))
    x0, x1 = min(sizes) - margin, max(sizes) + 2 * margin
    y0, y1 = math.log10(min(values) * 0.7), math.log10(max(values) * 1.4)

    def x(mb: float) -> float:
        return LEFT + (mb - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT)

    def y(kl: float) -> float:
        return TOP + (y1 - math.log10(max(kl, floor))) / (y1 - y0) * (HEIGHT - TOP - BOTTOM)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f"<style>text{{fill:{INK};font:12px system-ui,sans-serif}}</style>",
        f'<text x="{LEFT}" y="22" style="font-weight:bold;font-size:15px">KL divergence from F32 by file size</text>',
        f'<circle cx="{WIDTH - 250}" cy="18" r="5" fill="{OURS}"/><text x="{WIDTH - 240}" y="22">refrain quantize</text>',
        f'<circle cx="{WIDTH - 120}" cy="18" r="5" fill="none" stroke="{THEIRS}" stroke-width="2"/>'
        f'<text x="{WIDTH - 110}" y="22">llama.cpp</text>',
    ]
    for power in range(math.floor(y0), math.ceil(y1) + 1):
        for digit in (1, 3):
            value = digit * 10.0**power
            if y0 <= math.log10(value) <= y1:
                out.append(f'<path d="M{LEFT} {y(value):.1f}H{WIDTH - RIGHT}" stroke="{LINE}"/>')
                out.append(f'<text x="{LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{value:g}</text>')
    step = 10 if x1 - x0 > 40 else 1
    for mb in range(math.ceil(x0 / step) * step, math.floor(x1) + 1, step):
        out.append(f'<text x="{x(mb):.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{mb}</text>')
    out.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 10}" text-anchor="end">MB</text>')
    for row in rows:
        ours, theirs = row["refrain_kl"], row["llama_kl"]
        at = x(row["refrain_mb"])
        out.append(f'<path d="M{at:.1f} {y(ours):.1f}V{y(theirs):.1f}" stroke="{LINE}"/>')
        out.append(
            f'<circle cx="{x(row["llama_mb"]):.1f}" cy="{y(theirs):.1f}" r="5" fill="none" stroke="{THEIRS}" '
            'stroke-width="2"/>'
        )
        out.append(f'<circle cx="{at:.1f}" cy="{y(ours):.1f}" r="4" fill="{OURS}"/>')
        out.append(f'<text x="{at + 8:.1f}" y="{y(ours) + 14:.1f}">{row["type"]}</text>')
    out.append("</svg>\n")
    to.write_text("\n".join(out))


if __name__ == "__main__":
    main()
