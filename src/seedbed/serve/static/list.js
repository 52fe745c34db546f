// The list of runs: live, sorted, filtered, searched, grouped by sweep or by parent.

import { go } from "./app.js";
import { age, get, h, num, runPath, scaled, spark, status, tone } from "./dom.js";
import { watch } from "./live.js";

const STATES = ["running", "done", "interrupted", "failed", "nan", "diverged", "damaged"];
const COLUMNS = [
  ["name", "Run", ""],
  ["status", "Status", "c-status"],
  ["title", "Recipe", "c-recipe"],
  ["step", "Step", "c-step"],
  ["loss", "Loss", "c-num right"],
  ["best", "Best", "c-best right"],
  ["", "Curve", "c-spark"],
  ["rate", "Items/s", "c-num c-rate right"],
  ["created", "Age", "c-age right"],
];
// The selection is kept while a run is opened.
const view = {
  text: "",
  states: new Set(),
  recipe: "",
  group: "sweep",
  sort: "created",
  down: true,
  open: new Set(),
  chosen: new Set(),
};

export async function open(place) {
  document.title = "Runs · seedbed";
  const found = await get("/api/runs");
  const page = new List(place, found);
  page.draw();
  const stop = watch({ list: true, version: found.version }, (news) => page.hear(news));
  const keys = (event) => page.key(event);
  addEventListener("keydown", keys);
  const clock = setInterval(() => page.ages(), 30000);
  return () => {
    stop();
    clearInterval(clock);
    removeEventListener("keydown", keys);
    page.tray.remove();
  };
}

class List {
  constructor(place, found) {
    this.runs = new Map(found.runs.map((run) => [run.name, run]));
    this.sweeps = new Set(found.sweeps);
    this.root = found.root;
    this.place = place;
    this.rows = new Map();
    this.here = null;
    this.tray = h("div", { className: "tray", hidden: true });
    document.body.append(this.tray);
    this.build();
  }

  build() {
    this.search = h("input", {
      type: "search",
      placeholder: "Search name, why, recipe…",
      ariaLabel: "Search runs",
      value: view.text,
      style: { width: "260px" },
      oninput: () => {
        view.text = this.search.value;
        this.draw();
      },
    });
    this.chips = h("div", { className: "bar", role: "group", ariaLabel: "Filter by status" });
    this.recipe = h("select", {
      ariaLabel: "Recipe",
      onchange: () => {
        view.recipe = this.recipe.value;
        this.draw();
      },
    });
    this.group = h(
      "select",
      {
        ariaLabel: "Group",
        onchange: () => {
          view.group = this.group.value;
          this.draw();
        },
      },
      [
        ["sweep", "Group sweeps"],
        ["parent", "Group by parent"],
        ["", "No groups"],
      ].map(([value, text]) => h("option", { value, selected: value === view.group }, text)),
    );
    this.head = h("tr", {});
    this.body = h("tbody", {});
    const table = h("table", { className: "runs" }, h("thead", {}, this.head), this.body);
    this.table = h("div", { className: "card" }, table);
    this.toolbar = h(
      "div",
      { className: "bar", style: { marginBottom: "14px" } },
      h("h1", {}, "Runs"),
      this.chips,
      h("span", { className: "grow" }),
      this.search,
      this.recipe,
      this.group,
    );
    this.place.append(this.toolbar, this.table);
    this.body.addEventListener("click", (event) => this.clicked(event));
  }

  clicked(event) {
    const row = event.target.closest("tr");
    if (!row || event.target.closest("a, button, input")) return;
    if (row.dataset.path) go(row.dataset.path);
  }

  hear(news) {
    if (news.again)
      return get("/api/runs").then((found) => {
        this.runs = new Map(found.runs.map((r) => [r.name, r]));
        this.sweeps = new Set(found.sweeps);
        this.draw();
      });
    if (!news.list) return;
    for (const name of news.list.gone) {
      this.runs.delete(name);
      view.chosen.delete(name);
    }
    for (const run of news.list.runs) this.runs.set(run.name, run);
    this.draw();
  }

  matches(run) {
    if (view.states.size && !view.states.has(run.status)) return false;
    if (view.recipe && run.title !== view.recipe) return false;
    const text = `${run.name} ${run.why || ""} ${run.title || ""} ${run.parent || ""} ${run.sweep || ""}`.toLowerCase();
    return view.text
      .toLowerCase()
      .split(/\s+/)
      .every((word) => text.includes(word));
  }

  order(a, b) {
    const key = view.sort,
      sign = view.down ? -1 : 1;
    const [x, y] = [a[key], b[key]];
    const missing = (v) => v === null || v === undefined || v === "";
    if (missing(x) || missing(y)) return missing(x) - missing(y) || (a.name < b.name ? -1 : 1);
    return (x < y ? -1 : x > y ? 1 : 0) * sign || (a.name < b.name ? -1 : 1);
  }

  draw() {
    const all = [...this.runs.values()];
    this.drawChips(all);
    this.drawRecipes(all);
    this.drawHead();
    const found = all.filter((run) => this.matches(run)).sort((a, b) => this.order(a, b));
    const rows =
      view.group === "sweep"
        ? this.bySweep(found)
        : view.group === "parent"
          ? this.byParent(found)
          : found.map((run) => [run, 0]);
    const kept = new Map();
    const drawn = rows.map(([item, depth, more]) => this.row(item, depth, more, kept));
    this.rows = kept;
    if (!all.length) this.body.replaceChildren(h("tr", {}, h("td", { colSpan: 10 }, this.nothing())));
    else if (!found.length)
      this.body.replaceChildren(
        h(
          "tr",
          {},
          h(
            "td",
            { colSpan: 10 },
            h("div", { className: "empty" }, "No run matches. ", h("button", { onclick: () => this.clear() }, "Show all")),
          ),
        ),
      );
    else this.body.replaceChildren(...drawn);
    this.drawTray();
  }

  nothing() {
    return h(
      "div",
      { className: "empty big" },
      h("img", { src: "/static/sprout.svg", width: 44, height: 44, alt: "" }),
      h("h2", {}, "Nothing has been sown here yet"),
      h("p", {}, "Runs in ", h("code", {}, this.root), " appear by themselves. Start one:"),
      h("p", {}, h("code", {}, "seedbed demo")),
      h("p", {}, h("code", {}, 'seedbed train gpt/demo -m "why"')),
    );
  }

  clear() {
    view.text = this.search.value = view.recipe = "";
    view.states.clear();
    this.draw();
  }

  drawChips(all) {
    const counts = Object.groupBy
      ? Object.groupBy(all, (r) => r.status)
      : all.reduce((o, r) => ((o[r.status] ||= []).push(r), o), { __proto__: null });
    const chip = (state, text, count) =>
      h(
        "button",
        {
          className: "chip",
          ariaPressed: String(state ? view.states.has(state) : !view.states.size),
          onclick: () => {
            if (!state) view.states.clear();
            else if (view.states.has(state)) view.states.delete(state);
            else view.states.add(state);
            this.draw();
          },
        },
        text,
        h("b", {}, count),
      );
    this.chips.replaceChildren(
      chip("", "all", all.length),
      ...STATES.filter((s) => counts[s]).map((s) => chip(s, s, counts[s].length)),
    );
  }

  drawRecipes(all) {
    const titles = [...new Set(all.map((run) => run.title).filter(Boolean))].sort();
    const key = titles.join("\n");
    if (this.recipe.dataset.key === key) return;
    this.recipe.dataset.key = key;
    this.recipe.replaceChildren(
      h("option", { value: "" }, "All recipes"),
      ...titles.map((t) => h("option", { value: t, selected: t === view.recipe }, t)),
    );
  }

  drawHead() {
    const pick = h("th", { className: "c-pick" }, h("span", { className: "faint", title: "Choose runs to compare" }, ""));
    this.head.replaceChildren(
      pick,
      ...COLUMNS.map(([key, text, cls]) => {
        const sort = key === view.sort ? (view.down ? "descending" : "ascending") : null;
        const inside = key
          ? h(
              "button",
              {
                onclick: () => {
                  view.down = view.sort === key ? !view.down : !["name", "title", "loss", "best"].includes(key);
                  view.sort = key;
                  this.draw();
                },
              },
              text,
            )
          : text;
        return h("th", { className: cls, "aria-sort": sort, scope: "col" }, inside);
      }),
    );
  }

  // The trials of a sweep as one line that can be expanded, at the position of its first run in the chosen order.
  bySweep(found) {
    const groups = new Map();
    for (const run of found) {
      const key = run.sweep ? `sweep ${run.sweep}` : `run ${run.name}`;
      if (!groups.has(key)) groups.set(key, []);
      groups.get(key).push(run);
    }
    return [...groups.values()].flatMap((runs) => {
      const name = runs[0].sweep;
      if (!name) return [[runs[0], 0]];
      const isOpen = view.open.has(name);
      return [[this.sum(name, runs), 0, { sweep: name, isOpen }], ...(isOpen ? runs.map((run) => [run, 1]) : [])];
    });
  }

  sum(name, runs) {
    const counts = { __proto__: null };
    for (const run of runs) counts[run.status] = (counts[run.status] || 0) + 1;
    const best = runs.filter((r) => typeof r.best === "number").reduce((a, b) => (!a || b.best < a.best ? b : a), null);
    const why = `${runs.length} trials: ${Object.entries(counts)
      .map(([k, n]) => `${n} ${k}`)
      .join(", ")}`;
    const state = counts.running ? "running" : counts.done ? "done" : runs[0].status;
    // Its thumbnail: the best of every trial, from the worst to the best.
    const line = runs
      .map((r) => r.best)
      .filter((v) => typeof v === "number")
      .sort((a, b) => b - a);
    return {
      ...(best || runs[0]),
      spark: line,
      name,
      why,
      status: state,
      best: best?.best,
      step: null,
      last_step: null,
      rate: null,
      loss: null,
    };
  }

  byParent(found) {
    const names = new Set(found.map((run) => run.name)),
      children = new Map();
    for (const run of found)
      if (run.parent && names.has(run.parent)) children.set(run.parent, [...(children.get(run.parent) || []), run]);
    const seen = new Set(),
      out = [];
    const add = (run, depth) => {
      if (seen.has(run.name)) return;
      seen.add(run.name);
      out.push([run, depth]);
      for (const child of children.get(run.name) || []) add(child, depth + 1);
    };
    for (const run of found) if (!run.parent || !names.has(run.parent)) add(run, 0);
    for (const run of found) add(run, 0);
    return out;
  }

  row(run, depth, more, kept) {
    const path = more ? `/sweep/${encodeURIComponent(run.name)}` : runPath(run.name);
    const known = JSON.stringify([run, depth, more, view.chosen.has(run.name), this.here === path]);
    const key = (more ? "sweep " : "run ") + run.name;
    const old = this.rows.get(key);
    if (old && old.dataset.known === known) {
      kept.set(key, old);
      return old;
    }
    const share = run.last_step ? Math.min(run.step / run.last_step, 1) : null;
    const fold =
      more &&
      h(
        "button",
        {
          className: "fold",
          ariaExpanded: String(more.isOpen),
          ariaLabel: `Trials of ${run.name}`,
          onclick: () => {
            view.open[more.isOpen ? "delete" : "add"](more.sweep);
            this.draw();
          },
        },
        more.isOpen ? "▾" : "▸",
      );
    const pick = more
      ? null
      : h("input", {
          type: "checkbox",
          checked: view.chosen.has(run.name),
          ariaLabel: `Choose ${run.name}`,
          onchange: () => this.choose(run.name),
        });
    const row = h(
      "tr",
      { className: this.here === path ? "here" : "" },
      h("td", { className: "c-pick" }, pick),
      h(
        "td",
        {},
        h(
          "div",
          { className: "name" },
          depth ? h("span", { className: "indent", style: { marginLeft: `${(depth - 1) * 18}px` } }, "└ ") : null,
          fold,
          h("a", { href: path }, run.name),
        ),
        run.why ? h("div", { className: "why", title: run.why }, run.why) : null,
      ),
      h("td", { className: "c-status" }, status(run.status)),
      h("td", { className: "c-recipe", title: run.title }, run.title || "–"),
      h(
        "td",
        { className: "c-step" },
        run.step === null
          ? ""
          : [
              h("span", { className: "num" }, num(run.step)),
              run.last_step && run.step < run.last_step
                ? h("span", { className: "num faint" }, ` / ${scaled(run.last_step)}`)
                : null,
              run.status === "running" && share !== null
                ? h("div", { className: "meter" }, h("i", { style: { width: `${100 * share}%` } }))
                : null,
            ],
      ),
      h("td", { className: "c-num right num" }, num(run.loss)),
      h("td", { className: "c-best right num", title: run.metric ? `best ${run.metric}` : "" }, num(run.best)),
      h("td", { className: "c-spark" }, spark(run.spark, tone(run.status))),
      h("td", { className: "c-num c-rate right num" }, scaled(run.rate)),
      h("td", { className: "c-age right num soft", title: run.created || "" }, age(run.created)),
    );
    row.dataset.path = path;
    row.dataset.known = known;
    kept.set(key, row);
    return row;
  }

  ages() {
    for (const [key, row] of this.rows)
      if (key.startsWith("run ")) row.lastChild.textContent = age(this.runs.get(key.slice(4))?.created);
  }

  choose(name) {
    view.chosen[view.chosen.has(name) ? "delete" : "add"](name);
    this.draw();
  }

  drawTray() {
    const names = [...view.chosen].filter((name) => this.runs.has(name));
    this.tray.hidden = !names.length;
    this.tray.replaceChildren(
      `${names.length} chosen`,
      h("button", { className: "primary", disabled: names.length < 2, onclick: () => this.compare() }, "Compare"),
      h(
        "button",
        {
          className: "quiet",
          onclick: () => {
            view.chosen.clear();
            this.draw();
          },
        },
        "Clear",
      ),
    );
  }

  compare() {
    const names = [...view.chosen].filter((name) => this.runs.has(name));
    if (names.length > 1) go(`/compare?${new URLSearchParams(names.map((name) => ["run", name]))}`);
  }

  key(event) {
    if (event.key === "Escape" && event.target === this.search) {
      this.clear();
      this.search.blur();
    }
    if (event.target.matches("input:not([type=checkbox]), textarea, select") || event.ctrlKey || event.metaKey || event.altKey)
      return;
    const rows = [...this.body.querySelectorAll("tr[data-path]")],
      at = rows.findIndex((row) => row.dataset.path === this.here);
    if (event.key === "/") {
      event.preventDefault();
      this.search.focus();
    }
    if (event.key === "c") this.compare();
    if ("jk".includes(event.key) && rows.length) {
      const next = rows[Math.min(Math.max(at + (event.key === "j" ? 1 : -1), 0), rows.length - 1)];
      rows[at]?.classList.remove("here");
      next.classList.add("here");
      next.scrollIntoView({ block: "nearest" });
      this.here = next.dataset.path;
    }
    if (event.key === "Enter" && at >= 0 && !event.target.closest("a, button")) go(this.here);
    if (event.key === "x" && at >= 0 && this.here.startsWith("/run/")) this.choose(decodeURIComponent(this.here.slice(5)));
  }
}
