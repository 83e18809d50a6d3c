// Small helpers for elements.

const SVG = "http://www.w3.org/2000/svg";

/**
 * Makes an element.
 *
 * Props are attributes, with two exceptions: `on` holds listeners by event, and `true`, `false` and `null` set or leave
 * out an attribute. Children that are strings become text, never markup.
 */
export function el(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name === "on") {
      for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    } else if (value === true) {
      element.setAttribute(name, "");
    } else if (value !== false && value !== null && value !== undefined && value !== "") {
      element.setAttribute(name, value);
    }
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** An icon of the sprite in index.html. */
export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  const use = document.createElementNS(SVG, "use");
  use.setAttribute("href", `#icon-${name}`);
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  svg.append(use);
  return svg;
}

/** A button with an icon and a name for assistive technology, shown as a tooltip. */
export function iconButton(name, label, onClick, props = {}) {
  return el("button", { type: "button", class: "icon-button", "aria-label": label, title: label, on: { click: onClick }, ...props },
    icon(name));
}

/** The element with an id. Its absence is a mistake in index.html. */
export function byId(id) {
  const element = document.getElementById(id);
  if (!element) throw new Error(`index.html has no element #${id}`);
  return element;
}

/** Tells assistive technology what happened, without moving the focus. */
export function announce(text) {
  const region = byId("announcer");
  region.textContent = "";
  // A region that gets the same text again is read only if it was empty in between.
  requestAnimationFrame(() => {
    region.textContent = text;
  });
}

/** Shows a short message at the bottom of the page for a few seconds. */
export function toast(text, tone = "info") {
  const message = el("div", { class: `toast ${tone}` }, text);
  byId("toasts").append(message);
  setTimeout(() => message.remove(), tone === "error" ? 10_000 : 4_000);
}

/** A button that copies a text and says so. */
export function copyButton(label, text) {
  const button = iconButton("copy", label, async () => {
    const isCopied = await copyText(text());
    button.replaceChildren(icon(isCopied ? "check" : "warning"));
    announce(isCopied ? "Copied" : "The browser refused to copy");
    setTimeout(() => button.replaceChildren(icon("copy")), 1_500);
  });
  button.classList.add("copy");
  return button;
}

async function copyText(text) {
  if (navigator.clipboard) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      // Refused, for instance because the page is not focused. The older way may still work.
    }
  }
  // Browsers offer the clipboard only over TLS or on this machine; a server in the local network has neither.
  const area = el("textarea", { class: "off-screen", "aria-hidden": "true" });
  area.value = text;
  document.body.append(area);
  const focused = document.activeElement;
  area.select();
  const isCopied = document.execCommand("copy");
  area.remove();
  focused?.focus();
  return isCopied;
}

/** A random name. `crypto.randomUUID` exists only over TLS or on this machine. */
export function randomId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** Offers a file for download. */
export function download(name, text, type = "application/json") {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const link = el("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}

/** Makes a text area as high as its text. */
export function fitHeight(area) {
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight + area.offsetHeight - area.clientHeight}px`;
}
