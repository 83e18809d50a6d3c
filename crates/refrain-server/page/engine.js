// The live view of the engine, from /status.

import { el } from "./dom.js";
import { formatCount, formatDuration, formatMs, formatRate, rateBetween, readStatus } from "./status.js";

const EVERY_MS = 1_000;
const N_POINTS = 60;
const SVG = "http://www.w3.org/2000/svg";

/** Shows the engine in an element while it is visible. */
export class EngineView {
  #element;
  #api;
  #timer = null;
  #before = null; // { status, at }
  #rates = [];

  constructor(element, api) {
    this.#element = element;
    this.#api = api;
  }

  get isShown() {
    return !this.#element.hidden;
  }

  toggle() {
    this.#element.hidden = !this.#element.hidden;
    clearTimeout(this.#timer);
    if (this.isShown) this.#refresh();
  }

  async #refresh() {
    try {
      const [status, at] = [readStatus(await this.#api.status()), performance.now()];
      const seconds = this.#before ? (at - this.#before.at) / 1000 : 0;
      const rate = (this.#before && rateBetween(this.#before.status, status, seconds)) ?? status.tokensPerS ?? 0;
      this.#rates = [...this.#rates, rate].slice(-N_POINTS);
      this.#before = { status, at };
      this.#show(status, rate);
    } catch (error) {
      this.#element.replaceChildren(el("h2", {}, "Engine"), el("p", { class: "bad" }, error.message));
    }
    if (this.isShown) this.#timer = setTimeout(() => this.#refresh(), EVERY_MS);
  }

  #show(status, rate) {
    const share = status.kvBlocks > 0 ? status.kvBlocksUsed / status.kvBlocks : 0;
    this.#element.replaceChildren(
      el("h2", {}, "Engine"),
      rows([
        ["Tokens / s", formatRate(rate)],
        ["Running", formatCount(status.nRunning)],
        ["Waiting", formatCount(status.nWaiting)],
        ["First token p50/p99", `${formatMs(status.ttftMs.p50)} / ${formatMs(status.ttftMs.p99)}`],
        ["Token to token", `${formatMs(status.interTokenMs.p50)} / ${formatMs(status.interTokenMs.p99)}`],
        ["Up", formatDuration(status.uptimeS)],
      ]),
      this.#chart(),
      el("h3", {}, `KV cache: ${formatCount(status.kvBlocksUsed)} of ${formatCount(status.kvBlocks)} blocks`),
      el("meter", { min: 0, max: 1, high: 0.9, value: share.toFixed(4), "aria-label": "KV cache in use" }),
      ...status.workers.flatMap(workerView));
  }

  #chart() {
    const most = Math.max(1, ...this.#rates);
    const points = this.#rates.map((rate, idx) => `${(idx + N_POINTS - this.#rates.length) / (N_POINTS - 1) * 100},${(30 - 28 * rate / most).toFixed(2)}`);
    const svg = document.createElementNS(SVG, "svg");
    const path = document.createElementNS(SVG, "path");
    svg.setAttribute("class", "rate");
    svg.setAttribute("viewBox", "0 0 100 30");
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", "Tokens per second in the last minute");
    const first = points[0]?.split(",")[0] ?? "100";
    path.setAttribute("d", `M${first},31 L${points.join(" L")} L101,31 Z`);
    svg.append(path);
    return svg;
  }
}

function rows(entries) {
  return el("dl", {}, ...entries.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
}

function workerView(worker) {
  const entries = [["Backend", worker.backend ?? "–"], ["Process", worker.pid === null ? "–" : String(worker.pid)], ["Restarts", formatCount(worker.nRestarts)]];
  const steps = worker.models.flatMap((load) => [
    el("h3", {}, load.model),
    rows([
      ["Context", formatCount(load.context)],
      ["Steps replayed", formatCount(load.steps.replayed)],
      ["Steps eager", formatCount(load.steps.eager)],
      ...load.steps.reasons.map(({ reason, n }) => [`· ${reason.replaceAll("_", " ")}`, formatCount(n)]),
      ["Steps failed", formatCount(load.steps.failed)],
      ["Preemptions", formatCount(load.nPreempted)],
      ["Prefix cache hits", load.nPromptTokens > 0 ? `${(100 * load.nPrefixHitTokens / load.nPromptTokens).toFixed(1)} %` : "–"],
    ]),
  ]);
  return [
    el("h3", {}, `Worker ${worker.idx}: `, el("span", { class: worker.state.tone }, worker.state.label)),
    rows(entries),
    ...(worker.lastFailure ? [el("p", { class: "warn" }, `Last failure: ${worker.lastFailure}`)] : []),
    ...steps,
  ];
}
