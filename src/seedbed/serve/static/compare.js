// Comparison of runs: overlaid curves, final values with their noise, and settings that differ.

import { go } from "./app.js";
import { Chart, curves, palette } from "./chart.js";
import { apiPath, card, duration, get, h, num, runPath, s, scaled, segments, smoothing, status, toggle } from "./dom.js";
import { watch } from "./live.js";

const AXES = [
  ["step", "Steps"],
  ["seconds", "Time"],
  ["items", "Items"],
];
const look = { axis: "step", smooth: 0.8, log: false, key: "loss" };

export async function open(place, _, query) {
  document.title = "Compare · seedbed";
  const names = [...new Set(query.getAll("run"))],
    { runs } = await get("/api/runs");
  const page = new Compare(
    place,
    names,
    runs.map((run) => run.name),
  );
  await page.build();
  const stop = names.length ? watch({ runs: names }, () => page.refresh()) : () => {};
  const redraw = () => page.drawCurves();
  addEventListener("theme", redraw);
  return () => {
    stop();
    removeEventListener("theme", redraw);
  };
}

const address = (names) => `/compare?${new URLSearchParams(names.map((name) => ["run", name]))}`;

class Compare {
  constructor(place, names, known) {
    Object.assign(this, { place, names, known, hidden: new Set() });
  }

  async build() {
    const choices = h(
      "datalist",
      { id: "all-runs" },
      this.known.filter((n) => !this.names.includes(n)).map((value) => h("option", { value })),
    );
    const add = () => {
      if (this.known.includes(field.value) && !this.names.includes(field.value)) go(address([...this.names, field.value]));
    };
    const field = h("input", {
      type: "search",
      placeholder: "Add a run…",
      ariaLabel: "Add a run",
      list: "all-runs",
      onchange: add,
      style: { width: "260px" },
    });
    this.place.append(
      h(
        "div",
        { className: "bar", style: { marginBottom: "14px" } },
        h("h1", {}, "Compare"),
        h("span", { className: "grow" }),
        field,
        choices,
      ),
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
    this.chart = new Chart(h("div", { className: "chart loading", style: { height: "420px" } }, "…"), {
      zoom: () => this.drawCurves(),
    });
    this.levels = h("div", { className: "body flush" });
    this.settings = h("div", { className: "body flush" });
    this.keys = h("select", {
      ariaLabel: "Measurement",
      onchange: () => {
        look.key = this.keys.value;
        this.drawCurves();
      },
    });
    this.place.append(
      h(
        "div",
        { className: "stack" },
        card("Curves", this.tools(), h("div", { className: "body" }, this.chart.el)),
        card("Results", h("span", { className: "faint small" }, `against ${this.names[0]}; lower is better`), this.levels),
        card("Settings that differ", (this.equal = h("span", { className: "faint small" })), this.settings),
      ),
    );
    await this.refresh();
  }

  tools() {
    return [
      h("span", { className: "grow" }),
      this.keys,
      segments("Horizontal axis", AXES, look.axis, (axis) => {
        look.axis = axis;
        this.chart.span = null;
        this.drawCurves();
      }),
      toggle(look, "log", "log y", () => this.drawCurves()),
      smoothing(look, () => this.drawCurves()),
    ];
  }

  async refresh() {
    if (this.busy) return;
    this.busy = true;
    try {
      this.found = await get(`/api/compare?${new URLSearchParams(this.names.map((name) => ["run", name]))}`);
      if (!this.found.keys.includes(look.key)) look.key = this.found.keys[0];
      this.keys.replaceChildren(...this.found.keys.map((key) => h("option", { value: key, selected: key === look.key }, key)));
      this.drawLevels();
      this.drawSettings();
      await this.drawCurves();
    } finally {
      this.busy = false;
    }
  }

  async drawCurves() {
    if (!this.chart || !look.key) return;
    const asked = new URLSearchParams({ x: look.axis, smooth: look.smooth, points: 600, key: look.key });
    if (this.chart.span) {
      asked.set("low", this.chart.span[0]);
      asked.set("high", this.chart.span[1]);
    }
    const found = await Promise.all(this.names.map((name) => get(apiPath(name, `/series?${asked}`)).catch(() => null)));
    const traces = found.flatMap((one, i) =>
      one
        ? curves(one[look.key], this.names[i], i, { points: look.key.includes("/"), show: !this.hidden.has(this.names[i]) })
        : [],
    );
    await this.chart.draw(traces, { uirevision: look.axis + look.key + look.log, yaxis: { type: look.log ? "log" : "linear" } });
  }

  drawLevels() {
    const scale = Math.max(
      ...this.found.runs.slice(1).map(({ delta: d }) => Math.max(Math.abs(d.change || 0), d.band || 0)),
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
              checked: !this.hidden.has(run.name),
              ariaLabel: `Show ${run.name}`,
              onchange: () => {
                this.hidden[this.hidden.has(run.name) ? "delete" : "add"](run.name);
                this.drawCurves();
              },
            }),
            h("i", { className: "swatch", style: { background: palette(i), margin: 0 } }),
            h("a", { href: runPath(run.name) }, run.name),
          ),
          run.why ? h("div", { className: "small soft" }, run.why) : null,
        ),
        h("td", {}, status(run.status)),
        h("td", { className: "right num" }, num(run.step)),
        h("td", { className: "right num" }, num(run.loss), h("span", { className: "faint" }, ` ± ${num(run.sd)}`)),
        h("td", { className: "right num", title: run.metric || "" }, num(run.best)),
        h("td", {}, run.delta ? delta(run.delta, scale) : h("span", { className: "faint small" }, "the yardstick")),
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
              onclick: () => go(address(this.names.filter((n) => n !== run.name))),
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

// The difference as a dot against the noise band around zero.
function delta({ by, change, band, word }, scale) {
  const at = (v) => 60 + (52 * Math.max(-scale, Math.min(scale, v))) / scale;
  const tone = { better: "good", worse: "bad" }[word] || "",
    ink = { better: "var(--leaf)", worse: "var(--fire)" }[word] || "var(--soft)";
  const picture = s(
    "svg",
    { viewBox: "0 0 120 16", role: "img", "aria-label": `${num(change)} with a noise band of ${num(band)}` },
    band
      ? s("rect", { x: at(-band), y: 2, width: Math.max(at(band) - at(-band), 1), height: 12, rx: 3, fill: "var(--line)" })
      : null,
    s("line", { x1: 60, x2: 60, y1: 0, y2: 16, stroke: "var(--faint)" }),
    typeof change === "number" ? s("circle", { cx: at(change), cy: 8, r: 4, fill: ink }) : null,
  );
  const label = { better: "better", worse: "worse", same: "within noise", unknown: "noise unknown" }[word];
  return h(
    "span",
    { className: "delta", title: `${by}: ${num(change)}, noise band ±${num(band)}` },
    h("span", { className: "band" }, picture),
    h("span", { className: "num" }, `${change > 0 ? "+" : ""}${num(change)}`),
    h("span", { className: `tag ${tone}` }, label),
  );
}
