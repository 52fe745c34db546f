// The journal: one entry per run and sweep, newest first, with conclusions and open entries.

import { command, enlarge, get, h, runPath } from "./dom.js";
import { notes } from "./notes.js";
import { watch } from "./live.js";

const KINDS = [
  ["", "all", () => true],
  ["open", "open questions", (e) => e.open],
  ["done", "concluded", (e) => !e.open],
  ["bad", "negative results", (e) => e.negative],
  ["sweep", "sweeps", (e) => e.kind === "sweep"],
];
const view = { kind: "", text: "" };

export async function open(place) {
  document.title = "Journal · seedbed";
  let entries = await get("/api/journal");
  const list = h("div", { className: "entries" });
  const search = h("input", {
    type: "search",
    placeholder: "Search the journal…",
    ariaLabel: "Search the journal",
    value: view.text,
    style: { width: "260px" },
    oninput: () => {
      view.text = search.value;
      draw();
    },
  });
  const chips = h("div", { className: "bar", role: "group", ariaLabel: "Filter entries" });
  const draw = () => {
    chips.replaceChildren(
      ...KINDS.map(([key, text, is]) =>
        h(
          "button",
          {
            className: "chip",
            ariaPressed: String(view.kind === key),
            onclick: () => {
              view.kind = key;
              draw();
            },
          },
          text,
          h("b", {}, entries.filter(is).length),
        ),
      ),
    );
    const is = KINDS.find(([key]) => key === view.kind)[2];
    const found = entries.filter((e) => is(e) && JSON.stringify(e).toLowerCase().includes(view.text.toLowerCase()));
    list.replaceChildren(...found.map(entry));
    if (!entries.length)
      list.replaceChildren(
        h(
          "div",
          { className: "card empty big" },
          h("h2", {}, "The journal is empty"),
          h(
            "p",
            {},
            "Every run writes an entry when it ends: why, what changed, the verdict, a picture. The conclusion is yours.",
          ),
        ),
      );
    else if (!found.length) list.replaceChildren(h("div", { className: "empty" }, "No entry matches."));
  };
  place.append(
    h(
      "div",
      { className: "bar", style: { marginBottom: "8px" } },
      h("h1", {}, "Journal"),
      chips,
      h("span", { className: "grow" }),
      search,
    ),
    list,
  );
  draw();
  const stop = watch(
    { list: true, version: Number.MAX_SAFE_INTEGER },
    (news) =>
      news.again &&
      get("/api/journal").then((found) => {
        entries = found;
        draw();
      }),
  );
  return stop;
}

// Text between backticks is a command.
const prose = (text) => text.split("`").map((part, i) => (i % 2 ? h("code", {}, part) : part));

function entry(e) {
  const path = e.kind === "sweep" ? `/sweep/${encodeURIComponent(e.run)}` : runPath(e.run);
  const reproduce = e.facts.find(([key]) => key === "reproduce"),
    facts = e.facts.filter(([key]) => key !== "reproduce");
  const words = h(
    "div",
    { style: { display: "grid", gap: "10px", alignContent: "start" } },
    h(
      "dl",
      { className: "facts" },
      facts.flatMap(([key, text]) => [h("dt", {}, key), h("dd", {}, prose(text))]),
    ),
    e.more.length
      ? h(
          "div",
          { className: "soft" },
          e.more.map((line) => h("div", {}, line)),
        )
      : null,
  );
  const write = h("div", { hidden: true }),
    addButton = h(
      "button",
      {
        className: "quiet small",
        onclick: () => {
          addButton.remove();
          write.hidden = false;
          notes(
            write,
            e.run,
            e.concluded.map(([date, text]) => ({ date, text })),
          );
          write.querySelector("textarea:last-of-type").focus();
        },
      },
      e.open ? "write the conclusion" : "edit or add",
    );
  return h(
    "article",
    { className: `entry ${e.negative ? "bad" : e.open ? "" : "good"}` },
    h("div", { className: "when" }, e.date),
    h(
      "div",
      { className: "what" },
      h(
        "div",
        { className: "card" },
        h(
          "div",
          { className: "bar" },
          h("h2", {}, e.there || e.kind === "sweep" ? h("a", { href: path }, e.run) : e.run),
          h("span", { className: `tag ${e.negative ? "bad" : ""}` }, e.verdict),
          e.open ? h("span", { className: "tag warn" }, "open question") : null,
          !e.there && e.kind === "run" ? h("span", { className: "tag" }, "run was removed") : null,
        ),
        e.picture
          ? h(
              "div",
              { className: "cols" },
              words,
              h("img", {
                src: e.picture,
                alt: `curves of ${e.run}`,
                loading: "lazy",
                onclick: () => enlarge(e.picture),
                style: { cursor: "zoom-in" },
              }),
            )
          : words,
        e.concluded.map(([date, text]) =>
          h("div", { className: "note" }, h("span", { className: "faint small num" }, date), h("p", {}, text)),
        ),
        h("div", { className: "bar" }, addButton),
        write,
        reproduce ? command(reproduce[1].replace(/^`|`$/g, "")) : null,
      ),
    ),
  );
}
