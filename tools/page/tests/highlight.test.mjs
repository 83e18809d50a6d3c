import assert from "node:assert/strict";
import { test } from "node:test";
import { highlight } from "../../../crates/refrain-server/page/highlight.js";

const kinds = (code, lang) => {
  return highlight(code, lang).filter(({ kind }) => kind !== "plain").map(({ kind, text }) => `${kind} ${text}`);
};

test("parts of code are found in each family of languages", () => {
  assert.deepEqual(kinds('#[test]\nfn a<\'b>() { let s = r#"x"y"#; } // if', "rust"), [
    "meta #[test]", "keyword fn", "meta 'b", "keyword let", 'string r#"x"y"#', "comment // if",
  ]);
  assert.deepEqual(kinds('def f(x):  # if\n  return f"""a\nb""" + \'c\' + 0x1F', "py"), [
    "keyword def", "function f", "comment # if", "keyword return", 'string f"""a\nb"""', "string 'c'", "number 0x1F",
  ]);
  assert.deepEqual(kinds("const a = `b ${c}`; // d", "ts"), ["keyword const", "string `b ${c}`", "comment // d"]);
  assert.deepEqual(kinds('{"a": ["b", 1.5, true]}', "json"), ['type "a"', 'string "b"', "number 1.5", "keyword true"]);
  assert.deepEqual(kinds("SELECT a FROM b -- c", "sql"), ["keyword SELECT", "keyword FROM", "comment -- c"]);
  assert.deepEqual(kinds("+ a\n- b\n c", "diff"), ["inserted + a", "deleted - b"]);
  assert.deepEqual(kinds("#include <a>\n__global__ void f(int x);", "cuda"), [
    "meta #include", "keyword __global__", "keyword void", "function f", "keyword int",
  ]);
});

test("the parts joined are the code, for any code in any language", () => {
  const codes = ["", "\"open", "'", "/* open", "`", '"""', "<!--", "r#\"", "a\n\n\tb \\", "#", "\u{1f600} é", "${", "[[", "-".repeat(500)];
  const langs = ["rust", "python", "js", "c", "java", "go", "bash", "json", "sql", "yaml", "html", "css", "diff", "unknown", "", "constructor"];
  for (const lang of langs) {
    for (const code of [...codes, codes.join(" "), codes.join("\n")]) {
      assert.equal(highlight(code, lang).map(({ text }) => text).join(""), code, `${lang}: ${code}`);
    }
  }
});

test("hostile code takes no more than linear time", () => {
  const inputs = ['"', "'", "/*", "`", '"""', "\\", "<!--", "#[", "${", " ", "a", "-", "0", "_", "\n#", "b'", "r#", "--a "];
  for (const lang of ["rust", "python", "js", "c", "bash", "json", "sql", "yaml", "html", "css", "diff"]) {
    for (const input of inputs) {
      const start = performance.now();
      highlight(input.repeat(Math.floor(60_000 / input.length)), lang);
      assert.ok(performance.now() - start < 10_000, `${lang}: ${input}`);
    }
  }
});
