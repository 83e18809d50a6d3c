// The shown turns of a conversation: their text, their tools, and replies while they grow.

import { pathTo, versions } from "./conversation.js";
import { copyButton, el, fitHeight, iconButton } from "./dom.js";
import { MarkdownView } from "./render.js";
import { tokensPerS } from "./reply.js";
import { formatCount, formatMs, formatRate } from "./status.js";

/** Shows turns in an element. `actions` has what the tools of a turn do. */
export class Thread {
  #element;
  #actions;
  #views = new Map(); // by id of the turn

  constructor(element, actions) {
    this.#element = element;
    this.#actions = actions;
  }

  /** Shows the conversation's current version. */
  show(conversation) {
    const turns = conversation ? pathTo(conversation, conversation.leaf) : [];
    const views = new Map();
    for (const turn of turns) {
      const view = this.#views.get(turn.id) ?? new TurnView(turn, this.#actions);
      view.setVersions(versions(conversation, turn));
      views.set(turn.id, view);
    }
    this.#views = views;
    if (turns.length === 0) {
      this.#element.replaceChildren(el("div", { class: "welcome" }, el("strong", {}, "What is on your mind?"), "Replies come from a model on this machine."));
    } else {
      this.#element.replaceChildren(...[...views.values()].map((view) => view.element));
    }
  }

  /** Shows the present text of a reply. */
  update(turn, pause) {
    this.#views.get(turn.id)?.update(pause);
  }

  forget() {
    this.#views = new Map();
  }
}

class TurnView {
  element;
  #turn;
  #actions;
  #body = el("div", { class: "body" });
  #tools = el("div", { class: "tools" });
  #versions = [];
  #markdown = null;
  #thinking = null;
  #isEditing = false;

  constructor(turn, actions) {
    this.#turn = turn;
    this.#actions = actions;
    const label = turn.role === "user" ? "You" : "Reply";
    this.element = el("article", { class: `turn ${turn.role}`, "aria-label": label }, this.#body, this.#tools);
    this.update(null);
  }

  setVersions(all) {
    this.#versions = all;
    this.#showTools();
  }

  update(pause) {
    if (this.#isEditing) return;
    const turn = this.#turn;
    if (turn.role === "user") {
      this.#body.textContent = turn.text;
      return;
    }
    const parts = [];
    if (turn.thinking) parts.push(this.#showThinking());
    this.#markdown ??= new MarkdownView();
    this.#markdown.update(turn.text);
    parts.push(this.#markdown.element);
    if (turn.state === "open") parts.push(pause ? el("p", { class: "pause" }, pause.text) : el("span", { class: "cursor", "aria-hidden": "true" }));
    if (turn.error) parts.push(el("p", { class: "error" }, turn.error.message, turn.error.hint ? el("small", {}, turn.error.hint) : null));
    this.#body.replaceChildren(...parts);
    this.#showTools();
  }

  #showThinking() {
    const turn = this.#turn;
    if (!this.#thinking) {
      this.#thinking = { summary: el("summary"), text: el("div") };
      this.#thinking.element = el("details", { class: "thinking" }, this.#thinking.summary, this.#thinking.text);
    }
    const isOver = turn.text !== "" || turn.state !== "open";
    const ms = turn.stats?.thinkingMs;
    this.#thinking.summary.textContent = isOver ? `Thought for ${formatMs(ms ?? null)}` : "Thinking…";
    this.#thinking.text.textContent = turn.thinking;
    return this.#thinking.element;
  }

  #showTools() {
    const turn = this.#turn;
    const tools = [];
    const at = this.#versions.findIndex((other) => other.id === turn.id);
    if (this.#versions.length > 1) {
      const go = (step) => () => this.#actions.version(this.#versions[at + step]);
      tools.push(
        iconButton("left", "Previous version", go(-1), { disabled: at === 0 }),
        el("span", {}, `${at + 1} / ${this.#versions.length}`),
        iconButton("right", "Next version", go(1), { disabled: at === this.#versions.length - 1 }));
    }
    if (turn.state !== "open") {
      tools.push(copyButton("Copy", () => turn.text), iconButton("edit", "Edit", () => this.#edit()));
      if (turn.role === "assistant") tools.push(iconButton("retry", "Regenerate", () => this.#actions.regenerate(turn)));
    }
    if (turn.role === "assistant") tools.push(el("span", { class: "stats" }, statsText(turn)));
    this.#tools.replaceChildren(...tools);
  }

  #edit() {
    this.#isEditing = true;
    const area = el("textarea", { "aria-label": "Edit the text" });
    area.value = this.#turn.text;
    const end = () => {
      this.#isEditing = false;
      this.#body.classList.remove("editing");
      this.update(null);
      this.#showTools();
    };
    const save = () => {
      const text = area.value;
      end();
      if (text.trim() !== "" && text !== this.#turn.text) this.#actions.edit(this.#turn, text);
    };
    area.addEventListener("input", () => fitHeight(area));
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") end();
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) save();
    });
    const name = this.#turn.role === "user" ? "Send" : "Save";
    this.#body.replaceChildren(area);
    this.#tools.replaceChildren(
      el("button", { type: "button", class: "primary", on: { click: save } }, name),
      el("button", { type: "button", on: { click: end } }, "Cancel"));
    fitHeight(area);
    area.focus();
  }
}

function statsText(turn) {
  const { stats } = turn;
  const parts = [];
  if (turn.model) parts.push(turn.model);
  const rate = tokensPerS(stats);
  if (rate !== null) parts.push(`${formatRate(rate)} tok/s`);
  if (stats?.ttftMs !== undefined) parts.push(`first token ${formatMs(stats.ttftMs)}`);
  if (stats?.nTokens) parts.push(`${formatCount(stats.nTokens)} tokens`);
  if (stats?.pausedMs) parts.push(`paused ${formatMs(stats.pausedMs)}`);
  if (turn.state === "stopped") parts.push("stopped");
  if (turn.state === "edited") parts.push("edited");
  if (turn.finish === "length") parts.push("cut at the maximum length");
  return parts.join(" · ");
}
