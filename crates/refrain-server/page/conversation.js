// A conversation: a tree of turns. Editing or regenerating a turn adds a version beside it, and nothing is lost.
//
// A conversation is plain data, as it is stored, exported and imported:
//
//   { id, title, isNamed, created, updated, model, settings, leaf, turns: [turn] }
//   turn: { id, parent, role, text, created, … }            role is `user` or `assistant`
//   of the assistant: { model, thinking, state, finish, stats, error }
//
// `leaf` is the last turn of the version that is shown; its ancestors are the turns before it.

/** Longest title made from a message, in characters. */
const MAX_TITLE = 60;

/** A conversation without turns. */
export function newConversation({ id, model, settings, now }) {
  return { id, title: "New chat", isNamed: false, created: now, updated: now, model, settings: { ...settings }, leaf: null, turns: [] };
}

/** The turn with an id. */
export function turnOf(conversation, id) {
  return conversation.turns.find((turn) => turn.id === id) ?? null;
}

/** The shown turns from the first to the last. */
export function path(conversation) {
  return pathTo(conversation, conversation.leaf);
}

/** The turns from the first to the one with an id. */
export function pathTo(conversation, id) {
  const byId = new Map(conversation.turns.map((turn) => [turn.id, turn]));
  const turns = [];
  // Bounded by the number of turns, because an imported tree may have a cycle.
  for (let turn = byId.get(id); turn && turns.length < byId.size; turn = byId.get(turn.parent)) turns.push(turn);
  return turns.reverse();
}

/** The versions of a turn, the oldest first. */
export function versions(conversation, turn) {
  return conversation.turns.filter((other) => other.parent === turn.parent);
}

/** Shows another version of a turn, with the turns that followed it last. */
export function showVersion(conversation, turn) {
  let leaf = turn;
  for (let n = 0; n < conversation.turns.length; n++) {
    const next = conversation.turns.findLast((other) => other.parent === leaf.id);
    if (!next) break;
    leaf = next;
  }
  conversation.leaf = leaf.id;
}

/** Adds a message of the user after a turn, or as the first one. */
export function addUserTurn(conversation, { id, parent, text, now }) {
  const turn = { id, parent, role: "user", text, created: now };
  add(conversation, turn, now);
  if (!conversation.isNamed && conversation.title === "New chat") conversation.title = titleOf(text);
  return turn;
}

/** Adds a reply after a turn. Its text comes later. */
export function addReply(conversation, { id, parent, model, now }) {
  const turn = {
    id, parent, role: "assistant", text: "", created: now,
    model, thinking: "", state: "open", finish: null, stats: null, error: null,
  };
  add(conversation, turn, now);
  return turn;
}

/** Adds a version of a reply that the user wrote. */
export function addEditedReply(conversation, reply, { id, text, now }) {
  const turn = { ...reply, id, text, created: now, state: "edited", finish: null, stats: null, error: null };
  add(conversation, turn, now);
  return turn;
}

function add(conversation, turn, now) {
  conversation.turns.push(turn);
  conversation.leaf = turn.id;
  conversation.updated = now;
}

/** A title from the first line of a message. */
export function titleOf(text) {
  const line = text.trim().split("\n", 1)[0].trim();
  if (line === "") return "New chat";
  const chars = Array.from(line);
  return chars.length <= MAX_TITLE ? line : `${chars.slice(0, MAX_TITLE - 1).join("").trimEnd()}…`;
}

/** The messages for a reply after a turn. Thinking is not sent again: models are trained without it. */
export function messagesFor(conversation, parentId) {
  const messages = [];
  const system = conversation.settings?.system?.trim();
  if (system) messages.push({ role: "system", content: system });
  for (const turn of pathTo(conversation, parentId)) {
    if (turn.role === "assistant" && turn.text === "") continue;
    messages.push({ role: turn.role, content: turn.text });
  }
  return messages;
}

/** The text around the first place where a conversation contains the words, or null. An empty search finds all. */
export function searchIn(conversation, words) {
  const needle = words.trim().toLowerCase();
  if (needle === "" || conversation.title.toLowerCase().includes(needle)) return "";
  for (const { text } of conversation.turns) {
    const at = text.toLowerCase().indexOf(needle);
    if (at < 0) continue;
    const from = Math.max(0, at - 24);
    return (from > 0 ? "…" : "") + text.slice(from, at + needle.length + 48).replaceAll("\n", " ");
  }
  return null;
}
