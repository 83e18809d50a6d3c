"use strict";
(() => {
  const { rows, spans, steps } = JSON.parse(document.getElementById("data").textContent);
  const canvas = document.getElementById("lanes"), hover = document.getElementById("hover");
  const ink = canvas.getContext("2d");
  const LANE = 26, LEFT = 110, TOP = 22;

  // One lane for whole steps, then one per kernel family in order of first launch.
  const families = [], laneOf = rows.map(([, kernel]) => {
    const family = kernel.split("_")[0];
    if (!families.includes(family)) families.push(family);
    return families.indexOf(family) + 1;
  });
  const lanes = ["steps", ...families];
  const colour = (lane) => `hsl(${(lane * 137.508) % 360} 60% 55%)`;
  const bars = steps.map(([tokens, first], i) => {
    const last = (i + 1 < steps.length ? steps[i + 1][1] : spans.length) - 1;
    if (last < first) return null;
    const start = spans[first][1], end = spans[last][1] + spans[last][2];
    return { lane: 0, start, us: end - start, tokens, launches: last - first + 1, number: i };
  }).filter(Boolean);
  for (const [row, start, us, bytes] of spans) bars.push({ lane: laneOf[row], start, us, bytes, row });

  const end = Math.max(1, ...bars.filter((b) => b.lane === 0).map((b) => b.start + b.us));
  let from = 0, to = end, pointed = null;

  const width = () => canvas.clientWidth - LEFT;
  const x = (us) => LEFT + ((us - from) / (to - from)) * width();
  const timeAt = (px) => from + ((px - LEFT) / width()) * (to - from);
  const time = (us) => us >= 1000 ? `${(us / 1000).toFixed(3)} ms` : `${us.toFixed(2)} \u00b5s`;

  function draw() {
    const ratio = window.devicePixelRatio || 1, style = getComputedStyle(document.documentElement);
    const height = TOP + lanes.length * LANE + 6;
    canvas.style.height = `${height}px`;
    canvas.width = canvas.clientWidth * ratio;
    canvas.height = height * ratio;
    ink.setTransform(ratio, 0, 0, ratio, 0, 0);
    ink.clearRect(0, 0, canvas.clientWidth, height);
    ink.font = "11px ui-monospace,monospace";
    const text = style.getPropertyValue("--ink"), line = style.getPropertyValue("--line");
    // Ticks at round numbers, about 100 pixels apart.
    let tick = 10 ** Math.floor(Math.log10(((to - from) * 100) / width()));
    for (const times of [2, 2.5, 2]) if ((tick / (to - from)) * width() < 80) tick *= times;
    for (let us = Math.ceil(from / tick) * tick; us <= to; us += tick) {
      ink.fillStyle = line;
      ink.fillRect(x(us), TOP - 4, 1, height);
      ink.fillStyle = text;
      ink.fillText(time(us), x(us) + 3, 12);
    }
    ink.save();
    ink.beginPath();
    ink.rect(LEFT, TOP, width(), height);
    ink.clip();
    const reached = new Float64Array(lanes.length).fill(-1);
    for (const bar of bars) {
      if (bar.start > to || bar.start + bar.us < from) continue;
      const left = x(bar.start), right = Math.max(x(bar.start + bar.us), left + 0.5);
      // Skip bars narrower than a pixel that another one already covers.
      if (right < reached[bar.lane] + 0.5 && bar !== pointed) continue;
      reached[bar.lane] = right;
      ink.fillStyle = bar === pointed ? text : colour(bar.lane);
      const gap = right - left > 3 ? 0.5 : 0;
      ink.fillRect(left, TOP + bar.lane * LANE + 3, right - left - gap, LANE - 6);
      const label = bar.lane ? rows[bar.row][1] : `${bar.tokens} token${bar.tokens === 1 ? "" : "s"}`;
      if (right - left > label.length * 6.7 + 8) {
        ink.fillStyle = "#000";
        ink.fillText(label, Math.max(left, LEFT) + 4, TOP + bar.lane * LANE + 17);
      }
    }
    ink.restore();
    ink.fillStyle = text;
    lanes.forEach((lane, i) => ink.fillText(lane, 8, TOP + i * LANE + 17));
  }

  function find(px, py) {
    const lane = Math.floor((py - TOP) / LANE), us = timeAt(px), near = (2 / width()) * (to - from);
    let best = null;
    for (const bar of bars) {
      if (bar.lane !== lane || px < LEFT) continue;
      const away = Math.max(bar.start - us, us - bar.start - bar.us, 0);
      if (away <= near && (!best || away < best.away)) best = { bar, away };
    }
    return best && best.bar;
  }

  function describe(bar) {
    if (!bar) { hover.textContent = "Point at a launch for its details."; return; }
    if (bar.lane === 0) {
      hover.textContent = `step ${bar.number}, ${bar.tokens} token${bar.tokens === 1 ? "" : "s"}\n` +
        `${time(bar.us)}, ${bar.launches} launch${bar.launches === 1 ? "" : "es"}, starts at ${time(bar.start)}`;
      return;
    }
    const [step, kernel] = rows[bar.row], rate = bar.us > 0 ? bar.bytes / bar.us / 1e3 : 0;
    hover.textContent = `${kernel}\n${step}\n${time(bar.us)}, ${bar.bytes.toLocaleString("en")} bytes, ` +
      `${rate.toFixed(1)} GB/s, starts at ${time(bar.start)}`;
  }

  function show(start, stop) {
    const least = Math.min(end, 0.5), span = Math.min(Math.max(stop - start, least), end);
    from = Math.min(Math.max(start, 0), end - span);
    to = from + span;
    draw();
  }

  canvas.addEventListener("wheel", (e) => {
    e.preventDefault();
    const centre = timeAt(e.offsetX), by = Math.exp(Math.sign(e.deltaY) * 0.25);
    show(centre - (centre - from) * by, centre + (to - centre) * by);
  }, { passive: false });
  let held = null;
  canvas.addEventListener("pointerdown", (e) => {
    held = { px: e.offsetX, from, to };
    canvas.setPointerCapture(e.pointerId);
  });
  canvas.addEventListener("pointerup", () => { held = null; });
  canvas.addEventListener("pointermove", (e) => {
    if (held) {
      const by = ((held.px - e.offsetX) / width()) * (held.to - held.from);
      show(held.from + by, held.to + by);
      return;
    }
    const bar = find(e.offsetX, e.offsetY);
    if (bar !== pointed) { pointed = bar; describe(bar); draw(); }
  });
  canvas.addEventListener("dblclick", () => show(0, end));
  canvas.addEventListener("keydown", (e) => {
    const span = to - from, move = { ArrowLeft: -span / 4, ArrowRight: span / 4 }[e.key];
    if (move) show(from + move, to + move);
    if (e.key === "+" || e.key === "=") show(from + span / 4, to - span / 4);
    if (e.key === "-") show(from - span / 2, to + span / 2);
    if (e.key === "0") show(0, end);
  });
  for (const row of document.querySelectorAll("tr.kernel")) row.addEventListener("click", () => {
    const open = row.classList.toggle("open");
    for (const step of row.parentNode.querySelectorAll("tr.step")) step.hidden = !open;
  });
  window.addEventListener("resize", draw);
  draw();
})();
