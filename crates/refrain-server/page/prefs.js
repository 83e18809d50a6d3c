// What the browser remembers besides conversations: a few texts, in local storage.

const PREFIX = "refrain.";

// Used where the browser keeps nothing, as in some private windows; then everything lasts as long as the page.
const session = new Map();

/** A remembered text, or null. */
export function getPref(name) {
  try {
    return localStorage.getItem(PREFIX + name) ?? session.get(name) ?? null;
  } catch {
    return session.get(name) ?? null;
  }
}

/** Remembers a text; null forgets it. */
export function setPref(name, value) {
  session.delete(name);
  try {
    if (value === null) localStorage.removeItem(PREFIX + name);
    else localStorage.setItem(PREFIX + name, value);
  } catch {
    if (value !== null) session.set(name, value);
  }
}

/** A remembered object, or null. */
export function getJsonPref(name) {
  try {
    return JSON.parse(getPref(name) ?? "null");
  } catch {
    return null;
  }
}
