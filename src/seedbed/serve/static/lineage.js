// Where a run comes from and what came of it: parents with the root first, resumes, children.

import { h, num, runPath, status } from "./dom.js";

export function lineage(place, { summary, events, parents = [], children = [] }) {
  const resumes = events.filter((event) => event.kind === "resume");
  const line = (run) =>
    h(
      "li",
      { ariaCurrent: run === summary ? "true" : null },
      isGone(run) ? h("span", { className: "soft" }, `${run.name} (removed)`) : run === summary ? h("b", {}, run.name) : h("a", { href: runPath(run.name) }, run.name),
      isGone(run) ? null : status(run.status),
      run.why ? h("span", { className: "soft small" }, run.why) : null,
    );
  const below = children.map((name) => h("li", {}, h("a", { href: runPath(name) }, name)));
  const resumed = resumes.map((event) =>
    h("li", {}, h("span", { className: "num" }, `step ${num(event.step)}`), h("span", { className: "soft" }, event.what)),
  );
  place.replaceChildren(
    h("ol", { className: "lineage", ariaLabel: "Parents, the first one first" }, [...parents, summary].map(line)),
    ...(resumed.length ? [h("h3", {}, "Resumed"), h("ul", { className: "lineage resumes" }, resumed)] : []),
    ...(below.length ? [h("h3", {}, "Children"), h("ul", { className: "lineage children" }, below)] : []),
    ...(parents.length || resumed.length || below.length ? [] : [h("p", { className: "soft small" }, "No parent, no children, never resumed.")]),
  );
}

const isGone = (run) => run.status === undefined;
