// The end of a run's console, with a search that stays where it is while the run goes on.

import { h, toggle } from "./dom.js";

export class Console {
  constructor(place) {
    Object.assign(this, { place, text: "", only: false, at: null });
    this.pre = h("pre", { className: "console", tabIndex: 0, ariaLabel: "Console output" });
  }

  tools() {
    this.search = h("input", {
      type: "search",
      placeholder: "Search the console",
      ariaLabel: "Search the console",
      oninput: () => ((this.at = null), this.draw(), this.go(0)),
      onkeydown: (event) => {
        if (event.key === "Enter") this.go(event.shiftKey ? -1 : 1);
        if (event.key !== "Escape") return;
        this.search.value = "";
        this.draw();
      },
    });
    this.count = h("span", { className: "faint small num", role: "status" });
    const button = (text, title, by) => h("button", { className: "quiet tool", title, ariaLabel: title, onclick: () => this.go(by) }, text);
    this.buttons = [button("↑", "Previous match (Shift+Enter)", -1), button("↓", "Next match (Enter)", 1)];
    const only = toggle(this, "only", "only matching lines", () => (this.draw(), this.go(0)));
    return [h("span", { className: "grow" }), this.search, this.count, this.buttons, only];
  }

  show({ text, cut }) {
    const all = (cut ? "…\n" : "") + text,
      before = this.text;
    if (all === before && this.place.childElementCount) return;
    this.text = all;
    if (!text) return this.place.replaceChildren(h("div", { className: "empty" }, "No console output yet."));
    if (!this.pre.isConnected) this.place.replaceChildren(this.pre);
    const isBelow = this.pre.scrollHeight - this.pre.scrollTop - this.pre.clientHeight < 30,
      { scrollTop } = this.pre;
    // What is marked or selected in the text stays, where there is only more of it.
    if (before && all.startsWith(before) && !this.search.value) this.pre.append(all.slice(before.length));
    else {
      // Lines that fell out at the start move the match.
      const moved = this.at === null || all.startsWith(before) ? 0 : Math.max(before.indexOf(all.slice(2, 200)) - 2, 0);
      if (this.at !== null) this.at -= moved;
      this.draw();
    }
    this.pre.scrollTop = isBelow && this.at === null ? this.pre.scrollHeight : scrollTop;
  }

  // Matches are marks in the text; their places in it tell them apart.
  draw() {
    const wanted = this.search.value.toLowerCase();
    this.marks = [];
    if (!wanted) this.at = null;
    for (const button of this.buttons) button.disabled = !wanted;
    const parts = wanted ? this.text.split(/(?<=\n)/).flatMap((line, i, lines) => this.marked(line, wanted, i, lines)) : [this.text];
    this.pre.replaceChildren(...parts);
    this.say();
  }

  marked(line, wanted, i, lines) {
    if (i === 0) this.offset = 0;
    const start = this.offset;
    this.offset += lines[i].length;
    const low = line.toLowerCase(),
      parts = [];
    let from = 0;
    for (let at = low.indexOf(wanted); at >= 0; at = low.indexOf(wanted, from)) {
      const mark = h("mark", {}, line.slice(at, at + wanted.length));
      mark.at = start + at;
      this.marks.push(mark);
      parts.push(line.slice(from, at), mark);
      from = at + wanted.length;
    }
    return parts.length || !this.only ? [...parts, line.slice(from)] : [];
  }

  // The match after or before the one that is shown; by 0 the last one, which is the newest.
  go(by) {
    if (!this.marks?.length) return this.say();
    const now = this.marks.findIndex((mark) => mark.at === this.at),
      next = now < 0 || by === 0 ? this.marks.length - 1 : (now + by + this.marks.length) % this.marks.length;
    this.at = this.marks[next].at;
    this.say();
    const { pre } = this,
      mark = this.marks[next];
    pre.scrollTop += mark.getBoundingClientRect().top - pre.getBoundingClientRect().top - pre.clientHeight / 2;
  }

  say() {
    const now = this.marks.findIndex((mark) => mark.at === this.at);
    for (const [i, mark] of this.marks.entries()) mark.classList.toggle("now", i === now);
    this.count.textContent = !this.search.value ? "" : this.marks.length ? `${now + 1} of ${this.marks.length}` : "no match";
  }
}
