// Conclusions in a run's journal entry, added and edited in place.

import { apiPath, h, post, problem } from "./dom.js";

export function notes(place, name, found) {
  const say = h("div", {});
  const save = async (text, old) => {
    try {
      notes(place, name, await post(apiPath(name, "/note"), old === undefined ? { text } : { text, instead_of: old }));
    } catch (error) {
      say.replaceChildren(problem(error));
    }
  };
  const area = h("textarea", {
    placeholder: "What did this run teach?",
    ariaLabel: "New note",
    rows: 2,
    oninput: () => (add.disabled = !area.value.trim()),
    onkeydown: (e) => e.key === "Enter" && (e.ctrlKey || e.metaKey) && area.value.trim() && save(area.value),
  });
  const add = h("button", { className: "primary", disabled: true, onclick: () => save(area.value) }, "Add note");
  const hint = h("span", { className: "faint small" }, "Ctrl+Enter");
  place.replaceChildren(
    h(
      "div",
      { className: "notes" },
      found.map((one) => note(one, save)),
      area,
      h("div", { className: "bar" }, add, hint),
      say,
    ),
  );
}

function note(one, save) {
  const box = h("div", { className: "note" });
  const show = () =>
    box.replaceChildren(
      h("span", { className: "faint small num" }, one.date),
      h("p", {}, one.text),
      h("button", { className: "quiet small", onclick: edit }, "edit"),
    );
  const edit = () => {
    const area = h("textarea", {
      value: one.text,
      ariaLabel: "Edit note",
      rows: 2,
      onkeydown: (e) => {
        if (e.key === "Escape") show();
        if (e.key === "Enter" && (e.ctrlKey || e.metaKey)) save(area.value, one.text);
      },
    });
    box.replaceChildren(
      area,
      h(
        "div",
        { className: "bar", style: { gridColumn: "1 / -1" } },
        h("button", { className: "primary", onclick: () => save(area.value, one.text) }, "Save"),
        h("button", { className: "quiet", onclick: show }, "Cancel"),
      ),
    );
    area.focus();
  };
  show();
  return box;
}
