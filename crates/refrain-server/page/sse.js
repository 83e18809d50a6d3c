// Server-sent events, parsed from text that arrives in pieces of any size.

/** Longest event in characters. More means that the other side does not speak this protocol. */
export const MAX_EVENT_CHARS = 8 * 1024 * 1024;

const LF = 10;
const CR = 13;

/**
 * Parser of a stream of server-sent events.
 *
 * `push` returns what the new piece completed: `{ type, data }` for an event, `{ comment }` for a comment line, which
 * servers send to keep a connection open. An event that the end of the stream cuts off is never returned.
 */
export class SseParser {
  #line = ""; // the line that is not complete yet
  #data = []; // data lines of the event that is not complete yet
  #type = "";
  #nChars = 0; // characters of that event
  #skipLineFeed = false; // the last piece ended with CR; LF may be the other half of the line end
  #isFirst = true;

  push(piece) {
    if (this.#isFirst && piece.length > 0) {
      this.#isFirst = false;
      if (piece.charCodeAt(0) === 0xfeff) piece = piece.slice(1);
    }
    const events = [];
    let start = 0;
    for (let at = 0; at < piece.length; at++) {
      const code = piece.charCodeAt(at);
      const isSecondHalf = code === LF && this.#skipLineFeed;
      this.#skipLineFeed = code === CR;
      if (isSecondHalf) {
        start = at + 1;
      } else if (code === LF || code === CR) {
        this.#endLine(this.#line + piece.slice(start, at), events);
        this.#line = "";
        start = at + 1;
      }
    }
    this.#line += piece.slice(start);
    this.#checkLength(this.#line.length);
    return events;
  }

  #endLine(line, events) {
    if (line === "") {
      if (this.#data.length > 0) events.push({ type: this.#type || "message", data: this.#data.join("\n") });
      this.#data = [];
      this.#type = "";
      this.#nChars = 0;
      return;
    }
    this.#nChars += line.length;
    this.#checkLength(0);
    const colon = line.indexOf(":");
    if (colon === 0) {
      events.push({ comment: line.slice(1).trim() });
      return;
    }
    const field = colon < 0 ? line : line.slice(0, colon);
    let value = colon < 0 ? "" : line.slice(colon + 1);
    if (value.startsWith(" ")) value = value.slice(1);
    if (field === "data") this.#data.push(value);
    else if (field === "event") this.#type = value;
  }

  #checkLength(nMore) {
    if (this.#nChars + nMore > MAX_EVENT_CHARS) {
      throw new Error(`an event of the stream has more than ${MAX_EVENT_CHARS} characters`);
    }
  }
}
