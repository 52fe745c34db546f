// Where a run comes from and what came of it: parents with the root first, resumes, children.

import { apiPath, get, h, num, runPath, status } from "./dom.js";

const MAX_PARENTS = 30;

// Parents from the root down; one that was removed ends the chain.
async function parents(name) {
  const chain = [];
  while (name && chain.length < MAX_PARENTS && !chain.some((one) => one.name === name)) {
    const found = await get(apiPath(name)).then((page) => page.summary).catch(() => null);
    chain.unshift(found || { name, gone: true });
    name = found?.parent;
  }
  return chain;
}

export async function lineage(place, { summary, events, children = [] }) {
  const chain = await parents(summary.parent),
    resumes = events.filter((event) => event.kind === "resume");
  const line = (run) =>
    h(
      "li",
      { ariaCurrent: run === summary ? "true" : null },
      run.gone ? h("span", { className: "soft" }, `${run.name} (removed)`) : run === summary ? h("b", {}, run.name) : h("a", { href: runPath(run.name) }, run.name),
      run.gone ? null : status(run.status),
      run.why ? h("span", { className: "soft small" }, run.why) : null,
    );
  const below = children.map((name) => h("li", {}, h("a", { href: runPath(name) }, name)));
  const resumed = resumes.map((event) =>
    h("li", {}, h("span", { className: "num" }, `step ${num(event.step)}`), h("span", { className: "soft" }, event.what)),
  );
  place.replaceChildren(
    h("ol", { className: "lineage", ariaLabel: "Parents, the first one first" }, [...chain, summary].map(line)),
    ...(resumed.length ? [h("h3", {}, "Resumed"), h("ul", { className: "lineage resumes" }, resumed)] : []),
    ...(below.length ? [h("h3", {}, "Children"), h("ul", { className: "lineage children" }, below)] : []),
    ...(chain.length || resumed.length || below.length ? [] : [h("p", { className: "soft small" }, "No parent, no children, never resumed.")]),
  );
}
