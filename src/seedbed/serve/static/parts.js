// Static parts of the run page: wall time, checks, checkpoints.

import { palette } from "./chart.js";
import { bytes, duration, h, num, percent } from "./dom.js";

export function timeUse(time, verdict) {
  const parts = Object.entries(time.seconds || {})
      .filter(([, v]) => v > 0)
      .sort((a, b) => b[1] - a[1]),
    total = parts.reduce((t, [, v]) => t + v, 0);
  if (!parts.length) return [h("div", { className: "empty" }, "Known once the run has saved or ended.")];
  return [
    h(
      "div",
      { className: "time-parts", role: "img", ariaLabel: parts.map(([k, v]) => `${k} ${percent(v / total)}`).join(", ") },
      parts.map(([, v], i) => h("i", { style: { flex: v / total, background: palette(i) } })),
    ),
    h(
      "div",
      { className: "key" },
      parts.map(([k, v], i) =>
        h("span", {}, h("i", { style: { background: palette(i) } }), `${k} ${duration(v)} (${percent(v / total, 0)})`),
      ),
    ),
    verdict ? h("p", { style: { margin: "12px 0 0" } }, verdict) : null,
  ].filter(Boolean);
}

export function checks({ outcome, findings = [] }) {
  const tone = { passed: "good", forced: "warn", failed: "bad" }[outcome] || "",
    count = (word) => findings.filter((f) => f.status === word).length;
  const alarms = findings.filter((f) => f.status === "fail");
  const head = h(
    "div",
    { className: "bar" },
    h("span", { className: `tag ${tone}` }, outcome || "not recorded"),
    findings.length
      ? h("span", { className: "soft small" }, `${count("pass")} passed, ${count("skip")} skipped, ${alarms.length} failed`)
      : null,
  );
  return [
    head,
    ...alarms.map((f) =>
      h(
        "details",
        { style: { marginTop: "8px" } },
        h(
          "summary",
          {},
          h("span", { className: `tag ${f.severity === "err" ? "bad" : f.severity === "warn" ? "warn" : ""}` }, f.id),
          " ",
          f.title,
          ": ",
          f.what,
        ),
        h(
          "dl",
          { className: "facts" },
          ["where", "why", "fix"].filter((k) => f[k]).flatMap((k) => [h("dt", {}, k), h("dd", {}, f[k])]),
        ),
      ),
    ),
  ];
}

export function checkpointTable(found, metric) {
  if (!found.length)
    return h("div", { className: "empty" }, "None yet. ", h("code", {}, "every.save"), " says when one is written.");
  const rows = [...found]
    .reverse()
    .map((c) =>
      h(
        "tr",
        {},
        h(
          "td",
          { className: "mono" },
          c.name,
          " ",
          c.best ? h("span", { className: "tag good" }, "best") : null,
          c.missing?.length ? h("span", { className: "tag bad" }, "damaged") : null,
        ),
        h("td", { className: "right num" }, num(c.loss)),
        h("td", { className: "right num" }, num(c.evaluation)),
        h("td", { className: "right num soft" }, bytes(c.bytes)),
      ),
    );
  return h(
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
          h("th", {}, "checkpoint"),
          h("th", { className: "right" }, "train loss"),
          h("th", { className: "right" }, metric || "evaluation"),
          h("th", { className: "right" }, "size"),
        ),
      ),
      h("tbody", {}, rows),
    ),
  );
}
