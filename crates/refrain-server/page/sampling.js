// Settings of a conversation: what they are named, what they may be, and what a request makes of them.
//
// A setting is kept as the text in its field. An empty one is not sent, so the server's default applies.

/** The fields of the settings dialog, in order. */
export const FIELDS = [
  { name: "system", label: "System prompt", kind: "text", help: "Instructions that come before the conversation." },
  { name: "temperature", label: "Temperature", kind: "number", min: 0, max: 100, step: 0.1, help: "0 always takes the most probable token; higher values vary more." },
  { name: "top_p", label: "top-p", kind: "number", min: 0, max: 1, step: 0.05, help: "Keep the most probable tokens whose probabilities add up to this." },
  { name: "top_k", label: "top-k", kind: "integer", min: 0, max: 1_000_000, step: 1, help: "Keep this many of the most probable tokens; 0 keeps all." },
  { name: "min_p", label: "min-p", kind: "number", min: 0, max: 1, step: 0.01, help: "Drop tokens less probable than this part of the best one." },
  { name: "max_tokens", label: "Max tokens", kind: "integer", min: 1, max: 10_000_000, step: 1, help: "Longest reply, thinking included." },
  { name: "seed", label: "Seed", kind: "integer", min: 0, max: Number.MAX_SAFE_INTEGER, step: 1, help: "The same seed gives the same reply." },
  { name: "stop", label: "Stop texts", kind: "lines", help: "One on each line; the reply ends before any of them. \\n is a line break." },
  {
    name: "thinking", label: "Thinking", kind: "choice", help: "For models whose chat template can switch it.",
    choices: [["", "Model's default"], ["on", "On"], ["off", "Off"]],
  },
];

/** Why a field's text is wrong, or null. */
export function problemWith(field, text) {
  const value = text.trim();
  if (value === "" || (field.kind !== "number" && field.kind !== "integer")) return null;
  const number = Number(value);
  if (!Number.isFinite(number)) return `${value} is not a number`;
  if (field.kind === "integer" && !Number.isInteger(number)) return `${value} is not a whole number`;
  if (number < field.min || number > field.max) return `${value} is not between ${field.min} and ${field.max}`;
  return null;
}

/** The settings in an object of unknown origin: only known names, only texts. */
export function cleanSettings(settings) {
  const clean = {};
  for (const { name } of FIELDS) {
    if (typeof settings?.[name] === "string" && settings[name] !== "") clean[name] = settings[name];
  }
  return clean;
}

/** The fields of a request for these settings. A setting that is wrong is reported as an `Error`, never left out. */
export function requestFields(settings) {
  const request = {};
  for (const field of FIELDS) {
    const text = settings[field.name] ?? "";
    if (text.trim() === "" || field.name === "system") continue;
    const problem = problemWith(field, text);
    if (problem) throw new Error(`${field.label}: ${problem}`);
    if (field.name === "stop") request.stop = stopTexts(text);
    else if (field.name === "thinking") request.chat_template_kwargs = { enable_thinking: text === "on" };
    else request[field.name] = Number(text.trim());
  }
  return request;
}

function stopTexts(text) {
  const escapes = { "\\n": "\n", "\\t": "\t", "\\\\": "\\" };
  return text.split("\n").filter((line) => line !== "").map((line) => line.replace(/\\[nt\\]/g, (found) => escapes[found]));
}

/** The settings that differ from the server's defaults, in a few words. */
export function summary(settings) {
  const parts = [];
  for (const { name, label } of FIELDS) {
    if ((settings[name] ?? "").trim() === "") continue;
    parts.push(name === "system" || name === "stop" ? label.toLowerCase() : `${label.toLowerCase()} ${settings[name].trim()}`);
  }
  return parts.join(" · ");
}
