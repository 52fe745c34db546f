// What sets a run apart from any other one: settings, and the code that trained it. The choice is in the address.

import { apiPath, get, h, problem, runPath } from "./dom.js";

const PARTS = { __proto__: null, version: "seedbed", source: "sources of seedbed", commit: "commit", "code.patch": "uncommitted changes", python: "python", platform: "platform" };

// Versions, commit and patch by name, as text.
function codeOf({ code_json: code = {} }) {
  const found = new Map(Object.entries(PARTS).map(([key, name]) => [name, code[key] || ""]));
  if (code.commit !== undefined || code["code.patch"]) found.set(PARTS["code.patch"], code["code.patch"] ? `patch ${code["code.patch"]}` : "none");
  for (const [name, version] of Object.entries(code.packages || {})) found.set(name, version);
  return found;
}

const settingsOf = (page) => new Map([["recipe", page.summary.title], ...(page.config || []).map(({ key, value }) => [key, value])]);

// Rows [name, there, here] of what differs, and how many are equal.
export function differing(there, here) {
  const names = [...new Set([...here.keys(), ...there.keys()])];
  const rows = names.map((name) => [name, there.get(name) ?? "–", here.get(name) ?? "–"]).filter(([, a, b]) => a !== b);
  return { rows, num_equal: names.length - rows.length };
}

export class Difference {
  constructor(place, page, other) {
    Object.assign(this, { place, page, other });
    this.names = h("datalist", { id: "other-runs" });
    this.field = h("input", {
      type: "search",
      placeholder: "Name of a run",
      ariaLabel: "Compare with run",
      list: "other-runs",
      value: other,
      onfocus: () => (this.offered ??= this.offer()),
      oninput: () => this.known?.has(this.field.value) && this.choose(this.field.value),
      onchange: () => this.choose(this.field.value.trim()),
    });
  }

  tools() {
    const { parent } = this.page.summary;
    const offered = parent && h("button", { className: "chip", onclick: () => this.choose((this.field.value = parent)) }, "parent");
    return [h("span", { className: "grow" }), offered, this.field, this.names];
  }

  async offer() {
    const { names } = await get("/api/settings");
    this.known = new Set(names.filter((name) => name !== this.page.summary.name));
    this.names.replaceChildren(...[...this.known].map((value) => h("option", { value })));
  }

  choose(other) {
    if (other === this.other) return;
    this.other = other;
    const query = new URLSearchParams(location.search);
    if (other) query.set("against", other);
    else query.delete("against");
    history.replaceState(history.state, "", `${location.pathname}${query.size ? `?${query}` : ""}`);
    this.draw();
  }

  async draw() {
    const { other, place } = this;
    if (!other) return place.replaceChildren(h("div", { className: "empty" }, "Name any other run to see which settings and which code differ."));
    let page;
    try {
      await (this.offered ??= this.offer());
      if (!this.known.has(other)) throw new Error(`there is no run ${other} with settings here, or it is this one`);
      page = await get(apiPath(other));
    } catch (error) {
      return other === this.other && place.replaceChildren(problem(error));
    }
    // Another one was named meanwhile.
    if (other !== this.other) return;
    const settings = differing(settingsOf(page), settingsOf(this.page)),
      code = differing(codeOf(page), codeOf(this.page));
    const same = settings.rows.length || code.rows.length ? "" : "Settings and code are equal.";
    const damaged = page.damaged || this.page.damaged;
    place.replaceChildren(
      ...(damaged ? [problem(new Error(damaged))] : []),
      same ? h("div", { className: "empty" }, same) : "",
      this.table("setting", settings),
      this.table("code", code),
    );
  }

  table(what, { rows, num_equal }) {
    if (!rows.length) return h("p", { className: "small soft pad" }, `${what}: no difference, ${num_equal} equal`);
    const names = [h("a", { href: runPath(this.other) }, this.other), this.page.summary.name];
    return h(
      "div",
      {},
      h(
        "div",
        { className: "scroll tall", tabIndex: 0, role: "region", ariaLabel: `Differences: ${what}` },
        h(
        "table",
        { className: "config", "data-part": what },
        h("thead", {}, h("tr", {}, [what, ...names].map((name) => h("th", {}, name)))),
        h("tbody", {}, rows.map(([name, there, here]) => h("tr", { "data-key": name }, h("td", {}, name), h("td", { className: "mono" }, there), h("td", { className: "mono" }, here)))),
        ),
      ),
      h("p", { className: "small soft pad" }, `${num_equal} more are equal`),
    );
  }
}
