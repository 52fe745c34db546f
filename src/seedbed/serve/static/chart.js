// Charts by plotly, in the page's colours. Loaded when the first one is drawn.

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
const LIGHT = ["#2c7a4b", "#2a6f97", "#c0562b", "#7b4fa3", "#b7791f", "#0f8b8d", "#b03a6b", "#5a6b2e", "#4a5fc1", "#8c5a3c"];
const DARK = ["#6cc08c", "#6bb1da", "#f0936b", "#b48ee0", "#e0ad57", "#4fc3c5", "#e57ba6", "#a8bd6a", "#8c9df0", "#c99a78"];

export const isDark = () => getComputedStyle(document.documentElement).colorScheme === "dark";
export const palette = (index) => (isDark() ? DARK : LIGHT)[index % 10];

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
    dragmode: "zoom",
    hovermode: "closest",
    hoverlabel: { bgcolor: colour("card"), bordercolor: colour("line"), font: { color: colour("ink"), size: 12 } },
    xaxis: { ...axis, showgrid: false, ...xaxis },
    yaxis: { ...axis, ...yaxis },
    ...rest,
  };
}

export const SETTINGS = { displaylogo: false, responsive: true, displayModeBar: false, doubleClick: "reset" };

// A chart that requests finer curves on zoom.
export class Chart {
  constructor(el, { zoom } = {}) {
    this.el = el;
    this.span = null;
    this.zoom = zoom;
  }

  async draw(traces, extra) {
    const Plotly = await plotly();
    if (!this.el.isConnected) return;
    const given = layout({ uirevision: "same", ...extra });
    if (this.span) given.xaxis.range = this.span;
    const first = !this.el.classList.contains("js-plotly-plot");
    if (first) this.el.replaceChildren();
    this.el.classList.remove("loading");
    await Plotly.react(this.el, traces, given, SETTINGS);
    if (first && this.zoom) this.el.on("plotly_relayout", (change) => this.moved(change));
  }

  moved(change) {
    const low = change["xaxis.range[0]"],
      high = change["xaxis.range[1]"];
    if (low !== undefined && high !== undefined) this.span = [low, high];
    else if (change["xaxis.autorange"]) this.span = null;
    else return;
    this.zoom(this.span);
  }
}

// The measured curve, faint, and the smoothed one over it.
export function curves(found, name, index, { points = false, show = true } = {}) {
  const line = palette(index);
  const hover = `%{y:.5g}<extra>${escapeHover(name)} at %{x}</extra>`;
  const base = {
    type: "scatter",
    mode: points ? "lines+markers" : "lines",
    name: escapeHover(name),
    marker: { size: 5 },
    visible: show,
  };
  const raw = {
    ...base,
    x: found.raw.x,
    y: found.raw.y,
    line: { color: line, width: found.smooth ? 1 : 1.6 },
    opacity: found.smooth ? 0.34 : 1,
    hovertemplate: hover,
    hoverinfo: found.smooth ? "skip" : undefined,
  };
  if (!found.smooth) return [raw];
  delete raw.hovertemplate;
  return [raw, { ...base, x: found.smooth.x, y: found.smooth.y, line: { color: line, width: 2 }, hovertemplate: hover }];
}

// plotly interprets some tags in labels; names of runs are escaped.
export const escapeHover = (text) => String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
