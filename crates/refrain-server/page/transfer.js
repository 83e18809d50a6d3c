// Conversations as a JSON file, for export and import. A file is checked before anything of it is kept.

import { cleanSettings } from "./sampling.js";

export const FORMAT = "refrain-conversations";
export const VERSION = 1;

const MAX_TURNS = 100_000;
const STATES = new Set(["done", "stopped", "failed", "edited"]);

/** The file for conversations. */
export function exportText(conversations, now) {
  const exported = new Date(now).toISOString();
  return `${JSON.stringify({ format: FORMAT, version: VERSION, exported, conversations }, null, 2)}\n`;
}

/** A name for the file. */
export function exportName(conversations, now) {
  const day = new Date(now).toISOString().slice(0, 10);
  if (conversations.length !== 1) return `refrain-chats-${day}.json`;
  const title = conversations[0].title.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-+|-+$/g, "").slice(0, 40);
  return `refrain-chat-${title || "untitled"}-${day}.json`;
}

/** The conversations of a file. Anything that is not as written by `exportText` is an `Error` that names it. */
export function importText(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch (error) {
    throw new Error(`the file is not JSON: ${error.message}`);
  }
  if (file?.format !== FORMAT) throw new Error(`the file is not an export of this page: its format is not "${FORMAT}"`);
  if (file.version !== VERSION) throw new Error(`the file has version ${file.version}, this page reads version ${VERSION}`);
  if (!Array.isArray(file.conversations)) throw new Error("the file has no list of conversations");
  return file.conversations.map((conversation, idx) => checkConversation(conversation, `conversation ${idx + 1}`));
}

function checkConversation(conversation, where) {
  const id = text(conversation?.id, `${where}: id`, 1, 100);
  if (!Array.isArray(conversation.turns)) throw new Error(`${where}: turns is not a list`);
  if (conversation.turns.length > MAX_TURNS) throw new Error(`${where} has more than ${MAX_TURNS} turns`);
  const turns = conversation.turns.map((turn, idx) => checkTurn(turn, `${where}, turn ${idx + 1}`));
  checkTree(turns, where);
  const leaf = turns.some((turn) => turn.id === conversation.leaf) ? conversation.leaf : (turns.at(-1)?.id ?? null);
  return {
    id,
    title: text(conversation.title, `${where}: title`, 1, 1_000),
    isNamed: conversation.isNamed === true,
    created: time(conversation.created, `${where}: created`),
    updated: time(conversation.updated, `${where}: updated`),
    model: typeof conversation.model === "string" ? conversation.model : null,
    settings: cleanSettings(conversation.settings),
    leaf,
    turns,
  };
}

function checkTurn(turn, where) {
  const common = {
    id: text(turn?.id, `${where}: id`, 1, 100),
    parent: turn.parent === null ? null : text(turn.parent, `${where}: parent`, 1, 100),
    role: turn.role,
    text: text(turn.text, `${where}: text`, 0),
    created: time(turn.created, `${where}: created`),
  };
  if (turn.role === "user") return common;
  if (turn.role !== "assistant") throw new Error(`${where}: role is neither user nor assistant`);
  return {
    ...common,
    model: typeof turn.model === "string" ? turn.model : null,
    thinking: typeof turn.thinking === "string" ? turn.thinking : "",
    state: STATES.has(turn.state) ? turn.state : "stopped",
    finish: typeof turn.finish === "string" ? turn.finish : null,
    stats: numbers(turn.stats),
    error: typeof turn.error?.message === "string" ? errorFields(turn.error) : null,
  };
}

function errorFields({ message, hint }) {
  return { message, hint: typeof hint === "string" ? hint : null, retryAfter: null };
}

// Parents come before their children, so the turns are a tree without cycles.
function checkTree(turns, where) {
  const seen = new Set();
  for (const { id, parent } of turns) {
    if (seen.has(id)) throw new Error(`${where}: two turns have the id ${id}`);
    if (parent !== null && !seen.has(parent)) throw new Error(`${where}: turn ${id} comes before its parent ${parent}`);
    seen.add(id);
  }
}

function text(value, where, min, max = Infinity) {
  if (typeof value !== "string") throw new Error(`${where} is not a text`);
  if (value.length < min || value.length > max) throw new Error(`${where} has ${value.length} characters`);
  return value;
}

function time(value, where) {
  // The latest time that a Date can hold.
  if (!Number.isFinite(value) || value < 0 || value > 8.64e15) throw new Error(`${where} is not a time`);
  return value;
}

function numbers(stats) {
  if (stats === null || typeof stats !== "object") return null;
  return Object.fromEntries(Object.entries(stats).filter(([, value]) => Number.isFinite(value)));
}

/** What an import changes: new conversations, newer versions of present ones, and those that are here already. */
export function planImport(present, imported) {
  const byId = new Map(present.map((conversation) => [conversation.id, conversation]));
  const plan = { added: [], updated: [], nKept: 0 };
  for (const conversation of imported) {
    const here = byId.get(conversation.id);
    if (!here) plan.added.push(conversation);
    else if (conversation.updated > here.updated) plan.updated.push(conversation);
    else plan.nKept++;
    byId.set(conversation.id, conversation);
  }
  return plan;
}
