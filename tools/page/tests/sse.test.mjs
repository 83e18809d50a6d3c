import assert from "node:assert/strict";
import { test } from "node:test";
import { MAX_EVENT_CHARS, SseParser } from "../../../crates/refrain-server/page/sse.js";

const STREAM = "\ufeff: hello\r\ndata: one\r\n\r\nevent: error\ndata: a\ndata:  b\n\ndata\n\rdata: [DONE]\r\r: bye\ndata: cut off\n";
const EVENTS = [
  { comment: "hello" },
  { type: "message", data: "one" },
  { type: "error", data: "a\n b" },
  { type: "message", data: "" },
  { type: "message", data: "[DONE]" },
  { comment: "bye" },
];

test("events are the same wherever the stream is cut", () => {
  for (let size = 1; size <= STREAM.length; size++) {
    const parser = new SseParser();
    const events = [];
    for (let at = 0; at < STREAM.length; at += size) events.push(...parser.push(STREAM.slice(at, at + size)));
    assert.deepEqual(events, EVENTS, `pieces of ${size} characters`);
  }
});

test("an event without an end is refused before it fills the memory", () => {
  const parser = new SseParser();
  const piece = "x".repeat(1024 * 1024);
  assert.throws(() => {
    for (let n = 0; n <= MAX_EVENT_CHARS / piece.length; n++) parser.push(piece);
  }, /more than \d+ characters/);

  const lines = new SseParser();
  assert.throws(() => {
    for (let n = 0; n <= MAX_EVENT_CHARS / piece.length; n++) lines.push(`data: ${piece}\n`);
  }, /more than \d+ characters/);
});
