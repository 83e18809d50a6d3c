// What GET /status says, made safe to show: every field may be missing, because servers of other versions answer too.

const count = (value) => (Number.isFinite(value) && value >= 0 ? value : 0);
const measure = (value) => (Number.isFinite(value) && value >= 0 ? value : null);
const word = (value) => (typeof value === "string" && value !== "" ? value : null);
const list = (value) => (Array.isArray(value) ? value : []);
const percentiles = (value) => ({ p50: measure(value?.p50), p99: measure(value?.p99) });

/** A snapshot of the server and its workers. Unknown measures are null, unknown counts 0. */
export function readStatus(body) {
  const workers = list(body?.backend?.workers).map(readWorker);
  const models = workers.flatMap((worker) => worker.models);
  const sum = (name) => models.reduce((total, model) => total + model[name], 0);
  return {
    version: word(body?.version),
    uptimeS: measure(body?.uptime_s),
    tokensPerS: measure(body?.tokens_per_s),
    nOpen: measure(body?.n_open),
    ttftMs: percentiles(body?.ttft_ms),
    interTokenMs: percentiles(body?.inter_token_ms),
    workers,
    nRunning: sum("nRunning"),
    nWaiting: sum("nWaiting"),
    kvBlocks: sum("kvBlocks"),
    kvBlocksUsed: sum("kvBlocksUsed"),
    nGeneratedTokens: sum("nGeneratedTokens"),
    nRestarts: workers.reduce((total, worker) => total + worker.nRestarts, 0),
  };
}

function readWorker(worker, position) {
  return {
    idx: measure(worker?.idx) ?? position,
    pid: measure(worker?.pid),
    backend: word(worker?.backend),
    state: readState(worker?.state),
    nRestarts: count(worker?.n_restarts),
    lastFailure: word(worker?.last_failure),
    models: list(worker?.models).map(readLoad),
  };
}

// `Ready`, `Starting` and `Stopped` are texts; `BackingOff` is an object with its number of failures.
function readState(state) {
  if (state === "Ready") return { label: "ready", tone: "good", isReady: true };
  if (state === "Starting") return { label: "starting", tone: "warn", isReady: false };
  if (state === "Stopped") return { label: "stopped", tone: "bad", isReady: false };
  if (state && typeof state === "object" && "BackingOff" in state) {
    const n = count(state.BackingOff?.n_failures);
    return { label: `backing off after ${n} ${n === 1 ? "failure" : "failures"}`, tone: "bad", isReady: false };
  }
  return { label: word(state) ?? "unknown", tone: "warn", isReady: false };
}

function readLoad(load) {
  return {
    model: word(load?.model) ?? "unnamed model",
    context: count(load?.context),
    nRunning: count(load?.n_running),
    nWaiting: count(load?.n_waiting),
    nPreempted: count(load?.n_preempted),
    kvBlocks: count(load?.kv_blocks),
    kvBlocksUsed: count(load?.kv_blocks_used),
    nPrefixHitTokens: count(load?.n_prefix_hit_tokens),
    nPromptTokens: count(load?.n_prompt_tokens),
    nGeneratedTokens: count(load?.n_generated_tokens),
    steps: {
      replayed: count(load?.steps?.replayed),
      eager: count(load?.steps?.eager),
      failed: count(load?.steps?.failed),
      reasons: list(load?.steps?.reasons)
        .filter((entry) => Array.isArray(entry) && word(entry[0]))
        .map(([reason, n]) => ({ reason, n: count(n) }))
        .sort((a, b) => b.n - a.n),
    },
  };
}

/** Tokens per second between two snapshots, for servers that do not say it. `null` if workers were replaced between. */
export function rateBetween(before, after, seconds) {
  const n = after.nGeneratedTokens - before.nGeneratedTokens;
  return seconds > 0 && n >= 0 && after.nRestarts === before.nRestarts ? n / seconds : null;
}

/**
 * Why a reply makes no progress, in words for its reader; `null` if nothing is known. `isReconnecting` is true when a
 * worker is being replaced, after which the reply continues.
 */
export function explainPause(status, nRestartsBefore) {
  const down = status.workers.find((worker) => !worker.state.isReady);
  if (down) {
    const because = down.lastFailure ? ` (${down.lastFailure})` : "";
    return { isReconnecting: true, text: `Reconnecting: worker ${down.idx} is ${down.state.label}${because}` };
  }
  if (nRestartsBefore !== null && status.nRestarts > nRestartsBefore) {
    return { isReconnecting: true, text: "Reconnecting: a worker was replaced, the reply continues soon" };
  }
  if (status.nWaiting > 0) {
    return { isReconnecting: false, text: `Waiting for capacity: ${plural(status.nWaiting, "request")} in the queue` };
  }
  return null;
}

/** A number with its noun. */
export function plural(n, noun) {
  return `${formatCount(n)} ${noun}${n === 1 ? "" : "s"}`;
}

/** A count with separators: 12,345. */
export function formatCount(n) {
  return Math.round(n).toLocaleString("en-US");
}

/** A rate with three digits at most after which it changes anyway: 0.52, 12.3, 1,234. */
export function formatRate(n) {
  if (n === null) return "–";
  return n >= 100 ? formatCount(n) : n >= 10 ? n.toFixed(1) : n.toFixed(2);
}

/** Milliseconds for people: 0.8 ms, 12 ms, 1.25 s, 2 min 5 s. */
export function formatMs(ms) {
  if (ms === null) return "–";
  if (ms < 10) return `${ms.toFixed(1)} ms`;
  if (ms < 1000) return `${Math.round(ms)} ms`;
  if (ms < 59_950) return `${(ms / 1000).toFixed(ms < 10_000 ? 2 : 1)} s`;
  return formatDuration(ms / 1000);
}

/** Seconds for people, two units at most: 3 d 4 h, 2 h 5 min. */
export function formatDuration(seconds) {
  if (seconds === null) return "–";
  const units = [["d", 86_400], ["h", 3_600], ["min", 60], ["s", 1]];
  let left = Math.round(seconds);
  const first = Math.max(0, units.findIndex(([, size]) => left >= size));
  if (left === 0) return "0 s";
  const parts = [];
  for (const [unit, size] of units.slice(first, first + 2)) {
    const n = Math.floor(left / size);
    left -= n * size;
    if (n > 0) parts.push(`${n} ${unit}`);
  }
  return parts.join(" ");
}
