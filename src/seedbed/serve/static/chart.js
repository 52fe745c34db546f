// Charts by plotly, in the page's colours: one cursor over all of them, units, download. Loaded when the first one is drawn.

import { forget, join } from "./cursor.js";
import { downloads } from "./download.js";
import { unitOf } from "./units.js";

let loading;

export function plotly() {
  loading ??= new Promise((done, fail) => {
    const script = document.createElement("script");
    script.src = "/static/plotly.js";
    script.onload = () => done(window.Plotly);
    script.onerror = () => {
      loading = undefined;
      fail(new Error('charts need plotly: pip install "seedbed[serve]"'));
    };
    document.head.append(script);
  });
  return loading;
}

export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
// Chosen one after the other as far as possible from those before, each with a contrast of 3 to the page.
const LIGHT = [
  ...["#2c7a4b", "#2a6f97", "#c0562b", "#7b4fa3", "#b7791f", "#0f8b8d", "#b03a6b", "#5a6b2e", "#4a5fc1", "#8c5a3c", "#42213a", "#290084"],
  ...["#d663d6", "#003a21", "#a58ca5", "#7b0008", "#6ba500", "#9c7bff", "#ff5a73", "#730063", "#003a63", "#0094ff", "#523100", "#849c73"],
];
const DARK = [
  ...["#6cc08c", "#6bb1da", "#f0936b", "#b48ee0", "#e0ad57", "#4fc3c5", "#e57ba6", "#a8bd6a", "#8c9df0", "#c99a78", "#ffdeff", "#f7f729"],
  ...["#199400", "#d63a31", "#bdffde", "#b542b5", "#73ff8c", "#8c7b00", "#2973ef", "#5a8484", "#ff8cff", "#946b8c", "#8463e6", "#00ffff"],
];
const DASHES = ["solid", "dash", "dot"];

export const isDark = () => getComputedStyle(document.documentElement).colorScheme === "dark";
export const palette = (index) => (isDark() ? DARK : LIGHT)[index % LIGHT.length];

export function layout(extra = {}) {
  const { xaxis, yaxis, ...rest } = extra;
  const axis = {
    gridcolor: colour("line"),
    linecolor: colour("line"),
    zeroline: false,
    tickfont: { size: 11, color: colour("faint") },
    automargin: true,
  };
  return {
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: colour("sans"), size: 12, color: colour("soft") },
    margin: { l: 44, r: 10, t: 8, b: 28 },
    showlegend: false,
    // A finger scrolls the page.
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
    hovermode: "closest",
    hoverlabel: { bgcolor: colour("card"), bordercolor: colour("line"), font: { color: colour("ink"), size: 12 } },
    xaxis: { ...axis, showgrid: false, ...xaxis },
    yaxis: { ...axis, ...yaxis },
    ...rest,
  };
}

export const SETTINGS = { displaylogo: false, responsive: true, displayModeBar: false, doubleClick: "autosize" };

// A chart that requests finer curves on zoom. `title` names its files; without `tools` they are offered in its title line.
export class Chart {
  constructor(el, { zoom, title, tools = true } = {}) {
    Object.assign(this, { el, zoom, title, tools, span: null, traces: [] });
    Object.assign(el, { tabIndex: 0, role: "img" });
  }

  async draw(traces, extra) {
    const Plotly = await plotly();
    if (!this.el.isConnected) return;
    this.traces = traces;
    const given = layout({ uirevision: "same", ...extra });
    if (this.span) given.xaxis.range = this.span;
    this.fit(given, traces);
    const first = !this.el.classList.contains("js-plotly-plot");
    if (first) this.el.replaceChildren();
    this.el.classList.remove("loading");
    await Plotly.react(this.el, traces, given, SETTINGS);
    if (first) this.begin();
  }

  // What plotly does not know: the unit, room around a constant, and what to say where there is nothing.
  fit(given, traces) {
    const shown = traces.filter((one) => one.visible !== false);
    const keys = [...new Set(shown.map((one) => one.meta?.key).filter((key) => key !== undefined))];
    const recipe = this.el.closest("[data-recipe]")?.dataset.recipe;
    const units = [...new Set(keys.map((key) => unitOf(key, recipe)))];
    this.unit = units.length === 1 ? units[0] : "";
    if (this.unit && !given.yaxis.title)
      given.yaxis.title = { text: this.unit, font: { size: 11, color: colour("soft") }, standoff: 4 };
    if (this.unit === "B" && !given.yaxis.tickformat) given.yaxis.tickformat = ".3~s";
    if (keys.some((key) => /^lrs?(\.|$)/.test(key))) given.yaxis.exponentformat = "e";
    const values = shown.flatMap((one) => one.y).filter((value) => Number.isFinite(value));
    if (!given.yaxis.range && !given.yaxis.rangemode) Object.assign(given.yaxis, around(values, given.yaxis.type === "log"));
    if (!values.length)
      given.annotations = [
        { text: "no values", xref: "paper", yref: "paper", x: 0.5, y: 0.5, showarrow: false, font: { color: colour("faint") } },
      ];
    const name = this.title || keys.join(", ");
    this.el.ariaLabel = `Curves of ${name}${this.unit ? ` in ${this.unit}` : ""}; arrow keys move the cursor, + and - zoom, 0 resets`;
  }

  begin() {
    this.el.on("plotly_relayout", (change) => this.moved(change));
    join(this);
    if (!this.tools || this.menu) return;
    this.menu = downloads(() => this.title || [...new Set(this.traces.map((one) => one.meta?.key || one.name))].join(" "), {
      picture: (format, title) => picture(this.el, format, title),
      rows: () => curveRows(this.traces, "x"),
    });
    const above = this.el.previousElementSibling;
    if (above?.classList.contains("chart-title")) above.append(this.menu);
    else this.el.before(this.menu);
  }

  moved(change) {
    const low = change["xaxis.range[0]"],
      high = change["xaxis.range[1]"];
    if (low !== undefined && high !== undefined) this.span = [low, high];
    else if (change["xaxis.autorange"]) this.span = null;
    else return;
    this.zoom?.(this.span);
  }

  // The range [low, high] in the units of the axis (powers on a logarithmic one), or null for all of it.
  async zoomTo(span) {
    const Plotly = await plotly();
    await Plotly.relayout(this.el, span ? { "xaxis.range[0]": span[0], "xaxis.range[1]": span[1] } : { "xaxis.autorange": true });
  }

  // Gives the memory of a chart back that is out of sight.
  drop() {
    forget(this);
    if (this.el.classList.contains("js-plotly-plot")) window.Plotly.purge(this.el);
    this.el.classList.remove("js-plotly-plot");
    this.el.replaceChildren();
  }
}

// plotly draws a constant of 3e-4 in a range from -1 to 1, where it cannot be told from 0.
function around(values, log) {
  const low = values.reduce((a, b) => Math.min(a, b), Infinity),
    high = values.reduce((a, b) => Math.max(a, b), -Infinity);
  if (!values.length || high - low > 1e-9 * Math.max(Math.abs(low), Math.abs(high))) return {};
  if (log) return low > 0 ? { range: [Math.log10(low) - 0.3, Math.log10(low) + 0.3] } : {};
  const room = low === 0 ? 1 : Math.abs(low) / 2;
  return { range: [low - room, low + room] };
}

// The measured curve, faint, and the smoothed one over it. `name` is what tells it from others, `key` its metric.
export function curves(found, name, index, { points = false, show = true, key = name, dash } = {}) {
  const line = palette(index);
  const style = { color: line, dash: dash || DASHES[Math.floor(index / LIGHT.length) % DASHES.length] };
  const base = {
    type: "scatter",
    mode: points ? "lines+markers" : "lines",
    name: escapeHover(name),
    marker: { size: 5, color: line },
    visible: show,
    hoverinfo: "skip",
    meta: { label: name, key, colour: line },
  };
  const { raw, smooth } = found || { raw: { x: [], y: [] } };
  const trace = { ...base, ...raw, line: { ...style, width: smooth ? 1 : 1.6 }, opacity: smooth ? 0.34 : 1 };
  // One point would be no line.
  if (raw.x.length === 1) trace.mode = "markers";
  if (!smooth) return [trace];
  return [trace, { ...base, ...smooth, line: { ...style, width: 2 }, meta: { ...base.meta, smooth: true } }];
}

// plotly interprets some tags in labels; names of runs are escaped.
export const escapeHover = (text) => String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");

// A chart as PNG or SVG on the page's background, with a title and names.
export async function picture(el, format, title) {
  const Plotly = await plotly();
  const seen = new Set();
  const data = el.data.map((one) => {
    const strong = one.visible !== false && one.opacity !== 0.34 && one.name !== undefined && one.type !== "heatmap";
    const first = strong && !seen.has(one.name);
    if (first) seen.add(one.name);
    return { ...one, showlegend: first };
  });
  const shown = {
    ...el.layout,
    paper_bgcolor: colour("card"),
    title: { text: escapeHover(title), x: 0.02, font: { size: 14, color: colour("ink") } },
    margin: { ...el.layout.margin, t: 40 },
    showlegend: seen.size > 1,
    legend: { font: { size: 10 } },
  };
  const size = { width: Math.max(el.clientWidth, 720), height: Math.max(el.clientHeight, 400) };
  return Plotly.toImage({ data, layout: shown }, { format, scale: format === "png" ? 2 : 1, ...size });
}

// A row per point, with the smoothed value beside the measured one where both are known.
export function curveRows(traces, axis) {
  const smooth = new Map();
  const where = (one, x) => JSON.stringify([one.meta?.label ?? one.name, one.meta?.key, x]);
  const shown = traces.filter((one) => one.visible !== false);
  for (const one of shown) if (one.meta?.smooth) one.x.forEach((x, i) => smooth.set(where(one, x), one.y[i]));
  const rows = shown
    .filter((one) => !one.meta?.smooth)
    .flatMap((one) =>
      one.x.map((x, i) => [one.meta?.label ?? one.name, one.meta?.key ?? "", x, one.y[i], smooth.get(where(one, x)) ?? ""]),
    );
  return [["name", "metric", axis, "value", "smoothed"], ...rows];
}
