// The playground: a prompt, the options that the recipe knows, and its words as they come.

import { enlarge, h, problem, runPath } from "./dom.js";

const RANGES = {
  temperature: [0, 2, 0.05],
  top_p: [0.05, 1, 0.01],
  tokens: [1, 1000, 1],
  think: [1, 64, 1],
  best_of: [1, 16, 1],
  num: [1, 16, 1],
};
const TITLES = {
  tokens: "tokens",
  temperature: "temperature",
  top_k: "top k (0: all)",
  top_p: "top p",
  seed: "seed",
  think: "thinking steps",
  best_of: "best of",
  early_stop: "stop early below",
  num: "how many",
};

export async function open(place, name) {
  document.title = `${name} · playground · seedbed`;
  const page = new Talk(place, name);
  page.build();
  page.connect();
  return () => {
    page.closed = true;
    if (page.socket.readyState === WebSocket.OPEN) page.socket.close();
  };
}

class Talk {
  constructor(place, name) {
    Object.assign(this, { place, name, dials: {}, busy: false });
  }

  build() {
    this.paper = h(
      "div",
      { className: "card paper", tabIndex: 0, ariaLive: "polite" },
      h("span", { className: "faint" }, "Loading the model…"),
    );
    this.prompt = h("textarea", {
      placeholder: "Write the beginning; the model goes on.",
      ariaLabel: "Prompt",
      rows: 3,
      onkeydown: (e) => {
        if (e.key === "Enter" && (e.ctrlKey || e.metaKey)) {
          e.preventDefault();
          this.ask();
        }
      },
    });
    this.button = h(
      "button",
      { className: "primary", disabled: true, onclick: () => (this.busy ? this.stop() : this.ask()) },
      "Generate",
    );
    this.facts = h("span", { className: "faint small num", role: "status" });
    this.panel = h("div", { className: "dials" });
    this.place.append(
      h(
        "div",
        { className: "crumbs" },
        h("a", { href: "/" }, "Runs"),
        "›",
        h("a", { href: runPath(this.name) }, this.name),
        h("span", {}, "› playground"),
      ),
      h("div", { className: "head" }, h("h1", {}, "Playground")),
      h(
        "div",
        { className: "talk" },
        h(
          "div",
          { className: "stack" },
          this.paper,
          (this.asking = h(
            "div",
            { className: "card", style: { padding: "12px" } },
            this.prompt,
            h(
              "div",
              { className: "bar", style: { marginTop: "8px" } },
              this.button,
              h("span", { className: "faint small" }, "Ctrl+Enter"),
              h("span", { className: "grow" }),
              this.facts,
            ),
          )),
        ),
        h("div", { className: "card", style: { padding: "14px 16px" } }, this.panel),
      ),
    );
  }

  connect() {
    const lamp = document.getElementById("lamp");
    this.socket = new WebSocket(
      `${location.protocol === "https:" ? "wss" : "ws"}://${location.host}/api/runs/${encodeURIComponent(this.name)}/talk`,
    );
    this.socket.onopen = () => {
      if (this.closed) return this.socket.close();
      lamp.className = "lamp on";
      lamp.textContent = "live";
    };
    this.socket.onmessage = (message) => this.hear(JSON.parse(message.data));
    this.socket.onclose = () => {
      if (this.closed || this.final) return;
      lamp.className = "lamp off";
      lamp.textContent = "not connected";
      this.rest();
      this.button.disabled = true;
      setTimeout(async () => {
        await fetch("/").catch(() => {});
        if (!this.closed) this.connect();
      }, 2000);
    };
  }

  hear(said) {
    if (said.ready) return this.ready(said.ready);
    if (said.wait) this.facts.textContent = said.wait;
    if (said.piece !== undefined) this.add(said.piece);
    if (said.error) {
      this.final = said.final;
      this.rest();
      (said.final ? this.paper : this.answer).replaceChildren(problem(new Error(said.error)));
    }
    if (said.end) this.end(said.end);
  }

  ready({ options, device, recipe }) {
    this.button.disabled = false;
    if (Object.keys(this.dials).length) return;
    this.paper.replaceChildren(h("span", { className: "faint" }, `${recipe}, on ${device}. Its best checkpoint is loaded.`));
    if (!("prompt" in options)) this.prompt.hidden = true;
    for (const [key, value] of Object.entries(options)) if (key !== "prompt") this.panel.append(this.dial(key, value));
    if (!this.panel.children.length) this.panel.append(h("span", { className: "soft" }, "This recipe has no options."));
    this.prompt.focus();
  }

  dial(key, value) {
    const [low, high, step] = RANGES[key] || [];
    const field = h("input", {
      type: typeof value === "number" ? "number" : "text",
      step: "any",
      value: value ?? "",
      placeholder: value === null ? "as trained" : "",
    });
    const slider =
      low === undefined
        ? null
        : h("input", {
            type: "range",
            min: low,
            max: Math.max(high, value || 0),
            step,
            value: value ?? low,
            ariaLabel: TITLES[key] || key,
            oninput: () => (field.value = slider.value),
          });
    if (slider) field.oninput = () => (slider.value = field.value);
    this.dials[key] = { field, value };
    field.name = key;
    return h("label", {}, TITLES[key] || key.replaceAll("_", " "), field, slider);
  }

  options() {
    const out = {};
    for (const [key, { field, value }] of Object.entries(this.dials)) {
      if (field.value === "" || field.value === String(value)) continue;
      out[key] = Number.isFinite(Number(field.value)) ? Number(field.value) : field.value;
    }
    if (!this.prompt.hidden && this.prompt.value) out.prompt = this.prompt.value;
    // An answer in words comes piece by piece only when something was asked; the seed says nothing new.
    if (!Object.keys(out).length && "seed" in this.dials) out.seed = Number(this.dials.seed.value ?? 1);
    return out;
  }

  ask() {
    if (this.busy || this.button.disabled) return;
    this.busy = true;
    this.began = performance.now();
    this.numLetters = 0;
    this.button.textContent = "Stop";
    this.button.classList.remove("primary");
    this.answer = h("div", {});
    this.words = h("span", {});
    this.answer.append(this.words, h("span", { className: "caret" }));
    this.paper.replaceChildren(this.answer);
    this.socket.send(JSON.stringify({ ask: this.options() }));
  }

  stop() {
    this.socket.send(JSON.stringify({ stop: true }));
  }

  add(piece) {
    this.words.append(piece);
    this.numLetters += piece.length;
    this.facts.textContent = `${this.numLetters} letters, ${((1000 * this.numLetters) / (performance.now() - this.began)).toFixed(0)}/s`;
    this.paper.scrollTop = this.paper.scrollHeight;
  }

  end({ text, files = [], stopped, seconds }) {
    if (text) this.words.append(text);
    if (files.length)
      this.answer.append(
        h(
          "div",
          { className: "pictures" },
          files.map((src) =>
            /\.(mp4|webm)$/i.test(src)
              ? h("video", { src, controls: true, loop: true })
              : h("img", { src: `${src}?${Date.now()}`, alt: "sample", onclick: () => enlarge(src) }),
          ),
        ),
      );
    if (stopped) this.words.append(h("span", { className: "faint" }, " (stopped)"));
    else if (seconds) this.facts.textContent = `${this.numLetters} letters in ${seconds.toFixed(1)} s`;
    this.rest();
  }

  rest() {
    this.busy = false;
    this.button.textContent = "Generate";
    this.button.classList.add("primary");
    this.paper.querySelector(".caret")?.remove();
  }
}
