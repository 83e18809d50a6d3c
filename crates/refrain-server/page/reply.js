// One reply while it is being written: reads the stream, measures it, and notices pauses.

import { ApiError } from "./api.js";
import { explainPause, readStatus } from "./status.js";

/** A stream without tokens for this long is paused, and the server is asked why. */
const PAUSE_MS = 2_500;
const CHECK_MS = 500;

/**
 * Writes a reply into `turn`.
 *
 * `onChange` is called when the turn or `pause` changed. The promise of `run` resolves when the reply has ended, by
 * whatever cause: the turn then says `done`, `stopped` or `failed`.
 */
export class ReplyRun {
  /** Why there is no progress: `{ text, isReconnecting }`, or null. */
  pause = null;

  #api;
  #turn;
  #onChange;
  #abort = new AbortController();
  #now;
  #started = 0;
  #firstAt = null; // time of the first text or thinking
  #lastAt = 0; // time of the last event
  #thoughtUntil = null;
  #pausedMs = 0;
  #nRestarts = null; // restarts of workers when the pause began
  #isAsking = false;

  constructor({ api, turn, onChange, now = () => performance.now() }) {
    this.#api = api;
    this.#turn = turn;
    this.#onChange = onChange;
    this.#now = now;
  }

  /** Ends the reply; what arrived is kept. */
  stop() {
    this.#abort.abort();
  }

  async run(request) {
    const turn = this.#turn;
    this.#started = this.#lastAt = this.#now();
    const timer = setInterval(() => this.#checkPause(), CHECK_MS);
    try {
      let isDone = false;
      for await (const event of this.#api.chat(request, { signal: this.#abort.signal })) {
        this.#endPause();
        this.#lastAt = this.#now();
        isDone ||= event.isDone === true;
        if (event.chunk) this.#take(event.chunk);
      }
      // `[DONE]` may be cut off by a proxy; a finish reason says as well that the reply is whole.
      if (!isDone && turn.finish === null) {
        throw new ApiError("the stream ended before the reply was complete", { hint: "retry to get a whole reply" });
      }
      turn.state = "done";
    } catch (error) {
      if (error.name === "AbortError") {
        turn.state = "stopped";
      } else {
        turn.state = "failed";
        const { message, hint = null, retryAfter = null, status = 0 } = error;
        turn.error = { message, hint, retryAfter, status };
      }
    } finally {
      clearInterval(timer);
      this.#endPause();
      this.#measure();
      this.#onChange();
    }
  }

  #take(chunk) {
    const turn = this.#turn;
    const choice = chunk.choices?.[0];
    const delta = choice?.delta ?? {};
    // Servers send thinking in either field or, like this one, the same text in both.
    const thinking = delta.reasoning_content ?? delta.reasoning;
    if (typeof thinking === "string" && thinking !== "") {
      this.#firstAt ??= this.#lastAt;
      turn.thinking += thinking;
    }
    if (typeof delta.content === "string" && delta.content !== "") {
      this.#firstAt ??= this.#lastAt;
      if (turn.thinking !== "") this.#thoughtUntil ??= this.#lastAt;
      turn.text += delta.content;
    }
    if (typeof choice?.finish_reason === "string") turn.finish = choice.finish_reason;
    if (typeof chunk.model === "string") turn.model = chunk.model;
    if (chunk.usage) turn.stats = { ...turn.stats, ...readUsage(chunk.usage) };
    this.#measure();
    this.#onChange();
  }

  #measure() {
    if (this.#firstAt === null) return;
    const end = this.#turn.state === "open" ? this.#now() : this.#lastAt;
    const thoughtUntil = this.#thoughtUntil ?? end;
    this.#turn.stats = {
      ...this.#turn.stats,
      ttftMs: this.#firstAt - this.#started,
      decodeMs: this.#lastAt - this.#firstAt,
      totalMs: this.#lastAt - this.#started,
      ...(this.#turn.thinking === "" ? {} : { thinkingMs: thoughtUntil - this.#firstAt }),
      ...(this.#pausedMs === 0 ? {} : { pausedMs: this.#pausedMs }),
    };
  }

  async #checkPause() {
    if (this.#now() - this.#lastAt < PAUSE_MS || this.#isAsking) return;
    this.#isAsking = true;
    const lastAt = this.#lastAt;
    let pause;
    try {
      const status = readStatus(await this.#api.status({ signal: this.#abort.signal }));
      this.#nRestarts ??= status.nRestarts;
      pause = explainPause(status, this.#nRestarts);
    } catch {
      // The stream reports a lost connection itself; a server that cannot say more is no reason to end the reply.
      pause = null;
    } finally {
      this.#isAsking = false;
    }
    if (this.#lastAt !== lastAt || this.#turn.state !== "open") return;
    this.pause = pause ?? { isReconnecting: false, text: this.#firstAt === null ? "Evaluating the prompt" : "Waiting for the next token" };
    this.#onChange();
  }

  #endPause() {
    if (this.pause && this.#firstAt !== null) this.#pausedMs += this.#now() - this.#lastAt;
    this.pause = null;
    this.#nRestarts = null;
  }
}

function readUsage(usage) {
  const stats = {};
  if (Number.isFinite(usage.prompt_tokens)) stats.nPrompt = usage.prompt_tokens;
  if (Number.isFinite(usage.completion_tokens)) stats.nTokens = usage.completion_tokens;
  const nCached = usage.prompt_tokens_details?.cached_tokens;
  if (Number.isFinite(nCached)) stats.nCached = nCached;
  return stats;
}

/** Tokens per second of a reply: those after the first, over the time they took, pauses included. */
export function tokensPerS(stats) {
  if (!stats || !(stats.nTokens > 1) || !(stats.decodeMs > 0)) return null;
  return (stats.nTokens - 1) / (stats.decodeMs / 1000);
}
