// An ablation: what each change was predicted to do to the speed, and what was measured, with the noise.

import { colour, escapeHover, layout, picture, plotly, SETTINGS } from "./chart.js";
import { bytes, card, get, h, num, scaled } from "./dom.js";
import { downloads } from "./download.js";
import { watch } from "./live.js";

const TONES = { __proto__: null, faster: "good", slower: "bad" };

export async function open(place, name) {
  document.title = `${name} · seedbed`;
  const page = new AblationPage(place, name, await get(`/api/ablations/${encodeURIComponent(name)}`));
  page.build();
  const redraw = () => page.drawChart();
  const stop = watch({ list: true, version: Number.MAX_SAFE_INTEGER }, () => {});
  addEventListener("theme", redraw);
  return () => {
    stop();
    removeEventListener("theme", redraw);
  };
}

const times = (value) => (typeof value === "number" ? `${value.toFixed(value < 10 ? 3 : 1)}x` : "–");

class AblationPage {
  constructor(place, name, found) {
    Object.assign(this, { place, name, found });
    // Before the end of an ablation there are predictions only.
    this.lines = found.summary?.length
      ? found.summary
      : found.rows.map(({ label, axis, outcome, prediction: p }) => ({ label, axis, outcome, predicted: p?.ratio, basis: p?.basis }));
    this.measured = this.lines.filter((one) => typeof one.ratio === "number" && one.axis !== "baseline");
  }

  build() {
    const { identity = {}, facts = {}, steps, repeats, summary } = this.found;
    const where = [facts.device, facts.torch && `torch ${facts.torch}`, facts.driver, facts.code].filter(Boolean).join(", ");
    this.chart = h("div", {});
    const files = downloads(this.name, { picture: (format, title) => picture(this.chart, format, title), rows: () => this.rows() });
    this.place.append(
      h("div", { className: "crumbs" }, h("a", { href: "/sweeps" }, "Sweeps and ablations"), h("span", {}, "› ablation")),
      h(
        "div",
        { className: "head" },
        h(
          "div",
          {},
          h("h1", {}, this.name),
          h("div", { className: "why" }, `effect of each setting on ${identity.recipe || "?"}`, identity.settings?.length ? ` with ${identity.settings.join(" ")}` : ""),
          h("div", { className: "small soft" }, `${where ? `${where}; ` : ""}${num(steps)} steps per repeat, ${num(repeats)} repeats per row`),
        ),
      ),
      ...(summary?.length ? [] : [h("div", { className: "say info" }, "Not finished: predictions only. The same command continues it.")]),
      h(
        "div",
        { className: "stack" },
        card("Predicted and measured", files, h("div", { className: "body" }, this.chart)),
        card("Rows", h("span", { className: "faint small" }, "times the baseline's items per second"), h("div", { className: "body flush" }, this.table())),
      ),
    );
    this.drawChart();
  }

  rows() {
    const keys = ["label", "outcome", "predicted", "ratio", "noise", "verdict", "items_per_s", "low", "high", "ms", "loss", "loss_sd", "allocated", "reserved", "num_params", "basis"];
    return [keys, ...this.lines.map((one) => keys.map((key) => one[key] ?? ""))];
  }

  table() {
    const number = (...content) => h("td", { className: "right num" }, ...content);
    const faint = (text) => h("span", { className: "faint" }, text);
    const rows = this.lines.map((one) =>
      h(
        "tr",
        {},
        h("td", { className: "mono" }, one.label, one.basis ? h("div", { className: "small soft" }, one.basis) : null),
        number(times(one.predicted)),
        number(times(one.ratio), interval(one) ? faint(` [${interval(one).map(times).join(", ")}]`) : null),
        h(
          "td",
          {},
          h("span", { className: `tag ${TONES[one.verdict] || ""}` }, one.verdict || one.outcome),
          one.explain ? [" ", h("span", { className: "tag warn" }, "to explain")] : null,
          one.why ? h("div", { className: "small soft" }, one.why) : null,
        ),
        number(scaled(one.items_per_s), typeof one.low === "number" ? faint(` [${scaled(one.low)}, ${scaled(one.high)}]`) : null),
        number(bytes(one.allocated || one.reserved)),
        number(num(one.loss), typeof one.loss_sd === "number" ? faint(` ± ${num(one.loss_sd)}`) : null),
      ),
    );
    const head = ["change", "predicted", "measured [noise]", "verdict", "items/s [p10, p90]", "memory", "loss"].map((text, i) =>
      h("th", { className: [1, 2, 4, 5, 6].includes(i) ? "right" : "" }, text),
    );
    return h("div", { className: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, head)), h("tbody", {}, rows)));
  }

  async drawChart() {
    const shown = this.lines.filter((one) => typeof one.predicted === "number" && one.axis !== "baseline");
    if (!shown.length) return this.chart.replaceChildren(h("div", { className: "empty" }, "Nothing is predicted yet."));
    const Plotly = await plotly();
    if (!this.chart.isConnected) return;
    const tone = { __proto__: null, faster: colour("leaf"), slower: colour("fire") };
    const names = (some) => some.map((one) => escapeHover(one.label));
    const measured = {
      type: "scatter",
      mode: "markers",
      name: "measured, with its noise",
      x: this.measured.map((one) => one.ratio),
      y: names(this.measured),
      marker: { size: 9, color: this.measured.map((one) => tone[one.verdict] || colour("soft")) },
      error_x: { type: "data", array: this.measured.map((one) => one.ratio * (one.noise || 0)), color: colour("soft"), thickness: 1.4, width: 4 },
      hovertemplate: "%{y}: measured %{x:.3f}x<extra></extra>",
    };
    const predicted = {
      type: "scatter",
      mode: "markers",
      name: "predicted",
      x: shown.map((one) => one.predicted),
      y: names(shown),
      marker: { symbol: "line-ns-open", size: 17, line: { width: 2.4 }, color: colour("water") },
      hovertemplate: "%{y}: predicted %{x:.3f}x<extra></extra>",
    };
    this.chart.style.height = `${96 + 30 * shown.length}px`;
    const one = { type: "line", x0: 1, x1: 1, y0: 0, y1: 1, yref: "paper", line: { color: colour("faint"), width: 1, dash: "dot" } };
    await Plotly.react(
      this.chart,
      [measured, predicted],
      layout({
        dragmode: false,
        showlegend: true,
        legend: { orientation: "h", x: 0, y: 1, yanchor: "bottom" },
        margin: { l: 90, r: 16, t: 30, b: 40 },
        shapes: [one],
        xaxis: { type: "log", showgrid: true, title: { text: "times the baseline's items per second", font: { size: 11 } } },
        yaxis: { type: "category", autorange: "reversed", categoryorder: "array", categoryarray: names(shown) },
      }),
      SETTINGS,
    );
  }
}

const interval = ({ ratio, noise }) => (typeof ratio === "number" && noise ? [ratio * (1 - noise), ratio * (1 + noise)] : null);
