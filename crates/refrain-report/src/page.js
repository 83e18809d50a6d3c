"use strict";
(() => {
  const charts = JSON.parse(document.getElementById("data").textContent);
  const show = (value) => Math.abs(value) >= 1e5 || (value !== 0 && Math.abs(value) < 1e-3)
    ? value.toExponential(3) : Number(value.toPrecision(5)).toLocaleString("en", { maximumFractionDigits: 6 });
  for (const [id, chart] of Object.entries(charts)) {
    const svg = document.getElementById(id), hover = document.getElementById(`${id}-hover`);
    const cursor = svg.querySelector(".cursor"), idle = hover.textContent;
    const nearest = (points, step) => points.reduce((best, point) =>
      best && Math.abs(best[0] - step) <= Math.abs(point[0] - step) ? best : point, null);
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect(), { left, width, first, last } = chart;
      const x = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
      const step = first + ((x - left) / width) * (last - first);
      if (x < left || x > left + width) return;
      cursor.setAttribute("x1", x);
      cursor.setAttribute("x2", x);
      cursor.style.visibility = "visible";
      hover.textContent = chart.series.map(([name, points]) => {
        const point = nearest(points, step);
        return point && `${name} ${show(point[1])} (${chart.x} ${point[0]})`;
      }).filter(Boolean).join("   ");
    });
    svg.addEventListener("pointerleave", () => {
      cursor.style.visibility = "hidden";
      hover.textContent = idle;
    });
  }
})();
