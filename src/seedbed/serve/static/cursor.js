// One cursor over all charts of a page: a line at the same x in each, with the values of all curves there.

import { h } from "./dom.js";
import { textOf } from "./units.js";

const charts = new Set();
let next, asked;

export function join(chart) {
  charts.add(chart);
  const { el } = chart;
  chart.line = h("div", { className: "cursor", hidden: true });
  chart.readout = h("div", { className: "readout", hidden: true });
  el.append(chart.line, chart.readout);
  if (chart.heard) return;
  chart.heard = true;
  el.addEventListener("pointermove", (event) => at(chart, event));
  el.addEventListener("pointerdown", (event) => event.pointerType === "touch" && at(chart, event));
  el.addEventListener("pointerleave", (event) => event.pointerType !== "touch" && show(null));
  el.addEventListener("blur", () => show(null));
  el.addEventListener("keydown", (event) => key(chart, event));
}

export const forget = (chart) => charts.delete(chart);

const axisOf = (chart) => chart.el._fullLayout?.xaxis;

function at(chart, event) {
  const axis = axisOf(chart);
  if (!axis) return;
  const pixel = event.clientX - chart.el.getBoundingClientRect().left - axis._offset;
  show(pixel < 0 || pixel > axis._length ? null : axis.p2d(pixel), chart);
}

// Many movements, one drawing per frame.
function show(x, from) {
  next = { x, from };
  asked ??= requestAnimationFrame(() => {
    asked = undefined;
    for (const chart of charts) {
      if (!chart.el.isConnected) charts.delete(chart);
      else draw(chart, next.x, next.from === chart);
    }
  });
}

function draw(chart, x, isFrom) {
  const axis = axisOf(chart),
    box = chart.el.getBoundingClientRect();
  const pixel = x === null || !axis ? NaN : axis.d2p(x);
  const outside = !(pixel >= -1 && pixel <= axis?._length + 1) || box.bottom < 0 || box.top > innerHeight;
  chart.line.hidden = chart.readout.hidden = outside;
  if (outside) return;
  const left = pixel + axis._offset,
    values = valuesAt(chart.traces, x);
  chart.line.style.transform = `translateX(${left}px)`;
  chart.readout.classList.toggle("full", isFrom);
  const rows = values
    .sort((a, b) => b.value - a.value)
    .map((one) => [
      h("i", { style: { background: one.colour } }),
      isFrom ? h("span", { className: "who" }, one.label) : null,
      h("b", {}, textOf(one.key, one.value)),
      isFrom ? h("span", { className: "raw" }, one.raw === undefined ? "" : `(${textOf(one.key, one.raw)})`) : null,
    ]);
  chart.readout.replaceChildren(
    isFrom ? h("div", { className: "where" }, place(x)) : "",
    h(
      "div",
      { className: "rows" },
      rows.map((row) => h("div", {}, row)),
    ),
  );
  // On the side where there is more room.
  const right = left > box.width / 2;
  chart.readout.style.left = right ? "auto" : `${left + 10}px`;
  chart.readout.style.right = right ? `${box.width - left + 10}px` : "auto";
}

// Steps are whole; times below 1000 are not.
const place = (x) => (Math.abs(x) >= 1000 ? Math.round(x).toLocaleString("en-US") : String(Number(x.toPrecision(4))));

// Per curve the nearest drawn point: the smoothed value, and the measured one beside it.
export function valuesAt(traces, x) {
  const found = new Map();
  for (const trace of traces) {
    if (!trace.meta || trace.visible === false || !trace.x.length) continue;
    const place = nearest(trace.x, x),
      value = trace.y[place],
      range = Math.abs(trace.x.at(-1) - trace.x[0]);
    if (!Number.isFinite(value) || x > trace.x.at(-1) + 0.02 * range || x < trace.x[0] - 0.02 * range) continue;
    const { label, key, colour, smooth } = trace.meta;
    const name = JSON.stringify([label, key]),
      before = found.get(name);
    if (!before) found.set(name, { label, key, colour, value });
    else if (smooth) Object.assign(before, { value, raw: before.value });
  }
  return [...found.values()];
}

function nearest(xs, x) {
  let low = 0,
    high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] <= x) low = middle;
    else high = middle;
  }
  return Math.abs(xs[high] - x) < Math.abs(xs[low] - x) ? high : low;
}

function key(chart, event) {
  const axis = axisOf(chart);
  if (!axis || event.target !== chart.el || event.ctrlKey || event.metaKey || event.altKey) return;
  const [low, high] = axis.range,
    middle = chart.here ?? (low + high) / 2,
    half = (high - low) / 2;
  const towards = { __proto__: null, ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (towards) {
    chart.here = Math.min(Math.max(middle + (towards * half) / (event.shiftKey ? 5 : 50), low), high);
    show(axis.type === "log" ? 10 ** chart.here : chart.here, chart);
  } else if (event.key === "+" || event.key === "=") chart.zoomTo([middle - half / 2, middle + half / 2]);
  else if (event.key === "-") chart.zoomTo([middle - 2 * half, middle + 2 * half]);
  else if (event.key === "0") chart.zoomTo(null);
  else if (event.key === "Escape") show(null);
  else return;
  event.preventDefault();
}
