// One run: numbers, curves, samples, settings, events, checkpoints, console, notes. Updated while it trains.

import { Chart, colour, curves, escapeHover } from "./chart.js";
import {
  age,
  apiPath,
  bytes,
  card,
  command,
  duration,
  enlarge,
  get,
  h,
  num,
  percent,
  problem,
  runPath,
  scaled,
  segments,
  smoothing,
  status,
  toggle,
} from "./dom.js";
import { watch } from "./live.js";
import { notes } from "./notes.js";
import { checkpointTable, checks, timeUse } from "./parts.js";

const isAlarm = (e) => e.severity === "warning" || e.severity === "error";
const AXES = [
  ["step", "Steps"],
  ["seconds", "Time"],
  ["items", "Items"],
];
const TITLES = { __proto__: null, step: "steps", seconds: "seconds of training", items: "items" };
// Shown first, before the other metrics of a recipe.
const FIRST = ["loss", "lr", "grad_norm", "items_per_s", "wait", "mfu", "memory"];
const UNITS = { __proto__: null, items_per_s: scaled, memory: bytes, wait: percent, mfu: percent };
const HIDDEN = new Set(["epoch", "mfu_measured"]);
const look = { axis: "step", smooth: 0.6, logX: false, logY: false };

export async function open(place, name) {
  document.title = `${name} · seedbed`;
  const page = new RunPage(place, name, await get(apiPath(name)));
  place.dataset.recipe = page.about.summary.recipe || "";
  page.build();
  const stop = watch({ runs: [name, page.about.summary.parent].filter(Boolean) }, (news) => page.hear(news));
  const redraw = () => page.drawCurves();
  addEventListener("theme", redraw);
  return () => {
    stop();
    removeEventListener("theme", redraw);
  };
}

// Metrics that differ in their last number (loss_t0 ... loss_t9) share a chart.
function families(keys) {
  const found = new Map();
  for (const key of keys) {
    const name = key.replace(/\d+$/, "#");
    found.set(name, [...(found.get(name) || []), key]);
  }

  return [...found.values()].flatMap((group) => (group.length > 2 ? [group] : group.map((key) => [key])));
}

const titleOf = (keys) => (keys.length > 2 ? `${keys[0]} … ${keys.at(-1).match(/\d+$/)[0]}` : keys.join(" and "));

class RunPage {
  constructor(place, name, about) {
    Object.assign(this, { place, name, about, charts: new Map(), parts: {} });
  }

  async hear(news) {
    const changed = news.again ? ["status", "rows", "events", "console"] : news.runs?.[this.name] || [];
    if (!changed.length || this.busy) {
      this.missed ||= changed.length > 0;
      return;
    }
    this.busy = true;
    try {
      this.about = await get(apiPath(this.name));
      this.drawHead();
      this.drawFacts();
      await this.drawCurves();
      if (changed.includes("events")) this.drawSamples();
      if (changed.includes("console")) this.drawConsole();
    } catch (error) {
      this.head.replaceChildren(problem(error), h("a", { className: "button", href: "/" }, "All runs"));
    } finally {
      this.busy = false;
      if (this.missed) {
        this.missed = false;
        setTimeout(() => this.hear({ again: true }), 300);
      }
    }
  }

  build() {
    const part = (key) => (this.parts[key] = h("div", { className: "body" }));
    this.head = h("div", {});
    this.curves = h("div", { className: "charts" });
    this.place.append(
      this.head,
      h(
        "div",
        { className: "stack" },
        card("Curves", this.tools(), this.curves, { id: "curves" }),
        h(
          "div",
          { className: "grid two" },
          h(
            "div",
            { className: "stack" },
            card("Samples", (this.sampleTools = h("div", { className: "bar grow" })), part("samples"), { id: "samples" }),
            card("Console", [], part("console"), { id: "console" }),
          ),
          h(
            "div",
            { className: "stack" },
            card("Notes", h("span", { className: "faint small" }, "kept in JOURNAL.md"), part("notes"), { id: "notes" }),
            card("What happened", [], part("events"), { id: "events" }),
            card("Where the time goes", [], part("time"), { id: "time" }),
            card("Checks before training", [], part("preflight"), { id: "preflight" }),
            card("Checkpoints", [], part("checkpoints"), { id: "checkpoints" }),
          ),
        ),
        card("Settings", this.configTools(), part("config"), { id: "config" }),
      ),
    );
    this.parts.events.className = this.parts.checkpoints.className = this.parts.console.className = "body flush";
    this.drawHead();
    this.drawFacts();
    notes(this.parts.notes, this.name, this.about.notes);
    this.drawCurves();
    this.drawSamples();
    this.drawConsole();
  }

  drawHead() {
    const { summary: run, opens = {}, error, damaged } = this.about,
      where = encodeURIComponent(this.name);
    const crumbs = [
      h("a", { href: "/" }, "Runs"),
      run.sweep && ["›", h("a", { href: `/sweep/${encodeURIComponent(run.sweep)}` }, `sweep ${run.sweep}`)],
      run.parent && ["›", h("a", { href: runPath(run.parent) }, `from ${run.parent}`)],
    ];
    const actions = [
      opens.play && h("a", { className: "button primary", href: `/play/${where}` }, "▶ Play"),
      opens.playground && h("a", { className: "button primary", href: `/playground/${where}` }, "Playground"),
      run.parent &&
        h(
          "a",
          {
            className: "button",
            href: `/compare?${new URLSearchParams([
              ["run", run.parent],
              ["run", this.name],
            ])}`,
          },
          "Compare with parent",
        ),
      h("a", { className: "button", href: `/compare?${new URLSearchParams([["run", this.name]])}` }, "Compare…"),
    ];
    this.head.replaceChildren(
      h("div", { className: "crumbs" }, crumbs),
      h(
        "div",
        { className: "head" },
        h(
          "div",
          {},
          h("h1", {}, this.name),
          h(
            "div",
            { className: "why" },
            status(run.status),
            h("span", { className: "faint" }, "  ·  "),
            run.title,
            run.why ? h("span", {}, "  ·  ", h("i", {}, run.why)) : "",
          ),
        ),
        h("span", { className: "grow" }),
        h("div", { className: "bar" }, actions),
      ),
      ...[error, damaged].filter(Boolean).map((text) => h("div", { className: "say bad", role: "alert" }, text)),
      this.tiles(),
    );
  }

  tiles() {
    const { summary: run, time = {}, metric } = this.about;
    const left =
      run.status === "running" && run.last_step && run.step ? ((run.last_step - run.step) * run.seconds) / run.step : null;
    const share = run.last_step ? Math.min(run.step / run.last_step, 1) : null;
    const tile = (key, value, small) =>
      h(
        "div",
        { className: "tile" },
        h("div", { className: "k" }, key),
        h("div", { className: "v" }, value),
        h("div", { className: "s", title: typeof small === "string" ? small : "" }, small || ""),
      );
    const meter =
      share !== null && run.status === "running"
        ? h("div", { className: "meter", style: { marginTop: "7px" } }, h("i", { style: { width: `${100 * share}%` } }))
        : share !== null
          ? `of ${num(run.last_step)}`
          : "";
    return h(
      "div",
      { className: "tiles" },
      tile("step", num(run.step), meter),
      tile("loss", num(run.loss), "last row"),
      tile("best", num(run.best), metric || run.metric || ""),
      tile(
        left === null ? "trained for" : "time left",
        duration(left ?? run.seconds),
        left === null ? `started ${age(run.created)} ago` : `${duration(run.seconds)} so far`,
      ),
      tile("items/s", scaled(time.items_per_s), "median"),
      tile("waits for data", percent(time.wait), "of the time"),
      time.mfu ? tile("MFU", percent(time.mfu), "of the card's peak") : null,
      time.memory ? tile("memory", bytes(time.memory), "median") : null,
    );
  }

  tools() {
    const redraw = () => {
      for (const c of this.charts.values()) c.span = null;
      this.drawCurves();
    };
    return [
      h("span", { className: "grow" }),
      segments("Horizontal axis", AXES, look.axis, (axis) => {
        look.axis = axis;
        redraw();
      }),
      toggle(look, "logX", "log x", redraw),
      toggle(look, "logY", "log y", redraw),
      smoothing(look, () => this.drawCurves()),
    ];
  }

  // One chart per metric; evaluations share the chart of the loss, where the two can be compared.
  groups() {
    const keys = this.about.keys.filter((key) => !HIDDEN.has(key) && !/^lrs\./.test(key));
    const rest = keys.filter((key) => !FIRST.includes(key) && !key.includes("/"));
    const evals = keys.filter((key) => key.includes("/")),
      metric = evals[0],
      joined = metric && (metric === "eval/loss" || !keys.includes("loss"));
    const first = ["loss", ...(joined ? [metric] : [])].filter((key) => keys.includes(key));
    return [
      first,
      ...(metric && !joined ? [[metric]] : []),
      ...FIRST.slice(1)
        .filter((key) => keys.includes(key))
        .map((key) => [key]),
      ...evals.slice(1).map((key) => [key]),
      ...families(rest),
    ].filter((g) => g.length);
  }

  async drawCurves() {
    const groups = this.groups();
    if (!groups.length)
      return this.curves.replaceChildren(
        h(
          "div",
          { className: "empty wide" },
          this.about.summary.status === "running" ? "The first row is on its way." : "This run left no rows.",
        ),
      );
    this.arrange(groups);
    await Promise.all([
      this.drawSome(groups.filter((g) => !this.charts.get(g.join()).span)),
      ...groups.filter((g) => this.charts.get(g.join()).span).map((g) => this.drawSome([g])),
    ]);
  }

  // Charts are kept, added and removed in order when an evaluation or a new metric appears.
  arrange(groups) {
    for (const keys of groups) if (!this.charts.has(keys.join())) this.addChart(keys, keys === groups[0]);
    const boxes = groups.map((keys) => this.charts.get(keys.join()).box);
    if (boxes.length !== this.curves.children.length || boxes.some((box, i) => box !== this.curves.children[i]))
      this.curves.replaceChildren(...boxes);
  }

  addChart(keys, wide) {
    const el = h("div", { className: "chart loading" }, "…");
    const last = h("span", { className: "num" });
    const chart = new Chart(el, { zoom: () => this.drawSome([keys]) });
    chart.box = h(
      "div",
      { className: wide ? "wide" : "", "data-keys": keys.join() },
      h("div", { className: "chart-title" }, h("b", {}, titleOf(keys)), last),
      el,
    );
    Object.assign(chart, { last, wide });
    this.charts.set(keys.join(), chart);
  }

  async drawSome(groups) {
    if (!groups.length) return;
    const span = this.charts.get(groups[0].join()).span;
    const asked = new URLSearchParams([
      ["x", look.axis],
      ["smooth", look.smooth],
      ["points", 700],
      ...groups.flat().map((key) => ["key", key]),
    ]);
    if (span) {
      const back = look.logX ? span.map((v) => 10 ** v) : span;
      asked.set("low", back[0]);
      asked.set("high", back[1]);
    }
    const found = await get(apiPath(this.name, `/series?${asked}`));
    await Promise.all(groups.map((keys) => this.drawOne(keys, found)));
  }

  async drawOne(keys, found) {
    const chart = this.charts.get(keys.join());
    const family = keys.length > 2,
      ys = found[keys[0]].raw.y;
    const all = keys.flatMap((key, i) => curves(found[key], key, key.includes("/") ? 1 : i, { points: key.includes("/") }));
    const traces = family ? all.filter((t) => t.opacity === 1 || t.opacity === undefined) : all;
    chart.last.textContent = family ? "" : (UNITS[keys[0]] || num)(ys.at(-1));
    const shapes = chart.wide ? this.marks() : [];
    const log = look.logY && !["lr", "wait", "mfu", "memory"].includes(keys[0]);
    const hover = chart.wide ? this.markHovers(found[keys[0]].raw) : [];
    const extra = {
      shapes,
      uirevision: `${look.axis}${look.logX}${look.logY}`,
      showlegend: keys.length === 2,
      legend: { x: 1, xanchor: "right", y: 1, bgcolor: "rgba(0,0,0,0)" },
      xaxis: {
        title: chart.wide ? { text: TITLES[look.axis], font: { size: 11 }, standoff: 4 } : undefined,
        type: look.logX ? "log" : "linear",
      },
      yaxis: {
        type: log ? "log" : "linear",
        ...(keys[0] === "wait" || keys[0] === "mfu" ? { tickformat: "~%", rangemode: "tozero" } : {}),
        ...(keys[0] === "items_per_s" ? { rangemode: "tozero", tickformat: "~s" } : {}),
        ...(keys[0] === "memory" ? { tickformat: ".3~s", rangemode: "tozero" } : {}),
      },
    };
    await chart.draw([...traces.map((t) => ({ ...t, showlegend: keys.length === 2 && t.opacity !== 0.34 })), ...hover], extra);
  }

  marked() {
    const marked = this.about.events.filter((e) => e.severity !== "info").slice(-60);
    return marked.map((e) => ({ ...e, x: e.at[look.axis] })).filter((e) => typeof e.x === "number");
  }

  marks() {
    return this.marked().map((e) => ({
      type: "line",
      x0: e.x,
      x1: e.x,
      y0: 0,
      y1: 1,
      yref: "paper",
      line: { color: colour(isAlarm(e) ? "fire" : "faint"), width: 1, dash: "dot" },
    }));
  }

  markHovers(raw) {
    const marked = this.marked();
    if (!marked.length || !raw.y.length) return [];
    const top = Math.max(...raw.y.filter((v) => v !== null));
    return [
      {
        type: "scatter",
        mode: "markers",
        x: marked.map((e) => e.x),
        y: marked.map(() => top),
        text: marked.map((e) => escapeHover(`${e.kind} at ${e.step}: ${e.what}`.slice(0, 110))),
        hovertemplate: "%{text}<extra></extra>",
        marker: { symbol: "triangle-down", size: 9, color: marked.map((e) => colour(isAlarm(e) ? "fire" : "faint")) },
        showlegend: false,
        name: "events",
      },
    ];
  }

  async drawSamples() {
    const place = this.parts.samples;
    const found = await get(apiPath(this.name, "/samples")).catch(() => []);
    if (!found.length) {
      this.sampleTools.replaceChildren();
      return place.replaceChildren(
        h(
          "div",
          { className: "empty" },
          "No samples yet. ",
          h("code", {}, "every.sample"),
          " says how often a run shows what it can do.",
        ),
      );
    }
    const follow = this.sampleAt === undefined || this.sampleAt >= (this.numSamples ?? 0) - 1;
    this.numSamples = found.length;
    if (follow) this.sampleAt = found.length - 1;
    const slider = h("input", {
      type: "range",
      min: 0,
      max: found.length - 1,
      value: this.sampleAt,
      ariaLabel: "Sample",
      className: "grow",
      oninput: () => {
        this.sampleAt = Number(slider.value);
        show();
      },
    });
    const label = h("span", { className: "num soft" });
    const show = () => {
      const one = found[this.sampleAt];
      label.textContent = `step ${num(one.step)} · ${this.sampleAt + 1} of ${found.length}`;
      const files = one.files.map((src) =>
        /\.(mp4|webm)$/i.test(src)
          ? h("video", { src, controls: true, loop: true, muted: true })
          : /\.(png|jpe?g|gif|webp)$/i.test(src)
            ? h("img", { src, alt: `sample at step ${one.step}`, loading: "lazy", onclick: () => enlarge(src) })
            : h("a", { href: src, target: "_blank" }, src.split("/").at(-1)),
      );
      place.replaceChildren(
        ...(files.length ? [h("div", { className: "pictures" }, files)] : []),
        ...(one.text ? [h("pre", { className: "sample-text", tabIndex: 0 }, one.text)] : []),
      );
    };
    this.sampleTools.replaceChildren(...(found.length > 1 ? [slider] : [h("span", { className: "grow" })]), label);
    show();
  }

  async drawConsole() {
    const { text, cut } = await get(apiPath(this.name, "/console")).catch(() => ({ text: "" }));
    const place = this.parts.console,
      old = place.querySelector("pre");
    const below = !old || old.scrollHeight - old.scrollTop - old.clientHeight < 30;
    if (!text) return place.replaceChildren(h("div", { className: "empty" }, "No console output yet."));
    const pre = h("pre", { className: "console", tabIndex: 0 }, (cut ? "…\n" : "") + text);
    place.replaceChildren(pre);
    pre.scrollTop = below ? pre.scrollHeight : old.scrollTop;
  }

  drawFacts() {
    const { events = [], time = {}, preflight = {}, checkpoints = [], verdict, metric } = this.about;
    this.parts.events.replaceChildren(
      events.length
        ? h(
            "div",
            { className: "scroll tall" },
            h(
              "ul",
              { className: "events" },
              [...events]
                .reverse()
                .map((e) =>
                  h(
                    "li",
                    { className: isAlarm(e) ? "alarm" : "" },
                    h("span", { className: "num soft" }, num(e.step)),
                    h("span", { className: "kind" }, e.kind),
                    h("span", { className: "what" }, e.what),
                  ),
                ),
            ),
          )
        : h("div", { className: "empty" }, "Nothing out of the ordinary."),
    );
    this.parts.time.replaceChildren(...timeUse(time, verdict));
    this.parts.preflight.replaceChildren(...checks(preflight));
    this.parts.checkpoints.replaceChildren(checkpointTable(checkpoints, metric));
    this.drawConfig();
  }

  configTools() {
    this.onlyMoved = h("input", { type: "checkbox", onchange: () => this.drawConfig() });
    this.configSearch = h("input", {
      type: "search",
      placeholder: "key or value",
      ariaLabel: "Search settings",
      oninput: () => this.drawConfig(),
    });
    return [
      h("span", { className: "grow" }),
      h("label", { className: "bar small soft" }, this.onlyMoved, "only what differs"),
      this.configSearch,
    ];
  }

  drawConfig() {
    const { config = [], summary: run, children = [], command: repeat, code, version, hash, folder } = this.about;
    const text = this.configSearch.value.toLowerCase(),
      moved = config.filter((c) => c.parent !== null).length;
    const shown = config.filter(
      (c) => (!this.onlyMoved.checked || c.changed || c.parent !== null) && `${c.key} ${c.value}`.toLowerCase().includes(text),
    );
    const rows = shown.map((c) =>
      h(
        "div",
        { className: c.parent !== null ? "moved" : "" },
        h("dt", {}, c.key),
        h(
          "dd",
          {},
          c.parent !== null ? h("span", { className: "was", title: `in ${run.parent}` }, c.parent) : null,
          c.value,
          c.changed ? h("span", { className: "mark", title: "changed against the preset" }, " *") : null,
        ),
      ),
    );
    const facts = [
      ["reproduce", repeat && command(repeat)],
      ["code", code],
      ["config", hash && `hash ${hash}, seedbed ${version ?? "unknown"}`],
      ["folder", folder && h("code", {}, folder)],
      ["children", children.length ? children.map((c) => [h("a", { href: runPath(c) }, c), " "]) : null],
    ].filter(([, v]) => v);
    this.parts.config.replaceChildren(
      h(
        "dl",
        { className: "facts", style: { marginBottom: "14px", alignItems: "center" } },
        facts.flatMap(([k, v]) => [h("dt", {}, k), h("dd", {}, v)]),
      ),
      h(
        "p",
        { className: "small soft", style: { margin: "0 0 8px" } },
        h("b", { className: "mark" }, "*"),
        " changed against the preset",
        run.parent ? `; ${moved} ${moved === 1 ? "differs" : "differ"} from the parent ${run.parent}` : "",
      ),
      shown.length ? h("dl", { className: "settings" }, rows) : h("div", { className: "empty" }, "No setting matches."),
    );
  }
}
