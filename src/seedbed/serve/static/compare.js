// Comparison of runs: a panel per metric, final values with their noise, and settings that differ.

import { go } from "./app.js";
import { palette } from "./chart.js";
import { card, duration, get, h, num, runPath, s, scaled, smoothing, status } from "./dom.js";
import { watch } from "./live.js";
import { matcher, Panels } from "./grid.js";
import { AXES } from "./units.js";
import { address, read, save } from "./view.js";

// New rows are drawn at most this often.
const PAUSE = 2500;

export async function open(place, _, query) {
  document.title = "Compare · seedbed";
  const { runs } = await get("/api/runs");
  const page = new Compare(place, read(query), runs);
  await page.build();
  if (!page.panels) return () => {};
  const stop = watch({ runs: page.names }, () => page.later());
  const redraw = () => page.redraw();
  const keys = (event) => page.key(event);
  addEventListener("theme", redraw);
  addEventListener("keydown", keys);
  return () => {
    stop();
    page.panels.close();
    removeEventListener("theme", redraw);
    removeEventListener("keydown", keys);
  };
}

class Compare {
  constructor(place, view, runs) {
    Object.assign(this, { place, view, names: view.run, known: runs.map((run) => run.name) });
  }

  async build() {
    this.place.append(
      h("div", { className: "bar", style: { marginBottom: "14px" } }, h("h1", {}, "Compare"), h("span", { className: "grow" }), this.adder()),
    );
    if (!this.names.length)
      return this.place.append(
        h(
          "div",
          { className: "card empty big" },
          h("h2", {}, "Which runs?"),
          h(
            "p",
            {},
            "Choose them in the ",
            h("a", { href: "/", style: { color: "var(--leaf)" } }, "list"),
            " with ",
            h("kbd", {}, "x"),
            ", or add one above.",
          ),
        ),
      );
    this.levels = h("div", { className: "body flush" });
    this.settings = h("div", { className: "body flush" });
    this.legend = h("div", { className: "legend", role: "group", ariaLabel: "Runs" });
    this.metric = h("select", { ariaLabel: "Metric of the verdicts", onchange: () => this.judge() });
    this.remarks = h("div", { className: "small soft remarks", role: "status" });
    this.grid = h("div", { className: "panels" });
    const runs = this.names.map((name, index) => ({ name, index }));
    this.panels = new Panels(this.grid, { view: this.view, runs, choose: (changes) => this.choose(changes) });
    this.panels.told = () => this.remark();
    this.place.append(
      h(
        "div",
        { className: "stack" },
        h(
          "section",
          { className: "card curves", ariaLabel: "Curves" },
          h("header", {}, this.tools()),
          this.legend,
          this.remarks,
          this.grid,
        ),
        card("Results", [h("span", { className: "faint small" }, `against ${this.names[0]}, by `), this.metric], this.levels),
        card("Settings that differ", (this.equal = h("span", { className: "faint small" })), this.settings),
      ),
    );
    await this.refresh();
  }

  adder() {
    const add = () => {
      const name = field.value;
      if (this.known.includes(name) && !this.names.includes(name)) go(address({ ...this.view, run: [...this.names, name] }));
    };
    const field = h("input", {
      type: "search",
      placeholder: "Add a run…",
      ariaLabel: "Add a run",
      list: "all-runs",
      onchange: add,
      style: { width: "240px" },
    });
    const others = this.known.filter((name) => !this.names.includes(name));
    return [field, h("datalist", { id: "all-runs" }, others.map((value) => h("option", { value })))];
  }

  tools() {
    const flag = (key, text, title) =>
      h(
        "button",
        {
          className: "chip",
          title,
          "data-flag": key,
          ariaPressed: String(this.view[key]),
          onclick: () => this.choose({ [key]: !this.view[key] }),
        },
        text,
      );
    this.search = h("input", {
      type: "search",
      placeholder: "Metrics: words or a regex",
      ariaLabel: "Search metrics",
      value: this.view.find,
      oninput: () => this.choose({ find: this.search.value }, { step: false }),
    });
    this.count = h("span", { className: "faint small num" });
    this.axis = h(
      "select",
      { ariaLabel: "Horizontal axis", onchange: () => this.choose({ x: this.axis.value, span: null }) },
      AXES.map(([value, text]) => h("option", { value, selected: value === this.view.x }, text)),
    );
    const edge = (label) => h("input", { type: "number", step: "any", ariaLabel: label, placeholder: label, onchange: () => this.typedSpan() });
    this.edges = [edge("from"), edge("to")];
    this.reset = h("button", { className: "quiet", title: "Show all of the axis", ariaLabel: "Reset zoom", onclick: () => this.choose({ span: null }) }, "×");
    return [
      this.search,
      this.count,
      h("span", { className: "grow" }),
      this.axis,
      h("span", { className: "bar span" }, this.edges, this.reset),
      flag("logx", "log x"),
      flag("logy", "log y"),
      flag("together", "evaluation on training", "Draw a metric's evaluation in its panel of training, dashed"),
      smoothing(this.view, () => this.choose({ smooth: this.view.smooth }, { step: false })),
      h("button", { className: "quiet", title: "Print or save as PDF, all panels drawn", onclick: () => this.print() }, "Print"),
    ];
  }

  typedSpan() {
    const [low, high] = this.edges.map((edge) => (edge.value === "" ? NaN : Number(edge.value)));
    const { span } = this.view;
    // An edge that is left open is as far as there are values.
    const ends = this.range();
    const wanted = [Number.isFinite(low) ? low : ends[0], Number.isFinite(high) ? high : ends[1]];
    if (wanted[0] < wanted[1] && String(wanted) !== String(span)) this.choose({ span: wanted });
  }

  range() {
    const xs = [...this.panels.panels.values()].flatMap((panel) => panel.chart.traces.flatMap((one) => one.x));
    return [xs.reduce((a, b) => Math.min(a, b), 0), xs.reduce((a, b) => Math.max(a, b), 0)];
  }

  // Another view: kept in the address, and only what it concerns is drawn again.
  choose(changes, how) {
    const before = { ...this.view };
    Object.assign(this.view, changes);
    save(this.view, how);
    if (["x", "smooth", "span"].some((key) => key in changes)) this.panels.invalidate();
    else if (["logx", "logy", "hide"].some((key) => key in changes && changes[key] !== before[key])) this.panels.redraw();
    this.arrange();
    if ("hide" in changes) this.drawLevels();
  }

  arrange() {
    const { view } = this,
      num_shown = this.panels.arrange(this.found.keys);
    this.count.textContent = `${num_shown} of ${this.found.keys.length} metrics`;
    if (!num_shown)
      this.grid.replaceChildren(
        h(
          "div",
          { className: "empty" },
          this.found.keys.length ? `No metric matches ${view.find}.` : "These runs have left no rows yet.",
        ),
      );
    const valid = matcher(view.find).source === (view.find || "(?:)");
    this.search.title = valid ? "" : "not a regular expression: searched as it stands";
    for (const button of this.place.querySelectorAll("[data-flag]")) button.ariaPressed = String(view[button.dataset.flag]);
    [this.edges[0].value, this.edges[1].value] = view.span ? view.span.map((value) => Number(value.toPrecision(6))) : ["", ""];
    this.reset.disabled = !view.span;
    this.drawLegend();
  }

  remark() {
    const { unknown } = this.panels,
      what = AXES.find(([name]) => name === this.view.x)?.[1] || this.view.x;
    this.remarks.textContent = unknown.length
      ? `${what}: not known for ${unknown.slice(0, 6).join(", ")}${unknown.length > 6 ? ` and ${unknown.length - 6} more` : ""}; neither rows nor settings say.`
      : "";
  }

  toggle(name) {
    const { hide } = this.view;
    this.choose({ hide: hide.includes(name) ? hide.filter((one) => one !== name) : [...hide, name] });
  }

  drawLegend() {
    const { hide } = this.view;
    const alone = (name) => this.choose({ hide: this.names.filter((one) => one !== name) });
    const all = this.names.length > 1 && [
      h("button", { className: "chip", disabled: !hide.length, onclick: () => this.choose({ hide: [] }) }, "all"),
      h("button", { className: "chip", disabled: hide.length === this.names.length, onclick: () => this.choose({ hide: this.names }) }, "none"),
    ];
    const here = document.activeElement?.dataset?.run;
    this.legend.replaceChildren(
      ...this.names.map((name, index) =>
        h(
          "button",
          {
            className: "chip",
            "data-run": name,
            title: `${name}: click hides or shows it everywhere, shift-click shows only this one`,
            ariaPressed: String(!hide.includes(name)),
            onclick: (event) => (event.shiftKey ? alone(name) : this.toggle(name)),
          },
          h("i", { className: "swatch", style: { background: palette(index), margin: 0 } }),
          name,
        ),
      ),
      ...(all || []),
    );
    if (here !== undefined) [...this.legend.children].find((one) => one.dataset.run === here)?.focus();
  }

  key(event) {
    if (event.key === "Escape" && event.target === this.search) {
      this.search.value = "";
      this.choose({ find: "" });
      this.search.blur();
    }
    if (event.target.matches("input, textarea, select") || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key !== "/") return;
    event.preventDefault();
    this.search.focus();
  }

  print() {
    return this.panels.onPaper(() => print());
  }

  redraw() {
    this.panels.redraw();
    this.drawLevels();
    this.drawSettings();
    this.drawLegend();
  }

  later() {
    this.timer ??= setTimeout(() => {
      this.timer = undefined;
      if (this.place.isConnected) this.refresh();
    }, PAUSE);
  }

  async refresh() {
    if (this.busy) return this.later();
    this.busy = true;
    try {
      await this.fetchLevels();
      // Units that a recipe gives hold where all runs have it.
      const recipes = new Set(this.found.runs.map((run) => (run.title || "").split("/")[0]));
      this.grid.dataset.recipe = recipes.size === 1 ? [...recipes][0] : "";
      this.drawLevels();
      this.drawSettings();
      this.panels.invalidate();
      this.arrange();
    } finally {
      this.busy = false;
    }
  }

  async fetchLevels() {
    const asked = this.names.map((name) => ["run", name]);
    if (this.metric.value) asked.push(["metric", this.metric.value]);
    this.found = await get(`/api/compare?${new URLSearchParams(asked)}`);
    const metrics = this.found.keys.filter((key) => key.startsWith("eval/")).map((key) => key.slice(5));
    const first = this.found.runs.find((run) => run.metric)?.metric;
    const now = this.metric.value || first;
    this.metric.replaceChildren(...metrics.map((value) => h("option", { value, selected: value === now }, value)));
  }

  // Verdicts by another metric; the curves stay as they are.
  async judge() {
    await this.fetchLevels();
    this.drawLevels();
  }

  drawLevels() {
    const scale = Math.max(
      ...this.found.runs.slice(1).map(({ verdicts: { step: d } }) => Math.max(Math.abs(d.change || 0), d.band || 0)),
      1e-12,
    );
    const rows = this.found.runs.map((run, i) =>
      h(
        "tr",
        {},
        h(
          "td",
          {},
          h(
            "span",
            { className: "bar" },
            h("input", {
              type: "checkbox",
              checked: !this.view.hide.includes(run.name),
              ariaLabel: `Show ${run.name}`,
              onchange: () => this.toggle(run.name),
            }),
            h("i", { className: "swatch", style: { background: palette(i), margin: 0 } }),
            h("a", { href: runPath(run.name) }, run.name),
          ),
          run.why ? h("div", { className: "small soft" }, run.why) : null,
        ),
        h("td", {}, status(run.status)),
        h("td", { className: "right num" }, num(run.step)),
        h("td", { className: "right num" }, num(run.loss)),
        h("td", { className: "right num", title: run.metric || "" }, num(run.best)),
        h("td", {}, run.verdicts ? delta(run.verdicts, scale) : h("span", { className: "faint small" }, "the others are compared with this run")),
        h("td", { className: "right num" }, scaled(run.rate)),
        h("td", { className: "right num" }, duration(run.seconds)),
        h(
          "td",
          { className: "right" },
          h(
            "button",
            {
              className: "quiet",
              title: "Leave it out",
              ariaLabel: `Leave out ${run.name}`,
              onclick: () => go(address({ ...this.view, run: this.names.filter((n) => n !== run.name) })),
            },
            "×",
          ),
        ),
      ),
    );
    const head = ["run", "status", "step", "loss at the end", "best", "difference", "items/s", "time", ""].map((t, i) =>
      h("th", { className: [2, 3, 4, 6, 7].includes(i) ? "right" : "" }, t),
    );
    this.levels.replaceChildren(
      h("div", { className: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, head)), h("tbody", {}, rows))),
    );
  }

  drawSettings() {
    const { settings, num_equal: same } = this.found;
    this.equal.textContent = `${same} more are equal`;
    if (!settings.length)
      return this.settings.replaceChildren(
        h("div", { className: "empty" }, this.names.length > 1 ? "All settings are equal." : "Add a second run to compare."),
      );
    const rows = settings.map(({ key, values }) =>
      h(
        "tr",
        {},
        h("td", {}, key),
        this.names.map((name) =>
          h("td", { className: `mono ${values[name] !== values[this.names[0]] ? "" : "soft"}` }, values[name] ?? "–"),
        ),
      ),
    );
    this.settings.replaceChildren(
      h(
        "div",
        { className: "scroll tall" },
        h(
          "table",
          { className: "config" },
          h(
            "thead",
            {},
            h(
              "tr",
              {},
              h("th", {}, "setting"),
              this.names.map((name, i) => h("th", {}, h("i", { className: "swatch", style: { background: palette(i) } }), name)),
            ),
          ),
          h("tbody", {}, rows),
        ),
      ),
    );
  }
}

// The difference as a dot against the noise band around zero, and the verdict at equal time where that is another one.
function delta({ step, seconds }, scale) {
  const { metric, change, band, word, why } = step;
  const at = (v) => 60 + (52 * Math.max(-scale, Math.min(scale, v))) / scale;
  const ink = { better: "var(--leaf)", worse: "var(--fire)" }[word] || "var(--soft)";
  const picture = s(
    "svg",
    { viewBox: "0 0 120 16", role: "img", "aria-label": `${num(change)} with a noise band of ${num(band)}` },
    band
      ? s("rect", { x: at(-band), y: 2, width: Math.max(at(band) - at(-band), 1), height: 12, rx: 3, fill: "var(--line)" })
      : null,
    s("line", { x1: 60, x2: 60, y1: 0, y2: 16, stroke: "var(--faint)" }),
    typeof change === "number" ? s("circle", { cx: at(change), cy: 8, r: 4, fill: ink }) : null,
  );
  const known = typeof change === "number";
  return h(
    "div",
    {},
    h(
      "span",
      { className: "delta", title: `${metric} ${why}` },
      known && h("span", { className: "band" }, picture),
      known && h("span", { className: "num" }, `${change > 0 ? "+" : ""}${num(change)}`),
      verdict(step),
      seconds.word !== word && typeof seconds.change === "number" && verdict(seconds, "at equal time: "),
    ),
    h("div", { className: "faint small" }, why),
  );
}

function verdict({ word, why }, before = "") {
  return h("span", { className: `tag ${{ better: "good", worse: "bad" }[word] || ""}`, title: why }, before + word);
}
