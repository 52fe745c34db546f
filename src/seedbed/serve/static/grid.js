// A grid of panels, one per metric: drawn when they come into view, fetched in batches, zoomed together.

import { Chart, curveRows, curves, picture, plotly } from "./chart.js";
import { get, h } from "./dom.js";
import { downloads } from "./download.js";
import { axisTitle, SHARES, textOf } from "./units.js";

// Keys asked for at once, so that the first panels do not wait for the last.
const BATCH = 6;
const MAX_POINTS = 4000;
// With more panels, those out of sight are taken down again.
const MAX_DRAWN = 24;
// Shown first and last; the rest in between, in the order of the rows.
const FIRST = ["loss"];
const LAST = ["grad_norm", "lr", "items_per_s", "wait", "mfu", "mfu_measured", "memory", "epoch"];
export const isEvaluation = (key) => /^(eval|test)\//.test(key);

// Evaluations come right after the metric of training that has their name; those without one after the first metric.
export function ordered(keys) {
  const rank = (key) =>
    FIRST.includes(key) ? 0 : LAST.includes(key) ? 3 + LAST.indexOf(key) : key.startsWith("lrs.") ? 99 : 2;
  const evaluations = keys.filter(isEvaluation),
    base = (key) => key.slice(key.indexOf("/") + 1);
  const out = keys
    .filter((key) => !isEvaluation(key))
    .sort((a, b) => rank(a) - rank(b))
    .flatMap((key) => [key, ...evaluations.filter((one) => base(one) === key)]);
  const alone = evaluations.filter((one) => !out.includes(one)),
    after = out.findIndex((key) => rank(key) > 0 && !isEvaluation(key));
  out.splice(after < 0 ? out.length : after, 0, ...alone);
  return out;
}

// The panels of a view: keys that belong together, those that match the search, pinned ones first.
export function arranged(keys, { find, pin, together }) {
  const all = ordered(keys);
  const pattern = matcher(find);
  const groups = together
    ? all
        .filter((key) => !isEvaluation(key) || !all.includes(key.slice(key.indexOf("/") + 1)))
        .map((key) => [key, ...(isEvaluation(key) ? [] : all.filter((one) => isEvaluation(one) && one.slice(one.indexOf("/") + 1) === key))])
    : all.map((key) => [key]);
  const shown = groups.filter((group) => group.some((key) => pattern.test(key)) || pin.includes(group[0]));
  return [...shown.filter(([key]) => pin.includes(key)), ...shown.filter(([key]) => !pin.includes(key))];
}

// A regular expression in any case; what is none is searched as it stands.
export function matcher(text) {
  try {
    return new RegExp(text, "iu");
  } catch {
    return new RegExp(text.replace(/[\\^$.*+?()[\]{}|/]/g, "\\$&"), "iu");
  }
}

export class Panels {
  // `view` is read and `choose(changes)` asks for another one; `runs` are {name, index, recipe}. The page of one run has curves
  // by key, gives its own groups of keys, and may add marks to a chart.
  constructor(place, { view, runs, choose, byKey = false, grouped = arranged, titleOf = (group) => group.join(" and "), decorate }) {
    Object.assign(this, { place, view, runs, choose, byKey, grouped, titleOf, decorate });
    Object.assign(this, { panels: new Map(), version: 1, cache: new Map(), queue: new Set() });
    this.unknown = [];
    this.sight = new IntersectionObserver((seen) => this.seen(seen), { rootMargin: "300px 0px" });
  }

  close() {
    this.sight.disconnect();
    for (const panel of this.panels.values()) panel.chart.drop();
  }

  // Other data, another axis, another smoothing: everything in view is fetched again.
  invalidate() {
    this.version++;
    this.cache.clear();
    this.redraw();
  }

  redraw() {
    for (const panel of this.panels.values()) {
      panel.drawn = null;
      if (panel.inSight) this.want(panel);
    }
  }

  arrange(keys) {
    const groups = this.grouped(keys, this.view);
    const names = new Set(groups.map((group) => JSON.stringify(group)));
    for (const [name, panel] of this.panels)
      if (!names.has(name)) {
        this.sight.unobserve(panel.box);
        panel.chart.drop();
        this.panels.delete(name);
      }
    for (const group of groups) if (!this.panels.has(JSON.stringify(group))) this.add(group);
    const boxes = groups.map((group) => this.panels.get(JSON.stringify(group)).box);
    if (boxes.length !== this.place.children.length || boxes.some((box, i) => box !== this.place.children[i]))
      this.place.replaceChildren(...boxes);
    for (const panel of this.panels.values()) this.mark(panel);
    return groups.length;
  }

  add(group) {
    const [key] = group,
      el = h("div", { className: "chart loading" }, "…");
    const title = this.titleOf(group);
    const toggled = (list) => (this.view[list].includes(key) ? this.view[list].filter((one) => one !== key) : [...this.view[list], key]);
    const panel = { group, drawn: null, inSight: false };
    panel.chart = new Chart(el, { title, tools: false, zoom: (span) => this.zoomed(span) });
    panel.pin = h("button", { className: "quiet tool", onclick: () => this.choose({ pin: toggled("pin") }) });
    panel.wide = h("button", { className: "quiet tool", onclick: () => this.choose({ wide: toggled("wide") }) });
    panel.menu = downloads(title, {
      picture: (format, name) => picture(el, format, name),
      rows: async () => curveRows(this.traces(await this.fetch(group, MAX_POINTS), group), this.view.x),
    });
    panel.unit = h("span", { className: "faint" });
    panel.box = h(
      "section",
      { className: "panel", ariaLabel: title, "data-key": key },
      h(
        "div",
        { className: "chart-title" },
        h("h3", { title }, title),
        panel.unit,
        h("span", { className: "grow" }),
        panel.pin,
        panel.wide,
        panel.menu,
      ),
      el,
    );
    panel.box.panel = panel;
    this.panels.set(JSON.stringify(group), panel);
    this.sight.observe(panel.box);
  }

  mark(panel) {
    const [key] = panel.group,
      pinned = this.view.pin.includes(key),
      wide = this.view.wide.includes(key);
    Object.assign(panel.pin, { textContent: pinned ? "★" : "☆", title: pinned ? "Unpin" : "Pin to the top" });
    Object.assign(panel.wide, { textContent: wide ? "⤡" : "⤢", title: wide ? "Smaller" : "Larger" });
    for (const [button, on] of [
      [panel.pin, pinned],
      [panel.wide, wide],
    ])
      Object.assign(button, { ariaPressed: String(on), ariaLabel: `${button.title}: ${key}` });
    if (panel.box.classList.contains("wide") !== wide) {
      panel.box.classList.toggle("wide", wide);
      if (panel.drawn) plotly().then((Plotly) => panel.drawn && Plotly.Plots.resize(panel.chart.el));
    }
  }

  seen(entries) {
    for (const { target, isIntersecting } of entries) {
      const { panel } = target;
      panel.inSight = isIntersecting;
      if (isIntersecting) this.want(panel);
      else if (!this.isPaper && this.panels.size > MAX_DRAWN && panel.chart.el.classList.contains("js-plotly-plot")) {
        panel.chart.drop();
        panel.drawn = null;
      }
    }
  }

  // Panels that came into view together are asked for together.
  want(panel) {
    if (panel.drawn === this.version) return;
    this.queue.add(panel);
    this.timer ??= setTimeout(() => {
      this.timer = undefined;
      const waiting = [...this.queue];
      this.queue.clear();
      this.working = Promise.all([this.working, this.load(waiting)]);
    }, 20);
  }

  async load(panels) {
    const { version } = this;
    for (let first = 0; first < panels.length; first += BATCH) {
      const some = panels.slice(first, first + BATCH).filter((panel) => panel.box.isConnected);
      try {
        const found = await this.fetch(some.flatMap((panel) => panel.group));
        if (version !== this.version) return;
        for (const panel of some) await this.draw(panel, found);
      } catch (error) {
        for (const panel of some)
          if (!panel.drawn) panel.chart.el.replaceChildren(h("div", { className: "empty small", role: "alert" }, error.message));
      }
    }
  }

  // Curves by run and key. What was fetched for this view is kept while it lasts.
  async fetch(keys, points) {
    const { x, smooth, span } = this.view;
    const missing = points ? keys : keys.filter((key) => !this.cache.has(key));
    const found = new Map(points ? [] : keys.filter((key) => this.cache.has(key)).map((key) => [key, this.cache.get(key)]));
    if (missing.length) {
      const { version } = this;
      const asked = new URLSearchParams([
        ...this.runs.map(({ name }) => ["run", name]),
        ...missing.map((key) => ["key", key]),
        ["x", x],
        ["smooth", smooth],
        ["points", points || Math.min(Math.max(Math.round(4800 / this.runs.length), 160), 600)],
        ...(span ? [["low", span[0]], ["high", span[1]]] : []),
      ]);
      const answer = await get(`/api/series?${asked}`);
      const runs = new Map(Object.entries(answer.runs));
      for (const key of missing) {
        const curve = new Map([...runs].filter(([, one]) => Object.hasOwn(one, key)).map(([name, one]) => [name, one[key]]));
        found.set(key, curve);
        if (!points && version === this.version) this.cache.set(key, curve);
      }
      if (version === this.version) {
        this.unknown = answer.unknown;
        this.told?.();
      }
    }
    return found;
  }

  traces(found, group) {
    if (this.byKey) return this.tracesByKey(found, group);
    return group.flatMap((key, nth) =>
      this.runs.flatMap(({ name, index }) => {
        const curve = found.get(key)?.get(name);
        if (!curve) return [];
        const more = { points: isEvaluation(key), show: !this.view.hide.includes(name), key };
        return curves(curve, name, index, { ...more, dash: nth ? "dash" : undefined });
      }),
    );
  }

  // Of a family of many, only the smoothed curves.
  tracesByKey(found, group) {
    const all = group.flatMap((key, nth) => {
      const curve = found.get(key)?.get(this.runs[0].name);
      return curve ? curves(curve, key, nth, { points: isEvaluation(key) }) : [];
    });
    return group.length > 2 ? all.filter((one) => one.opacity !== 0.34) : all;
  }

  async draw(panel, found) {
    const { group, chart } = panel,
      { x, logx, logy, span } = this.view,
      [key] = group;
    const fixed = SHARES.has(key) ? { tickformat: ".2~%", rangemode: "tozero" } : key === "items_per_s" ? { rangemode: "tozero" } : {};
    chart.span = span && (logx ? span.map((value) => Math.log10(Math.max(value, 1e-12))) : span);
    const traces = this.traces(found, group),
      { marks = [], shapes } = this.decorate?.(group, traces) || {};
    // Curves of one chart that are not told apart by the page's legend.
    const isPair = this.byKey && group.length === 2;
    for (const trace of traces) trace.showlegend = isPair && trace.opacity !== 0.34;
    await chart.draw([...traces, ...marks], {
      shapes,
      showlegend: isPair,
      legend: { x: 1, xanchor: "right", y: 1, bgcolor: "rgba(0,0,0,0)" },
      uirevision: `${x}${logx}${logy}${span}`,
      xaxis: { type: logx ? "log" : "linear", title: { text: axisTitle(x), font: { size: 10 }, standoff: 2 } },
      yaxis: { ...fixed, type: logy && !SHARES.has(key) ? "log" : "linear", fixedrange: true },
      margin: { l: 40, r: 8, t: 6, b: 30 },
    });
    panel.drawn = this.version;
    panel.unit.textContent = this.byKey && group.length < 3 ? textOf(key, traces[0]?.y.at(-1), chart.unit) : chart.unit;
  }

  zoomed(span) {
    this.choose({ span: span && (this.view.logx ? span.map((value) => 10 ** value) : span) });
  }

  // Everything at the width of paper while `use` runs, then back to the screen.
  async onPaper(use) {
    this.isPaper = true;
    this.place.classList.add("paper");
    const Plotly = await plotly();
    const drawn = () => [...this.panels.values()].map(({ chart }) => chart.el).filter((el) => el.classList.contains("js-plotly-plot"));
    const fit = () => Promise.all(drawn().map((el) => Plotly.Plots.resize(el)));
    await this.load([...this.panels.values()].filter((panel) => panel.drawn !== this.version));
    await fit();
    await use();
    this.place.classList.remove("paper");
    this.isPaper = false;
    await fit();
  }
}
