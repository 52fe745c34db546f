// One run: numbers, curves, samples, settings, events, checkpoints, console, notes. Updated while it trains.

import { age, apiPath, bytes, card, command, duration, get, h, num, percent, problem, runPath, scaled, status } from "./dom.js";
import { Console } from "./console.js";
import { Difference } from "./difference.js";
import { lineage } from "./lineage.js";
import { watch } from "./live.js";
import { notes } from "./notes.js";
import { checkpointTable, checks, timeUse } from "./parts.js";
import { RunCurves } from "./run_curves.js";
import { Samples } from "./samples.js";

const isAlarm = (e) => e.severity === "warning" || e.severity === "error";

export async function open(place, name, query) {
  document.title = `${name} · seedbed`;
  const page = new RunPage(place, name, await get(apiPath(name)));
  place.dataset.recipe = page.about.summary.recipe || "";
  page.build(query.get("against") || "");
  const stop = watch({ runs: [name, page.about.summary.parent].filter(Boolean) }, (news) => page.hear(news));
  const redraw = () => page.curves.redraw();
  const keys = (event) => page.key(event);
  addEventListener("theme", redraw);
  addEventListener("keydown", keys);
  return () => {
    stop();
    page.curves.close();
    removeEventListener("theme", redraw);
    removeEventListener("keydown", keys);
  };
}

class RunPage {
  constructor(place, name, about) {
    Object.assign(this, { place, name, about, parts: {}, drawn: new Map() });
  }

  key(event) {
    if (event.target.matches("input, textarea, select") || event.ctrlKey || event.metaKey || event.altKey || event.key !== "/") return;
    event.preventDefault();
    this.curves.search.focus();
  }

  // What did not change stays as it is, with focus, selection and open parts.
  once(key, data, draw) {
    const text = JSON.stringify(data);
    if (this.drawn.get(key) === text) return;
    this.drawn.set(key, text);
    return draw();
  }

  async hear(news) {
    const changed = news.again ? ["status", "rows", "events", "console"] : news.runs?.[this.name] || [];
    if (!changed.length || this.busy) {
      this.missed ||= changed.length > 0;
      return;
    }
    this.busy = true;
    try {
      this.about = this.difference.page = await get(apiPath(this.name));
      this.drawHead();
      this.drawFacts();
      if (changed.some((part) => part !== "console")) await this.curves.update(this.about);
      if (changed.includes("events")) this.drawSamples();
      if (changed.includes("console")) this.drawConsole();
    } catch (error) {
      this.drawn.delete("head");
      this.head.replaceChildren(problem(error), h("a", { className: "button", href: "/" }, "All runs"));
    } finally {
      this.busy = false;
      if (this.missed) {
        this.missed = false;
        setTimeout(() => this.hear({ again: true }), 300);
      }
    }
  }

  build(against) {
    const part = (key, className = "body") => (this.parts[key] = h("div", { className }));
    const side = (...cards) => h("div", { className: "stack" }, cards);
    this.head = h("div", {});
    this.numbers = h("div", {});
    const sections = h("div", { className: "sections" });
    this.curves = new RunCurves(sections, this.name);
    this.console = new Console(part("console", "body flush"));
    this.samples = new Samples(part("samples"), h("div", { className: "bar grow" }));
    this.difference = new Difference(part("difference", "body flush"), this.about, against);
    const kept = h("span", { className: "faint small" }, "kept in JOURNAL.md");
    this.place.append(
      this.head,
      this.numbers,
      h(
        "div",
        { className: "stack" },
        card("Curves", this.curves.tools(), sections, { id: "curves", className: "card curves" }),
        h(
          "div",
          { className: "grid two" },
          side(
            card("Samples", this.samples.tools, this.parts.samples, { id: "samples" }),
            card("Console", this.console.tools(), this.parts.console, { id: "console" }),
          ),
          side(
            card("Notes", kept, part("notes"), { id: "notes" }),
            card("Lineage", [], part("lineage"), { id: "lineage" }),
            card("What happened", [], part("events", "body flush"), { id: "events" }),
            card("Where the time goes", [], part("time"), { id: "time" }),
            card("Checks before training", [], part("preflight"), { id: "preflight" }),
            card("Checkpoints", [], part("checkpoints", "body flush"), { id: "checkpoints" }),
          ),
        ),
        card("Difference to another run", this.difference.tools(), this.parts.difference, { id: "difference" }),
        card("Settings", this.configTools(), part("config"), { id: "config" }),
      ),
    );
    this.drawHead();
    this.drawFacts();
    notes(this.parts.notes, this.name, this.about.notes);
    this.curves.update(this.about);
    this.difference.draw();
    this.drawSamples();
    this.drawConsole();
  }

  drawHead() {
    const { summary: run, opens = {}, error, damaged } = this.about,
      where = encodeURIComponent(this.name);
    this.numbers.replaceChildren(this.tiles());
    const shown = [run.status, run.title, run.why, run.parent, run.sweep, opens, error, damaged];
    this.once("head", shown, () => this.drawTitle(run, opens, [error, damaged], where));
  }

  drawTitle(run, opens, wrong, where) {
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
      ...wrong.filter(Boolean).map((text) => h("div", { className: "say bad", role: "alert" }, text)),
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

  async drawSamples() {
    this.samples.show(await get(apiPath(this.name, "/samples")).catch(() => []));
  }

  async drawConsole() {
    this.console.show(await get(apiPath(this.name, "/console")).catch(() => ({ text: "" })));
  }

  drawFacts() {
    const { summary, events = [], time = {}, preflight = {}, checkpoints = [], verdict, metric, parents, children } = this.about;
    const draw = (key, data, made) => this.once(key, data, () => this.parts[key].replaceChildren(...made()));
    draw("events", events, () => [eventList(events)]);
    draw("time", [time, verdict], () => timeUse(time, verdict));
    draw("preflight", preflight, () => checks(preflight));
    draw("checkpoints", [checkpoints, metric], () => [checkpointTable(checkpoints, metric)]);
    const resumes = events.filter((event) => event.kind === "resume");
    this.once("lineage", [summary.status, parents, children, resumes], () => lineage(this.parts.lineage, this.about));
    const { config, reproduce, code, hash } = this.about;
    this.once("config", [config, reproduce, code, hash], () => this.drawConfig());
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
    const { config = [], summary: run, reproduce, code, version, hash, folder } = this.about;
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
      ["reproduce", reproduce && repetition(reproduce)],
      ["code", code],
      ["config", hash && `hash ${hash}, seedbed ${version ?? "unknown"}`],
      ["folder", folder && h("code", {}, folder)],
    ].filter(([, v]) => v);
    this.parts.config.replaceChildren(
      h(
        "dl",
        { className: "facts", style: { marginBottom: "14px", alignItems: "baseline" } },
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

// What puts the code back, what trains, and what differs all the same.
function repetition({ before, command: repeat, remarks }) {
  return h(
    "div",
    { className: "reproduce" },
    before.length ? [h("span", { className: "small soft" }, "in the work tree of its code"), command(before.join(" && "))] : null,
    command(repeat),
    remarks.map((remark) => h("div", { className: "remark" }, remark)),
  );
}

function eventList(events) {
  if (!events.length) return h("div", { className: "empty" }, "Nothing out of the ordinary.");
  const item = (event) =>
    h(
      "li",
      { className: isAlarm(event) ? "alarm" : "" },
      h("span", { className: "num soft" }, num(event.step)),
      h("span", { className: "kind" }, event.kind),
      h("span", { className: "what" }, event.what),
    );
  return h("div", { className: "scroll tall", tabIndex: 0, role: "region", ariaLabel: "Events" }, h("ul", { className: "events" }, [...events].reverse().map(item)));
}
