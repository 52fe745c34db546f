// The curves of one run: panels in sections that open and close, and a table of what was measured once.

import { colour, escapeHover } from "./chart.js";
import { apiPath, get, h, num, segments, smoothing, toggle } from "./dom.js";
import { isEvaluation, matcher, ordered, Panels } from "./grid.js";
import { AXES, axisTitle, textOf, unitOf } from "./units.js";

const HIDDEN = new Set(["epoch"]);
const SYSTEM = /^(items_per_s|tokens_per_s|wait|memory|mfu|mfu_measured)$|^(gpu|cpu|host|device|disk|network|communication)_|_(ms|bytes)$/;
// A section of more panels is closed until somebody opens it.
const MANY = 12;
const KEPT = "seedbed-run-sections";
const look = { x: "step", smooth: 0.6, logx: false, logy: false };

// The section of a key: groups of the recipe's own are named by what stands before the dot.
export function sectionOf(key) {
  if (isEvaluation(key)) return "Evaluation";
  if (SYSTEM.test(key)) return "System";
  return key.includes(".") ? key.slice(0, key.indexOf(".")) : "Training";
}

const RANK = { __proto__: null, Training: 0, Evaluation: 1, System: 2 };

// Metrics that differ in their last number (loss_t0 ... loss_t9) share a panel.
function families(keys) {
  const found = new Map();
  for (const key of keys) {
    const name = key.replace(/\d+$/, "#");
    found.set(name, [...(found.get(name) || []), key]);
  }
  return [...found.values()].flatMap((group) => (group.length > 2 ? [group] : group.map((key) => [key])));
}

const titleOf = (keys) => (keys.length > 2 ? `${keys[0]} … ${keys.at(-1).match(/\d+$/)?.[0] ?? keys.at(-1)}` : keys.join(" and "));

function kept() {
  try {
    return JSON.parse(localStorage.getItem(KEPT)) || {};
  } catch {
    return {};
  }
}

export class RunCurves {
  constructor(place, name) {
    Object.assign(this, { place, name, sections: new Map(), many: new Set(), single: new Map() });
    this.view = { ...look, find: "", span: null, pin: [], wide: ["loss"], hide: [] };
  }

  tools() {
    const keep = (key) => () => this.choose({ [key]: this.view[key] });
    this.search = h("input", {
      type: "search",
      placeholder: "Metrics: words or a regex",
      ariaLabel: "Search metrics",
      oninput: () => this.choose({ find: this.search.value }),
      onkeydown: (event) => {
        if (event.key !== "Escape") return;
        this.search.value = "";
        this.choose({ find: "" });
      },
    });
    this.count = h("span", { className: "faint small num", role: "status" });
    this.reset = h("button", { className: "chip", hidden: true, onclick: () => this.choose({ span: null }) }, "all of the axis");
    return [
      this.search,
      this.count,
      h("span", { className: "grow" }),
      this.reset,
      segments("Horizontal axis", AXES.map(([value, text]) => [value, text]), this.view.x, (x) => this.choose({ x, span: null })),
      toggle(this.view, "logx", "log x", keep("logx")),
      toggle(this.view, "logy", "log y", keep("logy")),
      smoothing(this.view, keep("smooth")),
      h("button", { className: "quiet", title: "Print or save as PDF, with the panels of open sections", onclick: () => this.print() }, "Print"),
    ];
  }

  choose(changes) {
    Object.assign(this.view, changes);
    for (const key of Object.keys(look)) look[key] = this.view[key];
    this.reset.hidden = !this.view.span;
    const isNew = ["x", "smooth", "span"].some((key) => key in changes);
    for (const { panels } of this.sections.values())
      if (isNew) panels.invalidate();
      else if ("logx" in changes || "logy" in changes) panels.redraw();
    this.arrange();
  }

  // Other rows than before: which metrics are there, and the curves in view.
  async update({ keys, events, summary }) {
    Object.assign(this, { events, isRunning: summary.status === "running" });
    this.keys = keys.filter((key) => !HIDDEN.has(key));
    const asked = this.keys.filter((key) => !this.many.has(key));
    if (asked.length) {
      const found = await get(apiPath(this.name, `/series?${new URLSearchParams([["points", 10], ...asked.map((key) => ["key", key])])}`));
      this.single.clear();
      for (const [key, { raw }] of Object.entries(found))
        if (raw.x.length > 1) this.many.add(key);
        else if (raw.x.length) this.single.set(key, [raw.x[0], raw.y[0]]);
    }
    for (const { panels } of this.sections.values()) panels.invalidate();
    this.arrange();
    // Panels that came into view are asked for together, a moment later.
    await new Promise((done) => setTimeout(done, 40));
    await Promise.all([...this.sections.values()].map(({ panels }) => panels.working));
  }

  arrange() {
    const names = [...new Set([...this.keys].filter((key) => this.many.has(key) || this.single.has(key)).map(sectionOf))];
    names.sort((a, b) => (RANK[a] ?? 3) - (RANK[b] ?? 3));
    for (const name of names) if (!this.sections.has(name)) this.add(name);
    const boxes = names.map((name) => this.sections.get(name).box);
    if (!boxes.length) boxes.push(h("div", { className: "empty" }, this.isRunning ? "The first row is on its way." : "This run left no rows."));
    if (boxes.length !== this.place.children.length || boxes.some((box, i) => box !== this.place.children[i])) this.place.replaceChildren(...boxes);
    let num_shown = 0;
    for (const name of names) num_shown += this.arrangeSection(name);
    this.count.textContent = this.keys.length ? `${num_shown} of ${this.many.size + this.single.size} metrics` : "";
    this.none ??= h("div", { className: "empty" }, "No metric matches.");
    if (names.length && !num_shown) this.place.append(this.none);
    else this.none.remove();
  }

  arrangeSection(name) {
    const section = this.sections.get(name),
      pattern = matcher(this.view.find);
    const keys = this.keys.filter((key) => sectionOf(key) === name);
    section.panels.arrange(keys.filter((key) => this.many.has(key)));
    const once = keys.filter((key) => this.single.has(key) && pattern.test(key));
    const shown = new Set([...section.groups.flat(), ...once]);
    const own = [...shown].filter((key) => keys.includes(key)).length;
    section.count.textContent = `${own} ${own === 1 ? "metric" : "metrics"}`;
    section.box.hidden = !shown.size;
    section.once.replaceChildren(...(once.length ? [this.table(once)] : []));
    // What was searched for is shown; the choice of the person comes back afterwards.
    const open = this.view.find ? true : (kept()[name] ?? (name in RANK && section.groups.length <= MANY));
    if (section.box.open !== open) section.box.open = open;
    return own;
  }

  groups(name, keys) {
    const pattern = matcher(this.view.find),
      { pin } = this.view;
    // The evaluation that can be compared with the loss of training is drawn with it.
    const both = name === "Training" && this.many.has("eval/loss") ? ["loss", "eval/loss"] : ["loss"];
    const found = keys.filter((key) => (key === "loss" ? both : [key]).some((one) => pattern.test(one)));
    const shown = families(name === "Evaluation" ? found : ordered(found)).map((group) => (group[0] === "loss" ? both : group));
    return [...shown.filter(([key]) => pin.includes(key)), ...shown.filter(([key]) => !pin.includes(key))];
  }

  add(name) {
    const grid = h("div", { className: "panels" }),
      once = h("div", {}),
      count = h("span", { className: "faint small num" });
    const section = { groups: [], once, count };
    section.panels = new Panels(grid, {
      view: this.view,
      runs: [{ name: this.name, index: 0 }],
      choose: (changes) => this.choose(changes),
      byKey: true,
      titleOf,
      grouped: (keys) => (section.groups = this.groups(name, keys)),
      decorate: (group, traces) => (group[0] === "loss" ? this.marks(traces) : undefined),
    });
    section.panels.told = () => this.remark(section.panels.unknown.length > 0);
    section.box = h("details", { className: "section", "data-section": name }, h("summary", {}, h("h3", {}, name), count), grid, once);
    // Only what a person does to it is kept.
    section.box.firstChild.addEventListener("click", () => {
      if (!this.view.find) localStorage.setItem(KEPT, JSON.stringify({ ...kept(), [name]: !section.box.open }));
    });
    this.sections.set(name, section);
  }

  remark(isUnknown) {
    this.unknown ??= h("p", { className: "small soft remarks", role: "status" });
    this.unknown.textContent = isUnknown ? `${axisTitle(this.view.x)}: neither the rows nor the settings of this run say.` : "";
    this.place.before(this.unknown);
  }

  table(keys) {
    const recipe = this.place.closest("[data-recipe]")?.dataset.recipe;
    const rows = keys.map((key) => {
      const [step, value] = this.single.get(key);
      return h(
        "tr",
        { "data-key": key },
        h("td", {}, key),
        h("td", { className: "right num" }, textOf(key, value, unitOf(key, recipe))),
        h("td", { className: "right num soft" }, num(step)),
      );
    });
    const head = ["measured once", "value", "step"].map((text, i) => h("th", { className: i ? "right" : "" }, text));
    return h("table", { className: "once" }, h("thead", {}, h("tr", {}, head)), h("tbody", {}, rows));
  }

  // Notices, warnings and errors as lines, with a mark that says what happened.
  marks(traces) {
    const found = this.events
      .filter((event) => event.severity !== "info")
      .slice(-60)
      .map((event) => ({ ...event, x: event.at[this.view.x], tone: colour(/^(warning|error)$/.test(event.severity) ? "fire" : "faint") }))
      .filter((event) => typeof event.x === "number");
    const values = traces.flatMap((one) => one.y).filter((value) => Number.isFinite(value));
    if (!found.length || !values.length) return {};
    const line = ({ x, tone }) => ({ type: "line", x0: x, x1: x, y0: 0, y1: 1, yref: "paper", line: { color: tone, width: 1, dash: "dot" } });
    const top = values.reduce((a, b) => Math.max(a, b), -Infinity);
    return {
      shapes: found.map(line),
      marks: [
        {
          type: "scatter",
          mode: "markers",
          x: found.map((event) => event.x),
          y: found.map(() => top),
          text: found.map((event) => escapeHover(`${event.kind} at ${event.step}: ${event.what}`.slice(0, 110))),
          hovertemplate: "%{text}<extra></extra>",
          marker: { symbol: "triangle-down", size: 9, color: found.map((event) => event.tone) },
          showlegend: false,
        },
      ],
    };
  }

  redraw() {
    for (const { panels } of this.sections.values()) panels.redraw();
  }

  async print() {
    const open = [...this.sections.values()].filter(({ box }) => box.open && !box.hidden);
    await open.reduce((next, { panels }) => () => panels.onPaper(next), () => print())();
  }

  close() {
    for (const { panels } of this.sections.values()) panels.close();
  }
}
