import assert from "node:assert/strict";
import { test } from "node:test";
import { parseInline, safeHref } from "../../../crates/refrain-server/page/inline.js";
import { GrowingMarkdown, parseMarkdown } from "../../../crates/refrain-server/page/markdown.js";
import { HOSTILE, SAMPLES } from "./samples.mjs";

const text = (value) => ({ type: "text", text: value });
const paragraph = (...inline) => ({ type: "paragraph", inline });
const link = (href, ...inline) => ({ type: "link", href, inline });

function blocks(source) {
  return parseMarkdown(source).map(({ start, end, ...block }) => block);
}

test("blocks of each type are recognised", () => {
  assert.deepEqual(blocks("# One #\n\ntwo\nthree\n\n---\n> four\nfive"), [
    { type: "heading", level: 1, inline: [text("One")] },
    paragraph(text("two"), { type: "break" }, text("three")),
    { type: "rule" },
    { type: "quote", blocks: [paragraph(text("four"), { type: "break" }, text("five"))] },
  ]);
});

test("a fence keeps its text as it is and may still be open", () => {
  assert.deepEqual(blocks("```rust\n**a**\n  <b>\n```\nc"), [
    { type: "code", lang: "rust", text: "**a**\n  <b>", isOpen: false },
    paragraph(text("c")),
  ]);
  assert.deepEqual(blocks("~~~\n```\n"), [{ type: "code", lang: "", text: "```\n", isOpen: true }]);
});

test("lists nest, count from any number, and hold code and tasks", () => {
  const [list] = blocks("3. a\n  - b\n    - [x] c\n4. d\n   ```py\n   e\n   ```\n");
  assert.equal(list.number, 3);
  assert.equal(list.items.length, 2);
  const [, inner] = list.items[0].blocks;
  assert.equal(inner.items[0].blocks[1].items[0].checked, true);
  assert.deepEqual(list.items[1].blocks[1], { type: "code", lang: "py", text: "e", isOpen: false });
});

test("a blank line between items makes a list loose, one inside code does not", () => {
  assert.equal(blocks("- a\n- b")[0].isTight, true);
  assert.equal(blocks("- a\n\n- b")[0].isTight, false);
  assert.equal(blocks("- a\n  ```\n\n  ```\n- b")[0].isTight, true);
});

test("tables have alignments, and rows are cut or filled to the columns", () => {
  assert.deepEqual(blocks("| a | b |\n|:-:|--:|\n| `x|y` | \\| | z |\n| 1 |"), [
    {
      type: "table",
      align: ["center", "right"],
      head: [[text("a")], [text("b")]],
      rows: [[[{ type: "code", text: "x|y" }], [text("|")]], [[text("1")], []]],
    },
  ]);
});

test("emphasis follows the standard where models use it", () => {
  assert.deepEqual(parseInline("a **b *c*** ~~d~~ `e**`"), [
    text("a "),
    { type: "strong", inline: [text("b "), { type: "em", inline: [text("c")] }] },
    text(" "),
    { type: "strike", inline: [text("d")] },
    text(" "),
    { type: "code", text: "e**" },
  ]);
  assert.deepEqual(parseInline("snake_case_name 2 * 3 * 4 ~5"), [text("snake_case_name 2 * 3 * 4 ~5")]);
  assert.deepEqual(parseInline("**[0, 1)** ***x***"), [
    { type: "strong", inline: [text("[0, 1)")] },
    text(" "),
    { type: "em", inline: [{ type: "strong", inline: [text("x")] }] },
  ]);
  assert.deepEqual(parseInline("**open"), [text("**open")]);
});

test("links may have titles and brackets, and bare addresses end before punctuation", () => {
  const cases = [
    ['[a **b**](https://e.org/x_(y) "t")', [link("https://e.org/x_(y)", text("a "), { type: "strong", inline: [text("b")] })]],
    ["(see https://e.org/a_(b)).", [text("(see "), link("https://e.org/a_(b)", text("https://e.org/a_(b)")), text(").")]],
    ["<mailto:a@e.org>", [link("mailto:a@e.org", text("mailto:a@e.org"))]],
    ["![cat](https://e.org/c.png)", [link("https://e.org/c.png", text("cat"))]],
  ];
  for (const [source, expected] of cases) assert.deepEqual(parseInline(source), expected, source);
});

test("addresses that are relative or could run script are no links", () => {
  const addresses = [
    "javascript:alert(1)", "JaVaScRiPt:alert(1)", " javascript:alert(1)", "java\nscript:alert(1)", "\u0001javascript:alert(1)",
    "vbscript:x", "data:text/html,<script>alert(1)</script>", "blob:https://e.org/x", "file:///etc/passwd", "/v1/models",
    "//e.org", "#x", "x", "", `https://e.org/${"x".repeat(3000)}`,
  ];
  for (const address of addresses) {
    assert.equal(safeHref(address), null, address);
    for (const source of [`[a](${address})`, `[a](<${address}>)`, `![a](${address})`, `<${address}>`]) {
      const tree = JSON.stringify(parseMarkdown(source));
      // An address inside of another one, as in `blob:https://e.org/x`, may be a link of its own.
      for (const [, href] of tree.matchAll(/"href":"([^"]*)"/g)) assert.equal(href, "https://e.org/x", source);
    }
  }
});

test("raw markup stays text", () => {
  for (const source of HOSTILE) {
    const tree = JSON.stringify(parseMarkdown(source));
    const types = new Set([...tree.matchAll(/"type":"(\w+)"/g)].map((found) => found[1]));
    for (const type of types) {
      assert.ok(
        ["heading", "paragraph", "code", "quote", "list", "table", "rule", "text", "strong", "em", "strike", "link", "break"].includes(type),
        `${type} in ${source}`,
      );
    }
    for (const found of tree.matchAll(/"href":"([^"]*)"/g)) assert.match(found[1], /^(https?|mailto):/, source);
  }
});

test("a text that grows piece by piece gives the blocks of the whole text", () => {
  let seed = 7;
  const random = (n) => {
    seed = (seed * 1103515245 + 12345) % 2147483648;
    return seed % n;
  };
  const fragments = [
    "a", " ", "\n", "\n\n", "- ", "-", "5", "1. ", "> ", "```", "~~~", "|", "|--|", ":-", "#", "# ", "**", "*", "_", "`", "[", "](", ")",
    "    ", "  ", "https://e.org", "---", "===", "\t", "[x] ", "\r\n", "\\", "<br>",
  ];
  const sources = [...SAMPLES, ...HOSTILE];
  for (let n = 0; n < 400; n++) {
    sources.push(Array.from({ length: 1 + random(60) }, () => fragments[random(fragments.length)]).join(""));
  }
  for (const source of sources) {
    const growing = new GrowingMarkdown();
    for (let end = 0; end < source.length; ) {
      end = Math.min(source.length, end + 1 + random(5));
      assert.deepEqual(growing.update(source.slice(0, end)), parseMarkdown(source.slice(0, end)), JSON.stringify(source.slice(0, end)));
    }
  }
});

test("blocks that cannot change are kept while a text grows", () => {
  const growing = new GrowingMarkdown();
  const [first] = growing.update("one\n\ntwo\n\nthree\n\nfo");
  assert.equal(growing.update("one\n\ntwo\n\nthree\n\nfour")[0], first);
  assert.notEqual(growing.update("other")[0], first);
});

test("no input takes more than linear time or deep recursion", () => {
  const n = 100_000;
  const inputs = [
    "[", "![", "](", "*", "_", "~~", "`", "``` ", "> ", "- ", "1. ", "|", "<", "&", "h", "\\", "#", " ", "\n", "*a _b ", "*a_ ", "[a](", "[a](b",
    "[a](http:b", "(http://a)", "http://a)", "`a``", "| a ", "a\n|-|\n", "- a\n  ", "<http:", "**a [b ", "https://a.b/))))))))))",
  ];
  for (const input of inputs) {
    const source = input.repeat(Math.ceil(n / input.length)).slice(0, n);
    const start = performance.now();
    parseMarkdown(source);
    // Quadratic work would take minutes; the bound is wide, for a machine under load.
    assert.ok(performance.now() - start < 10_000, JSON.stringify(input));
  }
});
