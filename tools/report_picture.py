"""Converts the HTML report of a training run to one SVG, for the documentation.

    python3 tools/report_picture.py REPORT.html [SVG]      (default: docs/report.svg)

Copies the facts and charts of the page and drops what needs a browser. Uses only the standard library.
"""

import pathlib
import re
import sys

INK, LINE, FIRST, SECOND = "#222222", "#cccccc", "#2a6fdb", "#d9480f"
STYLE = f"""
.grid{{stroke:{LINE};stroke-width:1}}
.curve{{fill:none;stroke:{FIRST};stroke-width:2;stroke-linejoin:round}}
.raw{{fill:none;stroke:{FIRST};stroke-width:1;opacity:.35}}
.second{{fill:none;stroke:{SECOND};stroke-width:2;stroke-linejoin:round}}
.dot{{fill:{SECOND}}}
text{{fill:{INK};font:11px ui-monospace,monospace}}
.title{{font:bold 22px system-ui,sans-serif}}
.head{{font:bold 15px system-ui,sans-serif}}
.fact{{font:13px ui-monospace,monospace}}
"""


def main():
    page = pathlib.Path(sys.argv[1]).read_text()
    to = pathlib.Path(sys.argv[2] if len(sys.argv) > 2 else "docs/report.svg")
    title = re.search(r"<h1>(.*?)</h1>", page).group(1)
    facts = re.findall(r"<tr><th>(.*?)<td>(.*?)</tr>", page)
    charts = re.findall(r"<h2>(.*?)</h2>.*?(<svg .*?</svg>)", page, re.S)
    out, y = [f'<text class="title" x="24" y="40">{title}</text>'], 66
    for name, value in facts:
        out.append(f'<text class="fact" x="24" y="{y}">{name}</text><text class="fact" x="190" y="{y}">{value}</text>')
        y += 20
    for head, chart in charts:
        out.append(f'<text class="head" x="24" y="{y + 24}">{head}</text>')
        inner = re.sub(r"<line class=.cursor.*?/>", "", re.search(r"<svg .*?>(.*)</svg>", chart, re.S).group(1))
        out.append(f'<rect x="24" y="{y + 34}" width="1200" height="300" fill="#f4f4f4" stroke="{LINE}"/>')
        out.append(f'<g transform="translate(24 {y + 34})">{inner.strip()}</g>')
        y += 350
    size = f'viewBox="0 0 1248 {y + 16}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{STYLE}</style>'
    background = f'<rect width="1248" height="{y + 16}" fill="#ffffff"/>'
    to.write_text("\n".join([head, background, *out, "</svg>"]) + "\n")


main()
