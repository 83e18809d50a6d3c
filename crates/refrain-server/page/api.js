// Requests to the server. Addresses are relative, so the page works below a path of a proxy as well.

import { SseParser } from "./sse.js";

/** An error of the server or of the way to it. */
export class ApiError extends Error {
  /** HTTP status; 0 when there was no response. */
  status = 0;
  /** A word for programs, such as `model_not_found`. */
  code = null;
  /** The field of the request at fault. */
  param = null;
  /** An action that resolves the error. */
  hint = null;
  /** Seconds after which a new attempt may succeed. */
  retryAfter = null;

  constructor(message, fields = {}) {
    super(message);
    this.name = "ApiError";
    Object.assign(this, fields);
  }

  get needsKey() {
    return this.status === 401;
  }
}

/** The error that an error body describes: OpenAI's shape with a `hint`, or whatever else came. */
export function errorOf(body, status = 0, retryAfter = null) {
  const error = body?.error ?? body;
  let message = typeof error === "string" ? error : error?.message;
  if (typeof message !== "string" || message === "") message = `the server answered with status ${status}`;
  let hint = typeof error?.hint === "string" ? error.hint : null;
  // Clients that show only the message see the hint in it; here it has a line of its own.
  const at = message.lastIndexOf("; hint: ");
  if (at > 0) {
    hint ??= message.slice(at + 8);
    message = message.slice(0, at);
  }
  return new ApiError(message, { status, code: error?.code ?? null, param: error?.param ?? null, hint, retryAfter });
}

/** The server that serves this page. */
export class Api {
  #key;

  /** `key` returns the API key, or an empty string. */
  constructor(key) {
    this.#key = key;
  }

  /** Served models that generate text: `{ id, context }`. */
  async models({ signal } = {}) {
    const body = await this.#json("v1/models", { signal });
    const list = Array.isArray(body?.data) ? body.data : [];
    const chats = (model) => typeof model?.id === "string" && model.embeddings !== true;
    return list.filter(chats).map((model) => ({
      id: model.id,
      context: [model.max_model_len, model.context_length].find(Number.isFinite) ?? null,
    }));
  }

  /** The state of the engine, as the server sends it. */
  status({ signal } = {}) {
    return this.#json("status", { signal });
  }

  /** Streams a chat completion: yields `{ chunk }` for each chunk, and `{ isDone: true }` when the server says so. */
  async *chat(body, { signal } = {}) {
    const response = await this.#fetch("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json", Accept: "text/event-stream" },
      body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
      signal,
    });
    const type = response.headers.get("Content-Type") ?? "";
    if (!type.startsWith("text/event-stream")) {
      throw new ApiError(`the server answered with ${type || "no content type"} instead of a stream`, {
        status: response.status,
        hint: "check that a proxy before the server passes streams on",
      });
    }
    const parser = new SseParser();
    const decoder = new TextDecoder();
    for await (const bytes of piecesOf(response.body)) {
      for (const event of parser.push(decoder.decode(bytes, { stream: true }))) {
        if (event.data === undefined) continue;
        if (event.data === "[DONE]") {
          yield { isDone: true };
          return;
        }
        const chunk = parseJson(event.data);
        if (chunk === undefined) throw new ApiError("the stream has an event that is not JSON");
        if (chunk?.error || event.type === "error") throw errorOf(chunk);
        yield { chunk };
      }
    }
  }

  async #json(path, init) {
    const response = await this.#fetch(path, init);
    const body = parseJson(await response.text());
    if (body === undefined) throw new ApiError(`the answer of /${path} is not JSON`, { status: response.status });
    return body;
  }

  async #fetch(path, init) {
    const headers = { ...init.headers };
    const key = this.#key();
    if (key) headers.Authorization = `Bearer ${key}`;
    let response;
    try {
      response = await fetch(path, { ...init, headers, cache: "no-store", credentials: "same-origin" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw unreachable();
    }
    if (response.ok) return response;
    const seconds = Number.parseInt(response.headers.get("Retry-After") ?? "", 10);
    const text = await response.text().catch(() => "");
    throw errorOf(parseJson(text), response.status, Number.isFinite(seconds) ? seconds : null);
  }
}

function unreachable() {
  return new ApiError("the server cannot be reached", { hint: "check that it is running, and the network between" });
}

// The bytes of a body. Leaving the loop early cancels the request.
async function* piecesOf(body) {
  const reader = body.getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield value;
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("the connection was lost in the middle of the reply", {
      hint: "what arrived is kept; retry to get a whole reply",
    });
  } finally {
    reader.cancel().catch(() => {});
  }
}

function parseJson(text) {
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}
