// A light highlighter: splits code into words, strings, comments and the like. It knows what languages have in common,
// not their grammars; what it does not recognise is plain text.

/** Longer code is left plain, so that a reply that is still being written stays fluid. */
const MAX_CHARS = 60_000;

const C_COMMENT = String.raw`\/\/[^\n]*|\/\*[\s\S]*?(?:\*\/|$)`;
const HASH_COMMENT = String.raw`#[^\n]*`;
const DOUBLE = String.raw`"(?:[^"\\\n]|\\[\s\S])*"?`;
const SINGLE = String.raw`'(?:[^'\\\n]|\\[\s\S])*'?`;
const NUMBER = String.raw`\b0[xXbBoO][\da-fA-F_]+\w*|\b\d[\d_]*(?:\.\d[\d_]*)?(?:[eE][+-]?\d+)?\w*`;

const C_WORDS =
  "alignas auto bool break case catch char class const consteval constexpr continue default delete do double else enum " +
  "explicit extern false float for friend goto if inline int long namespace new noexcept nullptr operator override " +
  "private protected public register return short signed sizeof static static_assert struct switch template this throw " +
  "true try typedef typename union unsigned using virtual void volatile while __global__ __device__ __host__ __shared__ " +
  "__restrict__ __launch_bounds__";
const JS_WORDS =
  "abstract as async await break case catch class const continue debugger declare default delete do else enum export " +
  "extends false finally for from function get if implements import in instanceof interface keyof let new null of " +
  "private protected public readonly return set static super switch this throw true try type typeof undefined var void " +
  "while yield";
const JAVA_WORDS =
  "abstract as boolean break byte case catch char class companion const continue data default do double else enum " +
  "extends false final finally float for fun if implements import in instanceof int interface internal is long namespace " +
  "new null object out override package private protected public readonly record return sealed short static string " +
  "super switch synchronized this throw throws true try using val var virtual void volatile when while";

/**
 * Languages by name: `words` are keywords, `tokens` pairs of a kind and a pattern, tried in order.
 *
 * A pattern that can fail after reading far must start at few places (a word boundary, a line start) or have a bound.
 * Otherwise hostile code takes quadratic time.
 */
const LANGUAGES = {
  rust: {
    words:
      "as async await break const continue crate dyn else enum extern false fn for if impl in let loop match mod move mut " +
      "pub ref return self Self static struct super trait true type union unsafe use where while",
    tokens: [
      ["comment", C_COMMENT],
      ["meta", String.raw`#!?\[[^\]\n]{0,200}\]`],
      ["string", String.raw`\bb?r(#*)"[\s\S]*?(?:"\1|$)|b?` + DOUBLE],
      ["string", String.raw`b?'(?:[^'\\\n]|\\(?:u\{\w{0,8}\}|x\w\w|.))'`],
      ["meta", String.raw`'[a-z_]\w*\b`],
      ["number", NUMBER],
      ["function", String.raw`\b[a-z_]\w*!(?=[(\[{])|\b[a-z_]\w*(?=\(|::<)`],
      ["type", String.raw`\b[A-Z]\w*|\b(?:[iuf](?:8|16|32|64|128|size)|bool|char|str)\b`],
    ],
  },
  python: {
    words:
      "and as assert async await break case class continue def del elif else except False finally for from global if import " +
      "in is lambda match None nonlocal not or pass raise return self True try while with yield",
    tokens: [
      ["comment", HASH_COMMENT],
      ["string", String.raw`\b[rbfuRBFU]{0,2}(?:"""[\s\S]*?(?:"""|$)|'''[\s\S]*?(?:'''|$))|(?:"""[\s\S]*?(?:"""|$)|'''[\s\S]*?(?:'''|$))`],
      ["string", String.raw`(?:\b[rbfuRBFU]{1,2})?(?:${DOUBLE}|${SINGLE})`],
      ["meta", String.raw`@[\w.]+`],
      ["number", NUMBER],
      ["function", String.raw`\b[a-z_]\w*(?=\()`],
      ["type", String.raw`\b[A-Z]\w*`],
    ],
  },
  javascript: {
    words: JS_WORDS,
    tokens: [
      ["comment", C_COMMENT],
      ["string", `${DOUBLE}|${SINGLE}|` + String.raw`\`(?:[^\`\\]|\\[\s\S])*\`?`],
      ["meta", String.raw`@[\w.]+`],
      ["number", NUMBER],
      ["function", String.raw`(?<![\w$])[A-Za-z_$][\w$]*(?=\()`],
      ["type", String.raw`\b[A-Z]\w*`],
    ],
  },
  c: {
    words: C_WORDS,
    tokens: [
      ["comment", C_COMMENT],
      ["meta", String.raw`(?<=^|\n)[ \t]*#[ \t]*\w+`],
      ["string", `${DOUBLE}|${SINGLE}`],
      ["number", NUMBER],
      ["function", String.raw`\b[A-Za-z_]\w*(?=\(|<<<)`],
      ["type", String.raw`\b[A-Z]\w*|\b\w+_t\b`],
    ],
  },
  java: {
    words: JAVA_WORDS,
    tokens: [
      ["comment", C_COMMENT],
      ["string", `${DOUBLE}|${SINGLE}`],
      ["meta", String.raw`@[\w.]+`],
      ["number", NUMBER],
      ["function", String.raw`\b[A-Za-z_]\w*(?=\()`],
      ["type", String.raw`\b[A-Z]\w*`],
    ],
  },
  go: {
    words:
      "break case chan const continue default defer else fallthrough false for func go goto if import interface iota map nil " +
      "package range return select struct switch true type var",
    tokens: [
      ["comment", C_COMMENT],
      ["string", `${DOUBLE}|${SINGLE}|` + String.raw`\`[^\`]*\`?`],
      ["number", NUMBER],
      ["function", String.raw`\b[A-Za-z_]\w*(?=\()`],
      ["type", String.raw`\b(?:u?int(?:8|16|32|64)?|float(?:32|64)|string|bool|byte|rune|error|any)\b|\b[A-Z]\w*`],
    ],
  },
  shell: {
    words: "case do done elif else esac exit export fi for function if in local read return set source then until while",
    tokens: [
      ["comment", String.raw`(?<=^|[\s;])#[^\n]*`],
      ["string", String.raw`"(?:[^"\\]|\\[\s\S])*"?|'[^']*'?`],
      ["meta", String.raw`\$\{[^}\n]{0,200}\}|\$\w+`],
      ["type", String.raw`(?<=\s)--?[A-Za-z][\w-]*`],
      ["number", String.raw`\b\d+\b`],
    ],
  },
  json: {
    words: "true false null",
    tokens: [
      ["comment", C_COMMENT],
      ["type", String.raw`"(?:[^"\\\n]|\\.)*"(?=\s*:)`],
      ["string", DOUBLE],
      ["number", String.raw`-?\b\d+(?:\.\d+)?(?:[eE][+-]?\d+)?`],
    ],
  },
  sql: {
    isCaseless: true,
    words:
      "add all alter and as asc between by case column constraint create cross default delete desc distinct drop else end " +
      "exists false foreign from full group having if in index inner insert into is join key left like limit not null offset " +
      "on or order outer primary references returning right select set table then true union unique update using values view " +
      "when where with",
    tokens: [
      ["comment", String.raw`--[^\n]*|\/\*[\s\S]*?(?:\*\/|$)`],
      ["string", String.raw`'(?:[^']|'')*'?|"[^"\n]*"?`],
      ["number", NUMBER],
      ["function", String.raw`\b[A-Za-z_]\w*(?=\()`],
    ],
  },
  config: {
    words: "true false null yes no on off",
    tokens: [
      ["comment", String.raw`(?<=^|\s)[#;][^\n]*`],
      ["meta", String.raw`(?<=^|\n)[ \t]*\[\[?[^\]\n]*\]\]?`],
      ["type", String.raw`(?<=^|\n)[ \t]*(?:- )?[\w."-]+(?=[ \t]*[:=])`],
      ["string", `${DOUBLE}|${SINGLE}`],
      ["number", String.raw`\b\d[\d_.:-]*\b`],
    ],
  },
  markup: {
    words: "",
    tokens: [
      ["comment", String.raw`<!--[\s\S]*?(?:-->|$)`],
      ["keyword", String.raw`<[\/!?]?[\w:-]+|\/?>`],
      ["type", String.raw`(?<![\w:-])[\w:-]+(?==["'])`],
      ["string", String.raw`(?<==)(?:"[^"]*"?|'[^']*'?)`],
      ["meta", String.raw`&#?\w+;`],
    ],
  },
  css: {
    words: "",
    tokens: [
      ["comment", String.raw`\/\*[\s\S]*?(?:\*\/|$)`],
      ["string", `${DOUBLE}|${SINGLE}`],
      ["meta", String.raw`@[\w-]+|![\w]+`],
      ["number", String.raw`#[\da-fA-F]{3,8}\b|-?\b\d+(?:\.\d+)?[a-z%]*`],
      ["type", String.raw`(?<![\w-])(?:--[\w-]+|[\w-]+(?=[ \t]*:[^:]))`],
      ["function", String.raw`(?<![\w-])[\w-]+(?=\()|[.#][A-Za-z][\w-]*`],
    ],
  },
  diff: {
    words: "",
    tokens: [
      ["meta", String.raw`(?<=^|\n)(?:@@|diff |index |--- |\+\+\+ )[^\n]*`],
      ["inserted", String.raw`(?<=^|\n)\+[^\n]*`],
      ["deleted", String.raw`(?<=^|\n)-[^\n]*`],
    ],
  },
};

const ALIASES = {
  rs: "rust", py: "python", python3: "python", js: "javascript", mjs: "javascript", jsx: "javascript", ts: "javascript",
  tsx: "javascript", typescript: "javascript", cpp: "c", "c++": "c", cc: "c", h: "c", hpp: "c", cu: "c", cuda: "c",
  cs: "java", csharp: "java", "c#": "java", kotlin: "java", kt: "java", swift: "java", scala: "java", golang: "go",
  sh: "shell", bash: "shell", zsh: "shell", console: "shell", dockerfile: "shell", jsonc: "json", json5: "json",
  jsonl: "json", toml: "config", yaml: "config", yml: "config", ini: "config", html: "markup", xml: "markup",
  svg: "markup", vue: "markup", scss: "css", less: "css", patch: "diff", postgresql: "sql", mysql: "sql", sqlite: "sql",
};

const compiled = new Map();

/**
 * Splits code into `{ kind, text }`. The texts joined are the code. Kinds: `plain`, `comment`, `string`, `number`,
 * `keyword`, `type`, `function`, `meta`, `inserted`, `deleted`.
 */
export function highlight(code, lang) {
  const language = languageOf(lang);
  if (!language || code.length > MAX_CHARS) return [{ kind: "plain", text: code }];
  const parts = [];
  let plainFrom = 0;
  language.pattern.lastIndex = 0;
  for (const found of code.matchAll(language.pattern)) {
    if (found[0] === "") continue;
    const kind = kindOf(language, found);
    if (found.index > plainFrom) parts.push({ kind: "plain", text: code.slice(plainFrom, found.index) });
    parts.push({ kind, text: found[0] });
    plainFrom = found.index + found[0].length;
  }
  if (plainFrom < code.length) parts.push({ kind: "plain", text: code.slice(plainFrom) });
  return parts;
}

function kindOf(language, found) {
  for (let idx = 0; idx < language.kinds.length; idx++) {
    if (found.groups[`t${idx}`] !== undefined) return language.kinds[idx];
  }
  return "plain";
}

function languageOf(lang) {
  const lower = lang.toLowerCase();
  const name = Object.hasOwn(ALIASES, lower) ? ALIASES[lower] : lower;
  if (!Object.hasOwn(LANGUAGES, name)) return null;
  if (!compiled.has(name)) compiled.set(name, compile(LANGUAGES[name]));
  return compiled.get(name);
}

// One pattern for a language. Comments and strings come before keywords, and keywords before names of any kind.
function compile({ words, tokens, isCaseless }) {
  const all = [...tokens];
  if (words !== "") {
    const first = all.findIndex(([kind]) => kind === "number" || kind === "function");
    all.splice(first < 0 ? all.length : first, 0, ["keyword", String.raw`\b(?:${words.split(" ").join("|")})\b`]);
  }
  const groups = all.map(([, source], idx) => {
    // Back references count groups of the whole pattern, so they are named after their own token.
    const named = source.replace("(#*)", `(?<r${idx}>#*)`).replace(String.raw`\1`, String.raw`\k<r${idx}>`);
    return `(?<t${idx}>${named})`;
  });
  return { pattern: new RegExp(groups.join("|"), isCaseless ? "gi" : "g"), kinds: all.map(([kind]) => kind) };
}
