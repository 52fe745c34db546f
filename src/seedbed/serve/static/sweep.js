// A sweep: progress, the heat map of its settings, what each setting explains, parallel coordinates of its trials, and the best.

import { go } from "./app.js";
import { colour, escapeHover, layout, picture, plotly, SETTINGS } from "./chart.js";
import { card, command, get, h, num, percent, runPath, s, scaled, status } from "./dom.js";
import { downloads, drawn } from "./download.js";
import { watch } from "./live.js";
import { notes } from "./notes.js";

const INK = {
  __proto__: null,
  done: "var(--leaf)",
  "stopped early": "var(--water)",
  running: "var(--sun)",
  waiting: "var(--line)",
  failed: "var(--fire)",
  nan: "var(--fire)",
  diverged: "var(--fire)",
};

export async function open(place, name) {
  document.title = `${name} · seedbed`;
  const page = new SweepPage(place, name, await get(`/api/sweeps/${encodeURIComponent(name)}`));
  page.build();
  const stop = watch({ list: true, version: Number.MAX_SAFE_INTEGER }, () => {});
  const clock = setInterval(() => page.refresh(), 4000);
  const redraw = () => page.draw();
  addEventListener("theme", redraw);
  return () => {
    stop();
    clearInterval(clock);
    removeEventListener("theme", redraw);
  };
}

const short = (value) =>
  Array.isArray(value)
    ? value.join(",")
    : typeof value === "number" && !Number.isInteger(value)
      ? String(Number(value.toPrecision(4)))
      : String(value);

class SweepPage {
  constructor(place, name, found) {
    Object.assign(this, { place, name, found });
  }

  async refresh() {
    const { counts } = this.found;
    if (!counts.running && !counts.waiting) return;
    const found = await get(`/api/sweeps/${encodeURIComponent(this.name)}`).catch(() => null);
    if (!found || JSON.stringify(found) === JSON.stringify(this.found)) return;
    this.found = found;
    this.draw();
  }

  build() {
    this.head = h("div", {});
    this.map = h("div", { className: "heat loading" }, "…");
    this.mapTools = h("div", { className: "bar grow", style: { justifyContent: "flex-end" } });
    const named = (what) => `${this.name} ${what}`;
    const mapFiles = downloads(named("map"), { picture: (format, title) => picture(this.map, format, title), rows: () => this.mapRows });
    this.mapCard = card("Map", [this.mapTools, mapFiles], h("div", { className: "body" }, this.map));
    this.lines = h("div", { className: "body" });
    const lineFiles = downloads(named("trials"), {
      picture: (format) => drawn(this.lines.querySelector("svg"), format, colour("card")),
      rows: () => this.trialRows(),
    });
    this.shares = h("div", { className: "loading" }, "…");
    this.sharesNote = h("p", { className: "small soft", style: { margin: "0 16px 12px" } });
    const shareFiles = downloads(named("importance"), {
      picture: (format, title) => picture(this.shares, format, title),
      rows: () => [["setting", "share", "error"], ...this.found.importance.map((one) => [one.key, one.share, one.error])],
    });
    this.bestPlace = h("div", { className: "body flush" });
    this.trials = h("div", { className: "body flush" });
    const notePlace = h("div", { className: "body" });
    this.place.append(
      this.head,
      h(
        "div",
        { className: "stack" },
        h(
          "div",
          { className: "grid two" },
          h(
            "div",
            { className: "stack" },
            this.mapCard,
            card(
              "Every trial through its settings",
              [h("span", { className: "faint small" }, "one line per trial; click opens it"), lineFiles],
              this.lines,
            ),
          ),
          h(
            "div",
            { className: "stack" },
            card("Best settings", [], this.bestPlace),
            card("What matters", shareFiles, h("div", {}, h("div", { className: "body" }, this.shares), this.sharesNote)),
            card("Notes", h("span", { className: "faint small" }, "kept in JOURNAL.md"), notePlace),
          ),
        ),
        card("Trials", [], this.trials),
      ),
    );
    notes(notePlace, this.name, this.found.notes_of);
    this.draw();
  }

  axes() {
    const seen = { __proto__: null };
    for (const { settings } of this.found.trials)
      for (const [key, value] of Object.entries(settings)) (seen[key] ||= new Map()).set(short(value), value);
    // In the order of the grid, as in heatmap.png; values that were suggested are sorted.
    const given = new Map(Object.entries(this.found.axes || {}).map(([key, values]) => [key, values.map(short)]));
    const entries = Object.entries(seen).map(([key, values]) => [
      key,
      [...values.values()].sort((a, b) =>
        given.has(key)
          ? given.get(key).indexOf(short(a)) - given.get(key).indexOf(short(b))
          : typeof a === "number" && typeof b === "number"
            ? a - b
            : String(a) < String(b)
              ? -1
              : 1,
      ),
    ]);
    return entries.filter(([key, values]) => key !== "seed" && values.length > 1);
  }

  draw() {
    const { title, why, counts, trials, best, metric, notes: remarks } = this.found,
      total = trials.length;
    const states = Object.entries(counts).sort((a, b) => b[1] - a[1]);
    this.head.replaceChildren(
      h("div", { className: "crumbs" }, h("a", { href: "/" }, "Runs"), h("span", {}, "› sweep")),
      h(
        "div",
        { className: "head" },
        h(
          "div",
          {},
          h("h1", {}, this.name),
          h("div", { className: "why" }, title, why ? h("span", {}, "  ·  ", h("i", {}, why)) : ""),
        ),
      ),
      h(
        "div",
        { className: "card body", style: { padding: "14px 16px", marginBottom: "16px" } },
        h(
          "div",
          { className: "states", role: "img", ariaLabel: states.map(([k, n]) => `${n} ${k}`).join(", ") },
          states.map(([k, n]) => h("i", { style: { flex: n / total, background: INK[k] || "var(--faint)" } })),
        ),
        h(
          "div",
          { className: "key", style: { margin: "8px 0 12px" } },
          states.map(([k, n]) => h("span", {}, h("i", { style: { background: INK[k] || "var(--faint)" } }), `${n} ${k}`)),
        ),
        ...remarks.map((text) => h("p", { style: { margin: "0 0 10px" } }, text)),
        h("div", { className: "small soft" }, best ? "the best trial again" : "the sweep again"),
        command(best?.command || this.found.command),
      ),
    );
    this.drawMap();
    this.drawShares();
    this.drawLines();
    this.drawBest(metric);
    this.drawTrials(metric);
  }

  async drawMap() {
    const axes = this.axes();
    if (!axes.length) return this.map.replaceChildren("Nothing varies but the seed.");
    const byLength = [...axes].sort((a, b) => b[1].length - a[1].length);
    this.across ??= byLength[0][0];
    this.down ??= byLength[1]?.[0];
    this.fixed ??= { __proto__: null };
    const pick = (label, value, choose) =>
      h(
        "label",
        { className: "bar small soft" },
        label,
        h(
          "select",
          {
            onchange: (e) => {
              choose(e.target.value);
              this.drawMap();
            },
          },
          axes.map(([key]) => h("option", { value: key, selected: key === value }, key)),
        ),
      );
    const others = axes.filter(([key]) => key !== this.across && key !== this.down);
    this.mapTools.replaceChildren(
      ...(axes.length > 1
        ? [
            pick("across", this.across, (v) => {
              if (v === this.down) this.down = this.across;
              this.across = v;
            }),
            pick("down", this.down, (v) => {
              if (v === this.across) this.across = this.down;
              this.down = v;
            }),
          ]
        : []),
      ...others.map(([key, values]) =>
        h(
          "label",
          { className: "bar small soft" },
          key,
          h(
            "select",
            {
              onchange: (e) => {
                this.fixed[key] = e.target.value;
                this.drawMap();
              },
            },
            h("option", { value: "" }, "mean"),
            values.map((v) => h("option", { value: short(v), selected: this.fixed[key] === short(v) }, short(v))),
          ),
        ),
      ),
    );
    const xs = axes.find(([key]) => key === this.across)[1],
      ys = axes.find(([key]) => key === this.down)?.[1] || [null];
    const cell = (x, y) => {
      const inside = this.found.cells.filter(
        (c) =>
          short(c.settings[this.across]) === short(x) &&
          (y === null || short(c.settings[this.down]) === short(y)) &&
          others.every(([key]) => !this.fixed[key] || short(c.settings[key]) === this.fixed[key]),
      );
      // Over all seeds that ended, as in heatmap.png.
      const known = inside.filter((c) => typeof c.mean === "number"),
        num_ended = known.reduce((sum, c) => sum + c.num_ended, 0);
      return {
        value: num_ended ? known.reduce((sum, c) => sum + c.mean * c.num_ended, 0) / num_ended : null,
        spoiled: inside.some((c) => c.num_spoiled),
        sd: inside.length === 1 ? inside[0].sd : null,
      };
    };
    const grid = ys.map((y) => xs.map((x) => cell(x, y)));
    const text = grid.map((row) =>
      row.map((c) =>
        c.value === null
          ? c.spoiled
            ? "diverged"
            : ""
          : num(c.value, 3) + (c.sd ? `<br>±${num(c.sd, 3)}` : "") + (c.spoiled ? " !" : ""),
      ),
    );
    const scale = [
      [0, "#fde725"],
      [0.25, "#5ec962"],
      [0.5, "#21918c"],
      [0.75, "#3b528b"],
      [1, "#440154"],
    ];
    const trace = {
      type: "heatmap",
      z: grid.map((row) => row.map((c) => c.value)),
      x: xs.map(short),
      y: ys.map((y) => (y === null ? "" : short(y))),
      text,
      texttemplate: "%{text}",
      colorscale: scale,
      reversescale: !this.isLowBetter(),
      xgap: 2,
      ygap: 2,
      hovertemplate: `${escapeHover(`${this.across}=`)}%{x} ${this.down ? escapeHover(`${this.down}=`) : ""}%{y}<br>${escapeHover(this.found.metric)} %{z:.5g}<extra></extra>`,
      colorbar: { thickness: 10, outlinewidth: 0, tickfont: { size: 11 } },
    };
    this.mapRows = [
      [this.across, this.down || "", this.found.metric, "sd"],
      ...ys.flatMap((y, i) => xs.map((x, j) => [short(x), y === null ? "" : short(y), grid[i][j].value, grid[i][j].sd])),
    ];
    const Plotly = await plotly();
    if (!this.map.isConnected) return;
    if (!this.map.classList.contains("js-plotly-plot")) this.map.replaceChildren();
    this.map.classList.remove("loading");
    this.map.style.height = `${Math.min(Math.max(130 + 62 * ys.length, 230), 560)}px`;
    await Plotly.react(
      this.map,
      [trace],
      layout({
        dragmode: false,
        margin: { l: 70, r: 10, t: 10, b: 48 },
        xaxis: { type: "category", title: { text: this.across, font: { size: 12 } } },
        // The first value on top, as in heatmap.png.
        yaxis: { type: "category", autorange: "reversed", title: { text: this.down || "", font: { size: 12 } }, showgrid: false },
      }),
      SETTINGS,
    );
  }

  isLowBetter() {
    return !this.found.higher_is_better;
  }

  // The share of the variance that each setting explains, largest on top, with twice its standard error.
  async drawShares() {
    const found = this.found.importance || [];
    this.shares.classList.remove("loading");
    this.sharesNote.textContent = found.length
      ? "Share of the variance of the results that a setting explains alone, less what chance would; the line is twice its standard error. What remains is noise and settings acting together. Diverged trials do not count."
      : "";
    if (!found.length)
      return this.shares.replaceChildren(
        h("div", { className: "empty" }, "Known once more trials have ended than there are values to tell apart."),
      );
    const Plotly = await plotly();
    if (!this.shares.isConnected) return;
    if (!this.shares.classList.contains("js-plotly-plot")) this.shares.replaceChildren();
    this.shares.style.height = `${56 + 30 * found.length}px`;
    const line = { color: colour("ink"), thickness: 1.4, width: 4 };
    const trace = {
      type: "bar",
      orientation: "h",
      x: found.map((one) => one.share),
      y: found.map((one) => escapeHover(one.key)),
      marker: { color: colour("leaf") },
      error_x: {
        ...line,
        type: "data",
        symmetric: false,
        array: found.map((one) => Math.min(2 * one.error, 1 - one.share)),
        arrayminus: found.map((one) => Math.min(2 * one.error, one.share)),
      },
      hovertemplate: found.map((one) => `${escapeHover(one.key)}: ${percent(one.share, 0)} ± ${percent(2 * one.error, 0)}<extra></extra>`),
    };
    const axes = { xaxis: { range: [0, 1], tickformat: "~%", showgrid: true }, yaxis: { type: "category", autorange: "reversed", showgrid: false } };
    await Plotly.react(this.shares, [trace], layout({ dragmode: false, margin: { l: 80, r: 16, t: 4, b: 28 }, ...axes }), SETTINGS);
  }

  trialRows() {
    const { trials, metric } = this.found,
      keys = [...new Set(trials.flatMap((t) => Object.keys(t.settings)))];
    return [
      ["trial", ...keys, "state", metric, "step", "loss"],
      ...trials.map((t) => [t.run, ...keys.map((k) => short(t.settings[k])), t.state, t.best, t.step, t.loss]),
    ];
  }

  drawLines() {
    const ascending = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : 0);
    const axes = this.axes().map(([key, values]) => [key, values.toSorted(ascending)]),
      ended = this.found.trials.filter((t) => typeof t.best === "number");
    if (!ended.length || !axes.length)
      return this.lines.replaceChildren(h("div", { className: "empty" }, "Lines appear with the first evaluation."));
    const width = Math.max(this.lines.clientWidth - 32, 320),
      height = 300,
      top = 34,
      bottom = height - 30,
      columns = axes.length + 1;
    const x = (i) => 60 + (i * (width - 130)) / Math.max(columns - 1, 1);
    // From the best to the worst; the worst twentieth shares its colour and place.
    const sign = this.isLowBetter() ? 1 : -1,
      values = ended.map((t) => t.best).sort((a, b) => sign * (a - b)),
      low = values[0],
      high = values[Math.max(Math.ceil(values.length * 0.95) - 1, 0)] ?? low;
    const share = (v) => (high !== low ? Math.min((v - low) / (high - low), 1) : 0);
    const place = (list, v) =>
      bottom - ((bottom - top) * list.findIndex((one) => short(one) === short(v))) / Math.max(list.length - 1, 1);
    const ink = (v) => `color-mix(in oklch, var(--leaf) ${Math.round(100 * (1 - share(v)))}%, var(--plum))`;
    const paths = [...ended]
      .sort((a, b) => sign * (b.best - a.best))
      .map((t) => {
        const points = [
          ...axes.map(([key, list], i) => [x(i), place(list, t.settings[key])]),
          [x(columns - 1), bottom - (bottom - top) * (1 - share(t.best))],
        ];
        const d = points
          .map(([px, py], i) =>
            i
              ? `C${(points[i - 1][0] + px) / 2} ${points[i - 1][1]} ${(points[i - 1][0] + px) / 2} ${py} ${px} ${py}`
              : `M${px} ${py}`,
          )
          .join("");
        const tooltip = `${t.run}: ${Object.entries(t.settings)
          .map(([k, v]) => `${k}=${short(v)}`)
          .join(" ")} → ${num(t.best)}`;
        return s(
          "path",
          {
            d,
            stroke: ink(t.best),
            tabindex: 0,
            role: "link",
            "aria-label": tooltip,
            onclick: () => go(runPath(t.run)),
            onkeydown: (e) => e.key === "Enter" && go(runPath(t.run)),
          },
          s("title", {}, tooltip),
        );
      });
    const rulers = axes.flatMap(([key, list], i) => [
      s("line", { x1: x(i), x2: x(i), y1: top, y2: bottom }),
      s("text", { x: x(i), y: 16, "text-anchor": "middle", class: "title" }, key),
      ...list
        .filter((_, n) => list.length < 12 || n % Math.ceil(list.length / 11) === 0)
        .map((v) => s("text", { x: x(i) - 7, y: place(list, v) + 4, "text-anchor": "end" }, short(v))),
    ]);
    const last = x(columns - 1);
    rulers.push(
      s("line", { x1: last, x2: last, y1: top, y2: bottom }),
      s("text", { x: last, y: 16, "text-anchor": "middle", class: "title" }, this.found.metric),
      s("text", { x: last + 7, y: bottom + 4 - (bottom - top) }, num(low)),
      s("text", { x: last + 7, y: bottom + 4 }, (values.at(-1) !== high ? (sign > 0 ? "≥ " : "≤ ") : "") + num(high)),
    );
    this.lines.replaceChildren(
      s(
        "svg",
        { class: "parallel", viewBox: `0 0 ${width} ${height}`, style: { height: `${height}px` } },
        rulers.filter((one) => one.tagName === "line"),
        paths,
        rulers.filter((one) => one.tagName === "text"),
      ),
    );
  }

  drawBest(metric) {
    const cells = this.found.cells.filter((c) => c.mean !== null).slice(0, 10),
      keys = [...new Set(cells.flatMap((c) => Object.keys(c.settings)))];
    if (!cells.length) return this.bestPlace.replaceChildren(h("div", { className: "empty" }, "Nothing has come to an end yet."));
    const rows = cells.map((c, i) =>
      h(
        "tr",
        {},
        h("td", { className: "num faint" }, i + 1),
        keys.map((k) => h("td", { className: "mono" }, short(c.settings[k]))),
        h(
          "td",
          { className: "right num" },
          num(c.mean),
          c.sd !== null ? h("span", { className: "faint" }, ` ± ${num(c.sd)}`) : null,
        ),
        h("td", { className: "right num soft" }, `${c.num_ended}/${c.num_seeds}`),
      ),
    );
    this.bestPlace.replaceChildren(
      h(
        "div",
        { className: "scroll tall" },
        h(
          "table",
          {},
          h(
            "thead",
            {},
            h(
              "tr",
              {},
              h("th", {}, ""),
              keys.map((k) => h("th", {}, k)),
              h("th", { className: "right" }, metric),
              h("th", { className: "right" }, "seeds"),
            ),
          ),
          h("tbody", {}, rows),
        ),
      ),
    );
  }

  drawTrials(metric) {
    const keys = [...new Set(this.found.trials.flatMap((t) => Object.keys(t.settings)))];
    const rows = this.found.trials.map((t) =>
      h(
        "tr",
        {},
        h("td", {}, h("a", { href: runPath(t.run) }, String(t.trial).padStart(4, "0"))),
        keys.map((k) => h("td", { className: "mono" }, short(t.settings[k]))),
        h("td", {}, status(t.state)),
        h("td", { className: "right num" }, num(t.step)),
        h("td", { className: "right num" }, num(t.loss)),
        h("td", { className: "right num" }, num(t.best)),
        h("td", { className: "right num" }, scaled(t.rate)),
        h("td", { className: "small soft" }, t.error || ""),
      ),
    );
    this.trials.replaceChildren(
      h(
        "div",
        { className: "scroll tall" },
        h(
          "table",
          {},
          h(
            "thead",
            {},
            h(
              "tr",
              {},
              h("th", {}, "trial"),
              keys.map((k) => h("th", {}, k)),
              h("th", {}, "state"),
              ["step", "train loss", `best ${metric}`, "items/s"].map((t) => h("th", { className: "right" }, t)),
              h("th", {}, ""),
            ),
          ),
          h("tbody", {}, rows),
        ),
      ),
    );
  }
}
