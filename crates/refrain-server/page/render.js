// Elements from parsed markdown. Text of a model reaches the document as text nodes only.

import { copyButton, el } from "./dom.js";
import { highlight } from "./highlight.js";
import { GrowingMarkdown } from "./markdown.js";

/** Shows a markdown text that grows in an element. Elements of blocks that did not change stay, and so do selections. */
export class MarkdownView {
  #parser = new GrowingMarkdown();
  #shown = []; // blocks, each with its element in `element`
  element = el("div", { class: "markdown" });

  update(text) {
    const blocks = this.#parser.update(text);
    let nSame = 0;
    while (nSame < blocks.length && nSame < this.#shown.length && blocks[nSame] === this.#shown[nSame]) nSame++;
    while (this.element.children.length > nSame) this.element.lastElementChild.remove();
    for (const block of blocks.slice(nSame)) this.element.append(blockElement(block));
    this.#shown = blocks;
  }
}

function blockElement(block) {
  switch (block.type) {
    case "heading":
      // The page has headings of its own above; those of replies start below them.
      return el(`h${Math.min(block.level + 2, 6)}`, { class: `level-${block.level}` }, ...inlineNodes(block.inline));
    case "code":
      return codeElement(block);
    case "quote":
      return el("blockquote", {}, ...block.blocks.map(blockElement));
    case "list":
      return listElement(block);
    case "table":
      return tableElement(block);
    case "rule":
      return el("hr");
    default:
      return el("p", {}, ...inlineNodes(block.inline));
  }
}

function codeElement({ lang, text }) {
  const code = el("code", {}, ...highlight(text, lang).map(({ kind, text: part }) => {
    return kind === "plain" ? part : el("span", { class: `hl-${kind}` }, part);
  }));
  return el("figure", { class: "code" },
    el("figcaption", {}, el("span", { class: "lang" }, lang || "text"), copyButton("Copy code", () => text)),
    // A region that scrolls must be reachable by keyboard.
    el("pre", { tabindex: "0", "aria-label": lang ? `Code in ${lang}` : "Code" }, code));
}

function listElement({ isOrdered, number, isTight, items }) {
  const list = el(isOrdered ? "ol" : "ul", { class: isTight ? "tight" : "loose" });
  if (isOrdered && number !== 1) list.start = number;
  for (const { checked, blocks } of items) {
    const item = el("li");
    if (checked !== null) {
      item.className = "task";
      item.append(el("input", { type: "checkbox", disabled: true, checked, "aria-label": checked ? "done" : "to do" }));
    }
    for (const block of blocks) {
      if (isTight && block.type === "paragraph") item.append(...inlineNodes(block.inline));
      else item.append(blockElement(block));
    }
    list.append(item);
  }
  return list;
}

function tableElement({ align, head, rows }) {
  const cells = (tag, row) => row.map((inline, idx) => {
    return el(tag, { class: align[idx] ? `align-${align[idx]}` : "" }, ...inlineNodes(inline));
  });
  return el("div", { class: "table", tabindex: "0", role: "group", "aria-label": "Table" },
    el("table", {},
      el("thead", {}, el("tr", {}, ...cells("th", head))),
      el("tbody", {}, ...rows.map((row) => el("tr", {}, ...cells("td", row))))));
}

function inlineNodes(inline, isInLink = false) {
  return inline.flatMap((node) => {
    switch (node.type) {
      case "text":
        return [node.text];
      case "code":
        return [el("code", {}, node.text)];
      case "break":
        return [el("br")];
      case "link": {
        const children = inlineNodes(node.inline, true);
        if (isInLink) return children;
        const props = { href: node.href, rel: "noopener noreferrer nofollow", target: "_blank" };
        return [el("a", props, ...children)];
      }
      default: {
        const tag = { strong: "strong", em: "em", strike: "s" }[node.type];
        return [el(tag, {}, ...inlineNodes(node.inline, isInLink))];
      }
    }
  });
}
