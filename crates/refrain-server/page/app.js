// The page: history on the left, the conversation in the middle, the engine on the right.

import { Api } from "./api.js";
import { addEditedReply, addReply, addUserTurn, messagesFor, newConversation, searchIn, showVersion, turnOf } from "./conversation.js";
import { announce, byId, download, el, fitHeight, icon, iconButton, randomId, toast } from "./dom.js";
import { EngineView } from "./engine.js";
import { getJsonPref, getPref, setPref } from "./prefs.js";
import { ReplyRun } from "./reply.js";
import { FIELDS, cleanSettings, problemWith, requestFields, summary } from "./sampling.js";
import { ConversationStore } from "./store.js";
import { Thread } from "./thread.js";
import { exportName, exportText, importText, planImport } from "./transfer.js";

const SAVE_EVERY_MS = 2_000;
/** A reader within this distance of the end follows the text. */
const FOLLOW_PX = 80;

const api = new Api(() => getPref("key") ?? "");
const input = byId("input");
const model = byId("model");
let store;
let current = null; // a conversation; not stored before its first turn
let running = null; // { run, turn, conversation }

const thread = new Thread(byId("turns"), {
  version(turn) {
    if (!turn || running) return;
    showVersion(current, turn);
    keep(current);
    show();
  },
  edit(turn, text) {
    if (running) return toast("Stop the reply first");
    const made = { id: randomId(), parent: turn.parent, text, now: Date.now() };
    if (turn.role === "assistant") {
      addEditedReply(current, turn, made);
      keep(current);
      return show();
    }
    const edited = addUserTurn(current, made);
    return reply(edited.id);
  },
  regenerate(turn) {
    if (running) return toast("Stop the reply first");
    return reply(turn.parent);
  },
});
const engine = new EngineView(byId("engine"), api);

function startNew() {
  current = newConversation({ id: randomId(), model: model.value, settings: cleanSettings(getJsonPref("settings")), now: Date.now() });
  thread.forget();
  show();
  input.focus();
}

function open(id) {
  const conversation = store.get(id);
  if (!conversation) return;
  current = conversation;
  if ([...model.options].some((option) => option.value === conversation.model)) model.value = conversation.model;
  thread.forget();
  show();
  byId("thread").scrollTop = byId("thread").scrollHeight;
}

async function keep(conversation) {
  try {
    await store.save(conversation);
  } catch (error) {
    toast(`The conversation is not kept: ${error.message}`, "error");
  }
}

function show() {
  byId("title").textContent = current.title;
  document.title = current.turns.length > 0 ? `${current.title} – Refrain` : "Refrain";
  thread.show(current);
  showHistory();
  showComposer();
}

function showHistory() {
  const words = byId("search").value;
  const items = [];
  for (const conversation of store.list()) {
    const found = searchIn(conversation, words);
    if (found === null) continue;
    const isCurrent = conversation.id === current.id;
    const pick = () => {
      document.body.classList.remove("menu-open");
      open(conversation.id);
    };
    items.push(el("div", { class: isCurrent ? "item current" : "item" },
      el("button", { type: "button", class: "open", "aria-current": isCurrent ? "true" : null, on: { click: pick } },
        conversation.title, found ? el("span", { class: "found" }, found) : null),
      iconButton("trash", `Delete ${conversation.title}`, () => remove(conversation))));
  }
  const none = words.trim() === "" ? "Conversations stay in this browser." : "Nothing found.";
  byId("conversations").replaceChildren(...(items.length > 0 ? items : [el("p", { class: "empty" }, none)]));
}

async function remove(conversation) {
  if (!confirm(`Delete “${conversation.title}”?`)) return;
  if (running?.conversation === conversation) running.run.stop();
  await store.remove(conversation.id);
  if (current === conversation) startNew();
  else showHistory();
}

function showComposer() {
  const isRunning = running !== null;
  const button = isRunning
    ? iconButton("stop", "Stop", () => running?.run.stop())
    : iconButton("send", "Send", () => {}, { type: "submit" });
  byId("composer-button").replaceChildren(button);
  byId("composer-note").textContent = summary(current.settings) || "Enter sends, Shift+Enter makes a new line.";
}

async function send() {
  const text = input.value;
  if (text.trim() === "" || running) return;
  input.value = "";
  fitHeight(input);
  const turn = addUserTurn(current, { id: randomId(), parent: current.leaf, text, now: Date.now() });
  await reply(turn.id);
}

/** Asks the model for a reply after a turn. */
async function reply(parent) {
  const conversation = current;
  let request;
  try {
    request = { ...requestFields(conversation.settings), model: model.value, messages: messagesFor(conversation, parent) };
  } catch (error) {
    toast(error.message, "error");
    return;
  }
  conversation.model = model.value;
  const turn = addReply(conversation, { id: randomId(), parent, model: model.value, now: Date.now() });
  let isDrawn = true;
  let savedAt = performance.now();
  const draw = () => {
    isDrawn = true;
    if (current !== conversation) return;
    const area = byId("thread");
    const follows = area.scrollHeight - area.scrollTop - area.clientHeight < FOLLOW_PX;
    thread.update(turn, run.pause);
    if (follows) area.scrollTop = area.scrollHeight;
  };
  const onChange = () => {
    if (isDrawn) {
      isDrawn = false;
      // A hidden page draws no frames, and must show the end all the same.
      if (document.hidden) setTimeout(draw, 0);
      else requestAnimationFrame(draw);
    }
    if (performance.now() - savedAt > SAVE_EVERY_MS) {
      savedAt = performance.now();
      keep(conversation);
    }
  };
  const run = new ReplyRun({ api, turn, onChange });
  running = { run, turn, conversation };
  show();
  byId("thread").scrollTop = byId("thread").scrollHeight;
  await run.run(request);
  running = null;
  conversation.updated = Date.now();
  await keep(conversation);
  if (current === conversation) show();
  else showHistory();
  thread.update(turn, null);
  announce(turn.state === "failed" ? `The reply failed: ${turn.error.message}` : "The reply is complete");
  if (turn.error?.status === 401) await askForKey();
}

async function askForKey() {
  const dialog = byId("key-dialog");
  dialog.showModal();
  await new Promise((resolve) => dialog.addEventListener("close", resolve, { once: true }));
  const key = byId("key").value.trim();
  byId("key").value = "";
  if (key === "") return;
  setPref("key", key);
  await loadModels();
}

async function loadModels() {
  try {
    const models = await api.models();
    const chosen = current?.model ?? getPref("model");
    model.replaceChildren(...models.map(({ id }) => el("option", { value: id }, id)));
    if (models.some(({ id }) => id === chosen)) model.value = chosen;
  } catch (error) {
    if (error.needsKey) return askForKey();
    toast(error.hint ? `${error.message}: ${error.hint}` : error.message, "error");
  }
  return undefined;
}

function openSettings() {
  const fields = FIELDS.map((field) => settingElement(field, current.settings, () => {
    if (current.turns.length > 0) keep(current);
    showComposer();
  }));
  byId("settings-fields").replaceChildren(...fields);
  byId("settings-dialog").showModal();
}

function settingElement(field, settings, onChange) {
  const id = `setting-${field.name}`;
  const area = field.kind === "text" || field.kind === "lines";
  let control;
  if (field.kind === "choice") {
    control = el("select", { id }, ...field.choices.map(([value, label]) => el("option", { value }, label)));
  } else if (area) {
    control = el("textarea", { id, rows: field.kind === "text" ? "4" : "2" });
  } else {
    control = el("input", { id, inputmode: "decimal", placeholder: "default", autocomplete: "off" });
  }
  control.value = settings[field.name] ?? "";
  const problem = el("small", { class: "problem", "aria-live": "polite" });
  const check = () => {
    problem.textContent = problemWith(field, control.value) ?? "";
  };
  control.addEventListener("input", () => {
    if (control.value === "") delete settings[field.name];
    else settings[field.name] = control.value;
    check();
    onChange();
  });
  check();
  return el("div", { class: "setting" }, el("label", { for: id }, field.label), control, problem, el("small", {}, field.help));
}

function exportAll() {
  const all = store.list();
  if (all.length === 0) return toast("There is nothing to export yet");
  return download(exportName(all, Date.now()), exportText(all, Date.now()));
}

async function importFile(file) {
  try {
    const plan = planImport(store.list(), importText(await file.text()));
    for (const conversation of [...plan.added, ...plan.updated]) await store.save(conversation);
    toast(`${plan.added.length} added, ${plan.updated.length} updated, ${plan.nKept} kept as they were`);
    showHistory();
  } catch (error) {
    toast(error.message, "error");
  }
}

function switchTheme() {
  const root = document.documentElement;
  const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
  setPref("theme", root.dataset.theme);
}

function wire() {
  byId("header-start").append(iconButton("menu", "Conversations", () => document.body.classList.toggle("menu-open"), { id: "menu-button" }));
  byId("header-end").append(
    iconButton("settings", "Settings of this chat", openSettings, { id: "settings-button" }),
    iconButton("engine", "Engine", () => engine.toggle(), { id: "engine-button" }));
  byId("sidebar-tools").append(
    iconButton("upload", "Import conversations", () => byId("import-file").click()),
    iconButton("download", "Export conversations", exportAll),
    iconButton("theme", "Dark or light", switchTheme));
  byId("new-chat").addEventListener("click", () => {
    document.body.classList.remove("menu-open");
    startNew();
  });
  byId("search").addEventListener("input", showHistory);
  byId("import-file").addEventListener("change", ({ target }) => {
    if (target.files[0]) importFile(target.files[0]);
    target.value = "";
  });
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  input.addEventListener("input", () => fitHeight(input));
  input.addEventListener("keydown", (event) => {
    // A phone's keyboard has no Shift+Enter: there, Enter makes a new line.
    const isTouched = matchMedia("(pointer: coarse)").matches;
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing && !isTouched) {
      event.preventDefault();
      send();
    }
  });
  model.addEventListener("change", () => setPref("model", model.value));
  byId("settings-usual").addEventListener("click", () => {
    setPref("settings", JSON.stringify(current.settings));
    toast("New chats start with these settings");
  });
  byId("thread").addEventListener("click", () => document.body.classList.remove("menu-open"));
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && running && !document.querySelector("dialog[open]")) running.run.stop();
  });
}

async function start() {
  wire();
  const opened = await ConversationStore.open({
    onOtherTab(id) {
      if (current?.id === id && !running && turnOf(store.get(id) ?? current, current.leaf)) open(id);
      else showHistory();
    },
  });
  store = opened.store;
  if (opened.problem) toast(`Conversations are not kept: ${opened.problem}`, "error");
  startNew();
  await loadModels();
  current.model = model.value;
}

start().catch((error) => {
  byId("turns").replaceChildren(el("p", { class: "error" }, icon("warning"), ` ${error.message}`));
});
