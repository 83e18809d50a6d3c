// Markdown, as language models write it: text to a tree of plain objects.
//
// Blocks are parsed here and inline text in inline.js. Nothing here touches the document or makes HTML: `render.js`
// builds elements from the tree, so text of a model can never become markup. Raw HTML is text.
//
// The time is linear in the length of the text, and the nesting is bounded, for any input.

import { parseInline } from "./inline.js";

/** Deepest nesting of quotes and lists; what is nested deeper becomes a paragraph. */
const MAX_DEPTH = 12;
/** Most columns of a table; wider ones become paragraphs. */
const MAX_COLUMNS = 64;

/**
 * Parses a text into blocks. Each has the offsets `start` and `end` of its source text.
 *
 * Block types: `heading`, `paragraph`, `code`, `quote`, `list`, `table`, `rule`.
 */
export function parseMarkdown(text) {
  const lines = text.split("\n");
  const offsets = [];
  let offset = 0;
  for (const line of lines) {
    offsets.push(offset);
    offset += line.length + 1;
  }
  return parseBlocks(lines.map(normaliseLine), 0).map(({ firstLine, endLine, ...block }) => ({
    ...block,
    start: offsets[firstLine],
    end: endLine < lines.length ? offsets[endLine] : text.length,
  }));
}

function normaliseLine(line) {
  const text = line.endsWith("\r") ? line.slice(0, -1) : line;
  const indent = /^[ \t]*/.exec(text)[0];
  return indent.includes("\t") ? indent.replaceAll("\t", "    ") + text.slice(indent.length) : text;
}

function parseBlocks(lines, depth) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (isBlank(lines[at])) {
      at++;
      continue;
    }
    const [block, next] = parseBlock(lines, at, depth);
    blocks.push({ ...block, firstLine: at, endLine: next });
    at = next;
  }
  return blocks;
}

function parseBlock(lines, at, depth) {
  const line = lines[at];
  const fence = fenceOf(line);
  if (fence) return parseFence(lines, at, fence);
  const heading = headingOf(line);
  if (heading) return [heading, at + 1];
  if (isRule(line)) return [{ type: "rule" }, at + 1];
  if (depth < MAX_DEPTH && isQuote(line)) return parseQuote(lines, at, depth);
  const marker = depth < MAX_DEPTH ? listMarkerOf(line) : null;
  if (marker) return parseList(lines, at, marker, depth);
  if (tableColumnsAt(lines, at) > 0) return parseTable(lines, at);
  return parseParagraph(lines, at, depth);
}

function isBlank(line) {
  return line.trim() === "";
}

function indentOf(line) {
  let n = 0;
  while (line[n] === " ") n++;
  return n;
}

// Whether a line ends the paragraph before it.
function interruptsParagraph(lines, at, depth) {
  const line = lines[at];
  if (isBlank(line) || fenceOf(line) || headingOf(line) || isRule(line)) return true;
  if (tableColumnsAt(lines, at) > 0) return true;
  if (depth >= MAX_DEPTH) return false;
  if (isQuote(line)) return true;
  const marker = listMarkerOf(line);
  return marker !== null && marker.rest !== "" && (!marker.isOrdered || marker.number === 1);
}

function parseParagraph(lines, at, depth) {
  let end = at + 1;
  while (end < lines.length && !interruptsParagraph(lines, end, depth)) end++;
  const text = lines.slice(at, end).map((line) => line.trimStart()).join("\n");
  return [{ type: "paragraph", inline: parseInline(text.trimEnd()) }, end];
}

function headingOf(line) {
  const opening = /^ {0,3}(#{1,6})(?=[ \t]|$)/.exec(line);
  if (!opening) return null;
  let text = line.slice(opening[0].length).trim();
  let end = text.length;
  while (end > 0 && text[end - 1] === "#") end--;
  if (end < text.length && (end === 0 || text[end - 1] === " " || text[end - 1] === "\t")) {
    text = text.slice(0, end).trimEnd();
  }
  return { type: "heading", level: opening[1].length, inline: parseInline(text) };
}

function isRule(line) {
  if (indentOf(line) > 3) return false;
  const marks = line.replaceAll(" ", "").replaceAll("\t", "");
  const mark = marks[0];
  if (marks.length < 3 || (mark !== "-" && mark !== "*" && mark !== "_")) return false;
  for (const other of marks) {
    if (other !== mark) return false;
  }
  return true;
}

function fenceOf(line) {
  const found = /^( *)(`{3,}|~{3,})(.*)$/.exec(line);
  if (!found) return null;
  const [, indent, marks, info] = found;
  if (marks[0] === "`" && info.includes("`")) return null;
  return { indent: indent.length, mark: marks[0], length: marks.length, lang: info.trim().split(/[\s,{]/, 1)[0] };
}

function parseFence(lines, at, fence) {
  const body = [];
  let end = at + 1;
  let isOpen = true; // until the closing fence is found: the code is still being written, or never ends
  for (; end < lines.length; end++) {
    const line = lines[end];
    const marks = line.trim();
    if (marks.length >= fence.length && marks[0] === fence.mark && marks === fence.mark.repeat(marks.length)) {
      isOpen = false;
      end++;
      break;
    }
    body.push(line.slice(Math.min(fence.indent, indentOf(line))));
  }
  return [{ type: "code", lang: fence.lang, text: body.join("\n"), isOpen }, end];
}

function isQuote(line) {
  return /^ {0,3}>/.test(line);
}

function parseQuote(lines, at, depth) {
  const body = [];
  let end = at;
  for (; end < lines.length; end++) {
    const line = lines[end];
    if (isQuote(line)) {
      body.push(line.replace(/^ {0,3}> ?/, ""));
    } else if (isBlank(line) || isBlank(body.at(-1)) || interruptsParagraph(lines, end, depth)) {
      break;
    } else {
      body.push(line); // a paragraph may continue without the mark
    }
  }
  return [{ type: "quote", blocks: withoutLines(parseBlocks(body, depth + 1)) }, end];
}

function listMarkerOf(line) {
  const found = /^( *)([-*+]|\d{1,9}[.)])(?:( +)(.*))?$/.exec(line);
  if (!found || isRule(line)) return null;
  const [, indent, mark, space = "", rest = ""] = found;
  const isOrdered = mark.length > 1;
  return {
    indent: indent.length,
    kind: isOrdered ? mark.at(-1) : mark,
    isOrdered,
    number: isOrdered ? Number.parseInt(mark, 10) : 0,
    rest,
    contentIndent: indent.length + mark.length + (space.length > 4 || rest === "" ? 1 : space.length),
  };
}

function parseList(lines, at, first, depth) {
  const items = [];
  let isLoose = false;
  let end = at;
  while (end < lines.length) {
    const marker = listMarkerOf(lines[end]);
    if (!marker || marker.kind !== first.kind || marker.indent > first.indent + 3) break;
    const [body, next] = listItemLines(lines, end, marker, depth);
    const { checked, text } = taskOf(body[0]);
    body[0] = text;
    items.push({ checked, blocks: withoutLines(parseBlocks(body, depth + 1)) });
    isLoose ||= hasOuterBlank(body);
    end = next;
    let blankEnd = end;
    while (blankEnd < lines.length && isBlank(lines[blankEnd])) blankEnd++;
    if (blankEnd > end) {
      const following = blankEnd < lines.length ? listMarkerOf(lines[blankEnd]) : null;
      if (!following || following.kind !== first.kind || following.indent > first.indent + 3) break;
      isLoose = true;
      end = blankEnd;
    }
  }
  return [{ type: "list", isOrdered: first.isOrdered, number: first.number, isTight: !isLoose, items }, end];
}

// The lines of one item without their indentation, and the line after them. Models indent nested text by less than
// the standard asks for below `1.`, so two columns more than the marker are enough.
function listItemLines(lines, at, marker, depth) {
  const body = [marker.rest];
  let end = at + 1;
  let nBlank = 0;
  let contentIndent = marker.contentIndent;
  const fence = { open: fenceOf(marker.rest) };
  for (; end < lines.length; end++) {
    const line = lines[end];
    if (isBlank(line)) {
      nBlank++;
      continue;
    }
    const indent = indentOf(line);
    const isInside = indent >= Math.min(contentIndent, marker.indent + 2);
    const isLazy = nBlank === 0 && !fence.open && !interruptsItem(lines, end, depth);
    if (!isInside && !isLazy) break;
    while (nBlank > 0) {
      body.push("");
      nBlank--;
    }
    if (isInside) contentIndent = Math.min(contentIndent, indent);
    const text = line.slice(Math.min(indent, contentIndent));
    trackFence(fence, text);
    body.push(text);
  }
  return [body, end - nBlank];
}

function interruptsItem(lines, at, depth) {
  return interruptsParagraph(lines, at, depth) || listMarkerOf(lines[at]) !== null;
}

function trackFence(fence, line) {
  if (!fence.open) {
    fence.open = fenceOf(line);
  } else {
    const marks = line.trim();
    const { mark, length } = fence.open;
    if (marks.length >= length && marks === mark.repeat(marks.length)) fence.open = null;
  }
}

// A blank line between two blocks of an item makes the list loose; one inside a fence does not.
function hasOuterBlank(body) {
  const fence = { open: null };
  return body.some((line, idx) => {
    if (idx > 0 && isBlank(line) && !fence.open) return true;
    trackFence(fence, line);
    return false;
  });
}

function taskOf(text) {
  const found = /^\[([ xX])\](?= )/.exec(text);
  return found ? { checked: found[1] !== " ", text: text.slice(4) } : { checked: null, text };
}

// Columns of the table whose head is at a line; 0 if there is none.
function tableColumnsAt(lines, at) {
  if (at + 1 >= lines.length || !lines[at].includes("|") || !lines[at + 1].includes("-")) return 0;
  if (!/^[ \t|:-]+$/.test(lines[at + 1])) return 0;
  const delimiters = splitRow(lines[at + 1]);
  const isDelimiters = delimiters.every((cell) => /^:?-+:?$/.test(cell));
  if (!isDelimiters || delimiters.length > MAX_COLUMNS) return 0;
  return splitRow(lines[at]).length === delimiters.length ? delimiters.length : 0;
}

function parseTable(lines, at) {
  const align = splitRow(lines[at + 1]).map((cell) => {
    if (cell.startsWith(":") && cell.endsWith(":")) return "center";
    return cell.endsWith(":") ? "right" : cell.startsWith(":") ? "left" : null;
  });
  const row = (line) => {
    const cells = splitRow(line).slice(0, align.length);
    while (cells.length < align.length) cells.push("");
    return cells.map(parseInline);
  };
  const rows = [];
  let end = at + 2;
  for (; end < lines.length && lines[end].includes("|"); end++) rows.push(row(lines[end]));
  return [{ type: "table", align, head: row(lines[at]), rows }, end];
}

// Cells of a row. A pipe after a backslash or in a code span is part of its cell.
function splitRow(line) {
  const cells = [];
  let cell = "";
  let inCode = false;
  for (let at = 0; at < line.length; at++) {
    const c = line[at];
    if (c === "\\" && line[at + 1] === "|") {
      cell += "|";
      at++;
    } else if (c === "|" && !inCode) {
      cells.push(cell.trim());
      cell = "";
    } else {
      if (c === "`") inCode = !inCode && line.includes("`", at + 1);
      cell += c;
    }
  }
  cells.push(cell.trim());
  if (cells.length > 1 && cells[0] === "") cells.shift();
  if (cells.length > 1 && cells.at(-1) === "") cells.pop();
  return cells;
}

function withoutLines(blocks) {
  return blocks.map(({ firstLine, endLine, ...block }) => block);
}

/**
 * Parses a text that grows. Blocks that later text cannot change are kept as the same objects, so whoever shows them
 * can keep their elements.
 */
export class GrowingMarkdown {
  #text = "";
  #blocks = [];

  /** The blocks of `text`. Cheap if it starts with the text before. */
  update(text) {
    // Text that follows can join the last block to the one before it (`a` and `-`, then `a` and `-5`), but not further.
    const kept = text.startsWith(this.#text) ? this.#blocks.slice(0, -2) : [];
    const from = kept.length > 0 ? kept.at(-1).end : 0;
    const more = parseMarkdown(text.slice(from));
    for (const block of more) {
      block.start += from;
      block.end += from;
    }
    this.#text = text;
    this.#blocks = kept.concat(more);
    return this.#blocks;
  }
}
