// The list of runs: live, sorted, filtered by expressions, grouped, with columns of one's choice; tags, archive and trash.

import { go } from "./app.js";
import { age, get, h, num, post, runPath, scaled, spark, status, tone } from "./dom.js";
import { number, predicate, unknown } from "./filter.js";
import { watch } from "./live.js";
import { mean } from "./seeds.js";
import { Settings } from "./settings.js";

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
// As many rows are drawn at first; more when the end comes into view.
const STRIDE = 150;
// As many runs are named in one request, which is at most 64 kB.
const BULK = 300;
const KEPT = "list-columns";
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
  columns: null,
  archived: false,
  undo: [],
};

export async function open(place) {
  document.title = "Runs · seedbed";
  const found = await get("/api/runs");
  try {
    view.columns ??= JSON.parse(localStorage.getItem(KEPT) || "[]").filter((key) => typeof key === "string");
  } catch {
    view.columns = [];
  }
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
    this.num = found.num;
    this.trash = found.trash;
    this.limit = STRIDE;
    this.settings = new Settings(() => (this.draw(), this.fillColumns()));
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
      placeholder: "Words, or optim.lr>1e-3 tag:x loss<2",
      title:
        "Words of name, why, recipe; key:part, key=value, key!=value, key>number of any setting, metric, tag, status, recipe, age; a|b for either; -term for not",
      ariaLabel: "Search runs",
      value: view.text,
      style: { width: "300px" },
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
        ["seeds", "Group seeds"],
        ["", "No groups"],
      ].map(([value, text]) => h("option", { value, selected: value === view.group }, text)),
    );
    this.head = h("tr", {});
    this.body = h("tbody", {});
    const table = h("table", { className: "runs" }, h("thead", {}, this.head), this.body);
    this.more = h("div", { className: "empty small", hidden: true });
    this.table = h("div", { className: "card" }, h("div", { className: "scroll" }, table), this.more);
    this.ahead = new IntersectionObserver((seen) => seen.some((one) => one.isIntersecting) && this.extend(), { rootMargin: "600px" });
    this.ahead.observe(this.more);
    this.remark = h("div", { className: "small soft remarks", role: "status" });
    this.toolbar = h(
      "div",
      { className: "bar", style: { marginBottom: "14px" } },
      h("h1", {}, "Runs"),
      this.chips,
      h("span", { className: "grow" }),
      this.search,
      this.recipe,
      this.group,
      this.columnMenu(),
    );
    this.place.append(this.toolbar, this.remark, this.table);
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
        [this.num, this.trash] = [found.num, found.trash];
        this.draw();
      });
    if (!news.list) return;
    for (const name of news.list.gone) {
      this.runs.delete(name);
      view.chosen.delete(name);
    }
    for (const run of news.list.runs) this.runs.set(run.name, run);
    this.num = Math.max(this.runs.size, this.num - news.list.gone.length);
    if (news.list.runs.some((run) => !this.settings.has(run.name))) this.settings.forget();
    this.draw();
  }

  // The value of a column or a key of the filter; undefined where the run has none.
  value(run, key) {
    if (key === "tag") return run.tags || [];
    if (key === "recipe") return [run.title, run.recipe].filter(Boolean);
    if (key === "archived") return run.archived ? "yes" : "no";
    if (key === "age") return run.created ? (Date.now() - Date.parse(run.created)) / 1000 : undefined;
    if (Object.hasOwn(run, key) && typeof run[key] !== "object") return run[key];
    if (run.numbers && Object.hasOwn(run.numbers, key)) return run.numbers[key];
    return this.settings.value(run.name, key);
  }

  isKnown(key) {
    const some = this.runs.values().next().value;
    if (["tag", "recipe", "archived", "age"].includes(key) || (some && Object.hasOwn(some, key))) return true;
    return this.settings.keys().includes(key) || [...this.runs.values()].some((run) => run.numbers && Object.hasOwn(run.numbers, key));
  }

  columnMenu() {
    const list = h("div", { className: "menu-list" });
    const find = h("input", { type: "search", placeholder: "setting or metric", ariaLabel: "Search columns", oninput: () => fill() });
    const fill = () => {
      const metrics = [...new Set([...this.runs.values()].flatMap((run) => Object.keys(run.numbers || {})))];
      const varied = this.settings.keys().filter((key) => find.value || this.settings.varies(key));
      const keys = [...new Set([...view.columns, ...metrics, ...varied])].filter((key) => key.includes(find.value.trim())).slice(0, 80);
      const box = (key) =>
        h("label", {}, h("input", { type: "checkbox", checked: view.columns.includes(key), "data-column": key, onchange: () => this.column(key) }), ` ${key}`);
      list.replaceChildren(...(keys.length ? keys.map(box) : [this.settings.isReady() ? "none" : "reading settings…"]));
    };
    this.fillColumns = fill;
    const menu = h("details", { className: "menu", ontoggle: () => menu.open && (this.settings.load(), fill()) }, h("summary", { className: "button" }, "Columns"), h("div", {}, find, list));
    return menu;
  }

  column(key) {
    const at = view.columns.indexOf(key);
    if (at < 0) view.columns.push(key);
    else view.columns.splice(at, 1);
    localStorage.setItem(KEPT, JSON.stringify(view.columns));
    this.draw();
  }

  extend() {
    if (this.more.hidden) return;
    this.limit += STRIDE;
    this.draw();
  }

  matches(run) {
    if (view.states.size && !view.states.has(run.status)) return false;
    if (view.recipe && run.title !== view.recipe) return false;
    if (run.archived && !view.archived && !/(^|\s)-?archived[:=]/.test(view.text)) return false;
    return this.holds(run);
  }

  order(a, b) {
    const key = view.sort,
      sign = view.down ? -1 : 1;
    const typed = (run) => (Object.hasOwn(run, key) ? run[key] : (number(this.value(run, key)) ?? this.value(run, key)));
    const [x, y] = [typed(a), typed(b)];
    const missing = (v) => v === null || v === undefined || v === "";
    if (missing(x) || missing(y)) return missing(x) - missing(y) || (a.name < b.name ? -1 : 1);
    return (x < y ? -1 : x > y ? 1 : 0) * sign || (a.name < b.name ? -1 : 1);
  }

  draw() {
    const all = [...this.runs.values()];
    this.drawChips(all);
    this.drawRecipes(all);
    this.drawHead();
    this.holds = predicate(view.text, (run, key) => this.value(run, key));
    this.remark.textContent = this.remarks(all);
    const found = all.filter((run) => this.matches(run)).sort((a, b) => this.order(a, b));
    const rows =
      view.group === "sweep"
        ? this.bySweep(found)
        : view.group === "parent"
          ? this.byParent(found)
          : view.group === "seeds"
            ? this.bySeeds(found)
            : found.map((run) => [run, 0]);
    const kept = new Map();
    this.shown = found;
    this.body.parentElement.style.minWidth = view.columns.length ? `${1000 + 110 * view.columns.length}px` : "";
    this.more.hidden = rows.length <= this.limit;
    this.more.textContent = this.more.hidden ? "" : `${rows.length - this.limit} more lines`;
    const drawn = rows.slice(0, this.limit).map(([item, depth, more]) => this.row(item, depth, more, kept));
    this.rows = kept;
    if (!all.length) this.body.replaceChildren(h("tr", {}, h("td", { colSpan: 10 + view.columns.length }, this.nothing())));
    else if (!found.length)
      this.body.replaceChildren(
        h(
          "tr",
          {},
          h(
            "td",
            { colSpan: 10 + view.columns.length },
            h("div", { className: "empty" }, "No run matches. ", h("button", { onclick: () => this.clear() }, "Show all")),
          ),
        ),
      );
    else this.body.replaceChildren(...drawn);
    this.drawTray();
  }

  // What the filter does not understand, and what is still being read.
  remarks(all) {
    const wants = /[:=<>]/.test(view.text) || view.group === "seeds" || view.columns.length;
    if (wants) this.settings.load();
    const out = [];
    if (this.num > all.length) out.push(`${all.length.toLocaleString("en-US")} of ${this.num.toLocaleString("en-US")} runs; the others are being read`);
    if (wants && !this.settings.isReady()) out.push("reading settings…");
    else {
      const strange = unknown(view.text, (key) => this.isKnown(key));
      if (strange.length) out.push(`no run has a setting or metric called ${strange.join(", ")}`);
    }
    return out.join(" · ");
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
    view.text = this.search.value = this.recipe.value = view.recipe = "";
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
    const num_archived = all.filter((run) => run.archived).length;
    const toggle = () => {
      view.archived = !view.archived;
      this.draw();
    };
    if (num_archived)
      this.chips.append(h("button", { className: "chip", ariaPressed: String(view.archived), onclick: toggle }, "archived", h("b", {}, num_archived)));
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
    const all = h("input", { type: "checkbox", ariaLabel: "Choose all that are listed", onchange: () => this.chooseAll(all.checked) });
    all.checked = Boolean(this.shown?.length) && this.shown.every((run) => view.chosen.has(run.name));
    const pick = h("th", { className: "c-pick", title: "Choose all that are listed" }, all);
    const own = view.columns.map((key) => [key, key, "c-own right"]);
    this.head.replaceChildren(
      pick,
      ...[...COLUMNS.slice(0, -1), ...own, ...COLUMNS.slice(-1)].map(([key, text, cls]) => {
        const sort = key === view.sort ? (view.down ? "descending" : "ascending") : null;
        const inside = key
          ? h(
              "button",
              {
                onclick: () => {
                  view.down = view.sort === key ? !view.down : !["name", "title", "loss", "best", ...view.columns].includes(key);
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

  // Runs whose settings differ in the seed only, with the mean and the standard deviation of what they reached.
  bySeeds(found) {
    const groups = new Map();
    for (const run of found) {
      const settings = this.settings.groupOf(run.name),
        key = settings === undefined ? run.name : `${run.recipe} ${settings}`;
      groups.set(key, [...(groups.get(key) || []), run]);
    }
    return [...groups].flatMap(([key, runs]) => {
      if (runs.length < 2) return [[runs[0], 0]];
      const isOpen = view.open.has(key),
        name = runs.map((run) => run.name).sort()[0],
        why = `${runs.length} seeds, ± standard deviation`;
      const band = (of) => mean(runs.map(of));
      const line = { ...this.sum(name, runs), name, why, step: band((run) => run.step)?.mean, loss: band((run) => run.loss), best: band((run) => run.best), rate: band((run) => run.rate)?.mean };
      line.numbers = Object.fromEntries(view.columns.map((column) => [column, band((run) => number(this.value(run, column)))]).filter(([, v]) => v));
      return [[line, 0, { seeds: key, isOpen }], ...(isOpen ? runs.map((run) => [run, 1]) : [])];
    });
  }

  sum(name, runs) {
    const counts = { __proto__: null };
    for (const run of runs) counts[run.status] = (counts[run.status] || 0) + 1;
    const best = runs.filter((r) => typeof r.best === "number").reduce((a, b) => (!a || (b.higher ? b.best > a.best : b.best < a.best) ? b : a), null);
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
      tags: [],
      label: "",
      archived: false,
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
    const path = more?.sweep ? `/sweep/${encodeURIComponent(run.name)}` : runPath(run.name);
    const values = view.columns.map((key) => (run.numbers && Object.hasOwn(run.numbers, key) ? run.numbers[key] : more ? undefined : this.value(run, key)));
    const known = JSON.stringify([run, depth, more, values, view.chosen.has(run.name), this.here === path]);
    const key = (more?.seeds ? "seeds " : more ? "sweep " : "run ") + run.name;
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
          ariaLabel: `${more.seeds ? "Seeds" : "Trials"} of ${run.name}`,
          onclick: () => {
            view.open[more.isOpen ? "delete" : "add"](more.sweep || more.seeds);
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
          h("a", { href: path, title: run.label ? run.name : null }, run.label || run.name),
        ),
        (run.tags?.length || run.archived) &&
          h(
            "div",
            { className: "tags" },
            run.tags.map((tag) => h("button", { className: "chip tag-chip", title: `Filter by ${tag}`, onclick: () => this.filter(`tag:${tag}`) }, tag)),
            run.archived && h("span", { className: "tag" }, "archived"),
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
      h("td", { className: "c-num right num" }, banded(run.loss)),
      h("td", { className: "c-best right num", title: run.metric ? `best ${run.metric}` : "" }, banded(run.best)),
      h("td", { className: "c-spark" }, spark(run.spark, tone(run.status))),
      h("td", { className: "c-num c-rate right num" }, scaled(run.rate)),
      values.map((value, i) => h("td", { className: "c-own right num", title: view.columns[i] }, banded(value))),
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

  chooseAll(on) {
    for (const run of this.shown) view.chosen[on ? "add" : "delete"](run.name);
    this.draw();
  }

  filter(term) {
    if (!view.text.split(/\s+/).includes(term)) view.text = this.search.value = `${view.text} ${term}`.trim();
    this.draw();
  }

  drawTray() {
    const names = [...view.chosen].filter((name) => this.runs.has(name)),
      chosen = names.map((name) => this.runs.get(name));
    this.tray.hidden = !names.length && !view.undo.length && !this.said;
    if (this.tray.contains(document.activeElement) && document.activeElement.matches("input")) return;
    const button = (text, act, options = {}) => h("button", { className: "quiet", onclick: act, ...options }, text);
    const change = (action) => () => this.act(action, names);
    const parts = names.length
      ? [
          `${names.length} chosen`,
          h("button", { className: "primary", disabled: names.length < 2 || names.length > 64, onclick: () => this.compare() }, "Compare"),
          button("Tag…", () => this.ask("tag", "Tag", names)),
          chosen.some((run) => run.tags?.length) && button("Untag…", () => this.ask("untag", "Remove tag", names)),
          names.length === 1 && button("Rename…", () => this.ask("rename", "Shown name", names, chosen[0].label || chosen[0].name)),
          chosen.every((run) => run.archived) ? button("Unarchive", change("unarchive")) : button("Archive", change("archive")),
          button("Delete", change("delete")),
          button("Clear", () => (view.chosen.clear(), this.draw())),
        ]
      : [];
    if (view.undo.length) {
      const undo = view.undo;
      parts.push(h("span", { role: "status" }, `${undo.length} deleted`), button("Undo", () => this.act("restore", undo)), button("Delete for good", () => this.act("purge", undo)));
    }
    if (this.said) parts.push(h("span", { role: "alert" }, this.said));
    this.tray.replaceChildren(...parts.filter(Boolean));
  }

  // One line of text for an action, in the tray itself.
  ask(action, label, names, value = "") {
    const field = h("input", { ariaLabel: label, placeholder: label, value, maxLength: 60 });
    const done = () => {
      field.blur();
      this.draw();
    };
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") done();
      if (event.key === "Enter") {
        field.blur();
        this.act(action, names, field.value);
      }
    });
    this.tray.replaceChildren(h("span", {}, `${label} of ${names.length}`), field, h("button", { className: "quiet", onclick: done }, "Cancel"));
    field.focus();
    field.select();
  }

  async act(action, names, text = "") {
    const done = [],
      failed = { __proto__: null };
    this.said = "";
    try {
      for (let i = 0; i < names.length; i += BULK) {
        const found = await post("/api/actions", { action, runs: names.slice(i, i + BULK), text });
        done.push(...found.done);
        Object.assign(failed, found.failed);
      }
    } catch (error) {
      this.said = error.message;
    }
    if (action === "delete") {
      view.undo = done;
      view.chosen.clear();
    } else if (action === "restore" || action === "purge") view.undo = view.undo.filter((entry) => Object.hasOwn(failed, entry));
    const [first] = Object.entries(failed);
    if (first) this.said = `${Object.keys(failed).length} not changed; ${first[0]}: ${first[1]}`;
    this.hear({ again: true });
  }

  compare() {
    const names = [...view.chosen].filter((name) => this.runs.has(name));
    if (names.length > 1 && names.length <= 64) go(`/compare?${new URLSearchParams(names.map((name) => ["run", name]))}`);
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

// A number, a text, or the mean of several runs with their standard deviation.
function banded(value) {
  if (value === undefined || value === null || value === "") return "–";
  if (typeof value === "object") return [num(value.mean), value.sd ? h("span", { className: "faint" }, ` ± ${num(value.sd)}`) : null];
  return typeof value === "number" ? num(value) : value;
}
