// All sweeps and ablations, newest first.

import { age, card, get, h } from "./dom.js";
import { watch } from "./live.js";

const KINDS = [
  ["sweeps", "sweep", "Sweeps", "seedbed sweep gpt/demo optim.lr=1e-3,3e-3 --seeds 3"],
  ["ablations", "ablation", "Ablations", "seedbed ablate gpt/demo"],
];

export async function open(place) {
  document.title = "Sweeps · seedbed";
  const found = await get("/api/studies");
  place.append(
    h("div", { className: "bar", style: { marginBottom: "14px" } }, h("h1", {}, "Sweeps and ablations")),
    h(
      "div",
      { className: "stack" },
      KINDS.map(([kind, path, title, example]) => {
        const some = found.filter((one) => one.kind === kind);
        const body = some.length ? table(some, path) : h("div", { className: "empty" }, "None yet. ", h("code", {}, example));
        return card(title, h("span", { className: "faint small num" }, some.length || ""), h("div", { className: "body flush" }, body));
      }),
    ),
  );
  return watch({ list: true, version: Number.MAX_SAFE_INTEGER }, () => {});
}

function table(some, path) {
  const rows = some.map((one) =>
    h(
      "tr",
      {},
      h("td", {}, h("a", { href: `/${path}/${encodeURIComponent(one.name)}` }, one.name)),
      h("td", { className: "soft" }, one.recipe.includes("/") || !one.preset ? one.recipe : `${one.recipe}/${one.preset}`),
      h("td", { className: "soft small" }, one.why),
      h("td", { className: "right num soft", title: one.created }, age(one.created)),
    ),
  );
  const head = ["name", "recipe", "why", "age"].map((text, i) => h("th", { className: i === 3 ? "right" : "" }, text));
  return h(
    "div",
    { className: "scroll" },
    h("table", { className: "studies" }, h("thead", {}, h("tr", {}, head)), h("tbody", {}, rows)),
  );
}
