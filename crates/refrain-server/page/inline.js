// Inline markdown: emphasis, code, links and line breaks in a text, as a list of plain objects.

/** Most openings of emphasis or links at one place; more of them are text. */
const MAX_OPEN = 64;
/** Longest address of a link in characters. */
const MAX_HREF = 2048;

const SAFE_PROTOCOLS = new Set(["http:", "https:", "mailto:"]);
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0", "#39": "'" };
const ESCAPABLE = /[!-/:-@[-`{-~]/;

/**
 * Parses inline text.
 *
 * Node types: `text`, `code`, `strong`, `em`, `strike`, `link` (with a safe `href`), `break`.
 */
export function parseInline(text) {
  return new InlineParser(text).parse();
}

/** The address of a link if it is absolute and of a protocol that cannot run script, else `null`. */
export function safeHref(address) {
  if (address.length > MAX_HREF) return null;
  try {
    const url = new URL(address);
    return SAFE_PROTOCOLS.has(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

class InlineParser {
  #text;
  #at = 0;
  #nodes = [];
  #plain = ""; // text that is not in a node yet
  #open = []; // openings of emphasis and links that wait for their end: { mark, count, nodeIdx, ... }
  #nOpen = { "*": 0, _: 0, "~": 0 };
  #codeEnds = null; // start offsets of runs of backticks, by length of the run

  constructor(text) {
    this.#text = text;
  }

  parse() {
    while (this.#at < this.#text.length) this.#step();
    this.#flush();
    return mergeText(this.#nodes);
  }

  #step() {
    const c = this.#text[this.#at];
    if (c === "\\") this.#escape();
    else if (c === "`") this.#code();
    else if (c === "*" || c === "_" || c === "~") this.#delimiters(c);
    else if (c === "[") this.#openBracket(1);
    else if (c === "!" && this.#text[this.#at + 1] === "[") this.#openBracket(2);
    else if (c === "]") this.#closeBracket();
    else if (c === "<") this.#angle();
    else if (c === "&") this.#entity();
    else if (c === "h" || c === "H") this.#bareAddress();
    else if (c === "\n") this.#lineBreak();
    else this.#take(1);
  }

  #take(n) {
    this.#plain += this.#text.slice(this.#at, this.#at + n);
    this.#at += n;
  }

  #flush() {
    if (this.#plain !== "") this.#nodes.push({ type: "text", text: this.#plain });
    this.#plain = "";
  }

  #push(node) {
    this.#flush();
    this.#nodes.push(node);
  }

  #escape() {
    const next = this.#text[this.#at + 1];
    if (next === "\n") {
      this.#at++;
      this.#lineBreak();
    } else if (next !== undefined && ESCAPABLE.test(next)) {
      this.#at++;
      this.#take(1);
    } else {
      this.#take(1);
    }
  }

  #lineBreak() {
    this.#plain = this.#plain.trimEnd();
    this.#push({ type: "break" });
    this.#at++;
    while (this.#text[this.#at] === " ") this.#at++;
  }

  #runLength(c) {
    let end = this.#at;
    while (this.#text[end] === c) end++;
    return end - this.#at;
  }

  #code() {
    const length = this.#runLength("`");
    const start = this.#at + length;
    const end = this.#codeEnd(length, start);
    if (end < 0) {
      this.#take(length);
      return;
    }
    let code = this.#text.slice(start, end).replaceAll("\n", " ");
    if (code.startsWith(" ") && code.endsWith(" ") && code.trim() !== "") code = code.slice(1, -1);
    this.#push({ type: "code", text: code });
    this.#at = end + length;
  }

  // The next run of exactly `length` backticks. All runs are listed once, so many openings without an end stay cheap.
  #codeEnd(length, start) {
    if (!this.#codeEnds) {
      this.#codeEnds = new Map();
      for (const run of this.#text.matchAll(/`+/g)) {
        const starts = this.#codeEnds.get(run[0].length) ?? [];
        starts.push(run.index);
        this.#codeEnds.set(run[0].length, starts);
      }
      for (const starts of this.#codeEnds.values()) starts.reverse();
    }
    const starts = this.#codeEnds.get(length) ?? [];
    while (starts.length > 0 && starts.at(-1) < start) starts.pop();
    return starts.at(-1) ?? -1;
  }

  #delimiters(mark) {
    const count = this.#runLength(mark);
    const before = this.#text[this.#at - 1] ?? " ";
    const after = this.#text[this.#at + count] ?? " ";
    const { canOpen, canClose } = flanking(mark, before, after);
    let left = count;
    this.#at += count;
    while (canClose && left > 0 && this.#nOpen[mark] > 0) {
      const used = this.#closeEmphasis(mark, left);
      if (used === 0) break;
      left -= used;
    }
    if (left === 0) return;
    if (canOpen && this.#open.length < MAX_OPEN && (mark !== "~" || left === 2)) {
      this.#push({ type: "text", text: mark.repeat(left) });
      this.#open.push({ mark, count: left, nodeIdx: this.#nodes.length - 1 });
      this.#nOpen[mark]++;
    } else {
      this.#plain += mark.repeat(left);
    }
  }

  // Ends the innermost emphasis of a mark. Returns how many characters of the closing run that took.
  #closeEmphasis(mark, left) {
    let idx = this.#open.length - 1;
    while (this.#open[idx].mark !== mark) idx--;
    const opening = this.#open[idx];
    const used = Math.min(opening.count, left) >= 2 ? 2 : 1;
    if (mark === "~" && used !== 2) return 0;
    this.#forget(idx + 1);
    this.#flush();
    const inline = mergeText(this.#nodes.splice(opening.nodeIdx + 1));
    const type = mark === "~" ? "strike" : used === 2 ? "strong" : "em";
    opening.count -= used;
    if (opening.count === 0) {
      this.#nodes.pop();
      this.#forget(idx);
    } else {
      this.#nodes[opening.nodeIdx] = { type: "text", text: mark.repeat(opening.count) };
    }
    this.#nodes.push({ type, inline });
    return used;
  }

  // Drops the openings from an index on; their marks stay as text.
  #forget(fromIdx) {
    for (const opening of this.#open.splice(fromIdx)) {
      if (opening.mark !== "[") this.#nOpen[opening.mark]--;
    }
  }

  #openBracket(length) {
    if (this.#open.length >= MAX_OPEN) {
      this.#take(length);
      return;
    }
    this.#push({ type: "text", text: this.#text.slice(this.#at, this.#at + length) });
    this.#open.push({ mark: "[", nodeIdx: this.#nodes.length - 1 });
    this.#at += length;
  }

  #closeBracket() {
    const idx = this.#open.findLastIndex((opening) => opening.mark === "[");
    if (idx < 0) {
      this.#take(1);
      return;
    }
    const target = linkTargetAt(this.#text, this.#at + 1);
    const { nodeIdx } = this.#open[idx];
    this.#forget(idx);
    const href = target && safeHref(target.address);
    if (!href) {
      this.#take(1);
      return;
    }
    this.#flush();
    const inline = mergeText(this.#nodes.splice(nodeIdx + 1));
    this.#nodes.pop();
    this.#nodes.push({ type: "link", href, inline: inline.length > 0 ? inline : [{ type: "text", text: href }] });
    this.#at = target.end;
  }

  #angle() {
    const close = this.#text.slice(this.#at, this.#at + MAX_HREF).indexOf(">");
    const address = close > 0 ? this.#text.slice(this.#at + 1, this.#at + close) : "";
    if (/^<br ?\/?$/i.test(`<${address}`)) {
      // Models write <br> in cells of tables, where a line break has no other form.
      this.#push({ type: "break" });
      this.#at += close + 1;
      return;
    }
    const href = /^(?:https?:|mailto:)\S*$/i.test(address) ? safeHref(address) : null;
    if (!href) {
      this.#take(1);
      return;
    }
    this.#push({ type: "link", href, inline: [{ type: "text", text: address }] });
    this.#at += close + 1;
  }

  #entity() {
    const found = /^&(#39|[a-z]{2,4});/.exec(this.#text.slice(this.#at, this.#at + 8));
    const char = found && Object.hasOwn(ENTITIES, found[1]) ? ENTITIES[found[1]] : null;
    if (char === null) {
      this.#take(1);
      return;
    }
    this.#plain += char;
    this.#at += found[0].length;
  }

  #bareAddress() {
    const isInWord = /\w/.test(this.#text[this.#at - 1] ?? " ");
    const start = /^https?:\/\/[^\s/]/i.exec(this.#text.slice(this.#at, this.#at + 9));
    if (isInWord || !start) {
      this.#take(1);
      return;
    }
    const address = trimAddress(/^[^\s<>`*\u0000-\u001f]*/.exec(this.#text.slice(this.#at, this.#at + MAX_HREF + 1))[0]);
    const href = safeHref(address);
    if (!href) {
      this.#take(1);
      return;
    }
    this.#push({ type: "link", href, inline: [{ type: "text", text: address }] });
    this.#at += address.length;
  }
}

// Which sides of a run of marks are open to emphasis, by the characters around it.
function flanking(mark, before, after) {
  const isSpace = (c) => /\s/.test(c);
  const isMark = (c) => /[\p{P}\p{S}]/u.test(c);
  const left = !isSpace(after) && (!isMark(after) || isSpace(before) || isMark(before));
  const right = !isSpace(before) && (!isMark(before) || isSpace(after) || isMark(after));
  if (mark !== "_") return { canOpen: left, canClose: right };
  return { canOpen: left && (!right || isMark(before)), canClose: right && (!left || isMark(after)) };
}

// Reads `(address "title")` of a link. Returns the address and the offset after it, or null.
function linkTargetAt(text, at) {
  if (text[at] !== "(") return null;
  const limit = Math.min(text.length, at + MAX_HREF);
  let end = at + 1;
  while (text[end] === " ") end++;
  const start = end;
  // Only absolute addresses become links, so the others need not be read to their end.
  if (!/^<?[a-z][a-z0-9+.-]*:/i.test(text.slice(start, start + 16))) return null;
  let address;
  if (text[start] === "<") {
    while (end < limit && text[end] !== ">" && text[end] !== "\n") end++;
    if (text[end] !== ">") return null;
    address = text.slice(start + 1, end);
    end++;
  } else {
    let nOpen = 0;
    for (; end < limit && !/\s/.test(text[end]); end++) {
      if (text[end] === "(") nOpen++;
      else if (text[end] === ")" && nOpen-- === 0) break;
    }
    address = text.slice(start, end);
  }
  while (end < limit && text[end] === " ") end++;
  const quote = text[end];
  if (quote === '"' || quote === "'") {
    end = text.slice(0, limit).indexOf(quote, end + 1);
    if (end < 0) return null;
    end++;
  }
  return text[end] === ")" ? { address, end: end + 1 } : null;
}

// Removes punctuation after an address that belongs to the sentence. A closing bracket stays if it was opened inside.
function trimAddress(address) {
  const count = (c) => address.split(c).length - 1;
  const nUnopened = { ")": count(")") - count("("), "]": count("]") - count("[") };
  let end = address.length;
  for (; end > 0; end--) {
    const last = address[end - 1];
    if (!/[.,;:!?'")\]}_~|]/.test(last)) break;
    if (last in nUnopened && nUnopened[last]-- <= 0) break;
  }
  return address.slice(0, end);
}

function mergeText(nodes) {
  const merged = [];
  for (const node of nodes) {
    const last = merged.at(-1);
    if (node.type === "text" && last?.type === "text") merged[merged.length - 1] = { type: "text", text: last.text + node.text };
    else merged.push(node);
  }
  return merged;
}
