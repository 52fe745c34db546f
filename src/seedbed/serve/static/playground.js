// The playground: a prompt, the recipe's sample options, and the output as it is generated.

import { enlarge, h, problem, runPath } from "./dom.js";

const RANGES = {
  __proto__: null,
  temperature: [0, 2, 0.05],
  top_p: [0.05, 1, 0.01],
  tokens: [1, 1000, 1],
  optimize_steps: [1, 64, 1],
  best_of: [1, 16, 1],
  num: [1, 16, 1],
};
const TITLES = {
  __proto__: null,
  tokens: "tokens",
  temperature: "temperature",
  top_k: "top k (0: all)",
  top_p: "top p",
  seed: "seed",
  optimize_steps: "optimisation steps",
  best_of: "best of",
  early_stop: "stop early below",
  num: "number",
};

export async function open(place, name) {
  document.title = `${name} · playground · seedbed`;
  const page = new PlaygroundPage(place, name);
  page.build();
  page.connect();
  return () => {
    page.closed = true;
    if (page.socket.readyState === WebSocket.OPEN) page.socket.close();
  };
}

class PlaygroundPage {
  constructor(place, name) {
    Object.assign(this, { place, name, fields: {}, busy: false });
  }

  build() {
    this.output = h(
      "div",
      { className: "card output", tabIndex: 0, ariaLive: "polite" },
      h("span", { className: "faint" }, "Loading the model…"),
    );
    this.prompt = h("textarea", {
      placeholder: "Write a prompt; the model continues it.",
      ariaLabel: "Prompt",
      rows: 3,
      onkeydown: (e) => {
        if (e.key === "Enter" && (e.ctrlKey || e.metaKey)) {
          e.preventDefault();
          this.request();
        }
      },
    });
    this.button = h(
      "button",
      { className: "primary", disabled: true, onclick: () => (this.busy ? this.stop() : this.request()) },
      "Generate",
    );
    this.facts = h("span", { className: "faint small num", role: "status" });
    this.panel = h("div", { className: "options" });
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
        { className: "playground" },
        h(
          "div",
          { className: "stack" },
          this.output,
          (this.form = h(
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
      `${location.protocol === "https:" ? "wss" : "ws"}://${location.host}/api/runs/${encodeURIComponent(this.name)}/playground`,
    );
    this.socket.onopen = () => {
      if (this.closed) return this.socket.close();
      lamp.className = "lamp on";
      lamp.textContent = "live";
    };
    this.socket.onmessage = (message) => this.receive(JSON.parse(message.data));
    this.socket.onclose = () => {
      if (this.closed || this.final) return;
      lamp.className = "lamp off";
      lamp.textContent = "not connected";
      this.finish();
      this.button.disabled = true;
      setTimeout(async () => {
        await fetch("/").catch(() => {});
        if (!this.closed) this.connect();
      }, 2000);
    };
  }

  receive(message) {
    if (message.ready) return this.ready(message.ready);
    if (message.wait) this.facts.textContent = message.wait;
    if (message.piece !== undefined) this.add(message.piece);
    if (message.error) {
      this.final = message.final;
      this.finish();
      (message.final ? this.output : this.answer).replaceChildren(problem(new Error(message.error)));
    }
    if (message.end) this.end(message.end);
  }

  ready({ options, device, recipe }) {
    this.button.disabled = false;
    if (Object.keys(this.fields).length) return;
    this.output.replaceChildren(h("span", { className: "faint" }, `${recipe}, on ${device}. Its best checkpoint is loaded.`));
    if (!("prompt" in options)) this.prompt.hidden = true;
    for (const [key, value] of Object.entries(options)) if (key !== "prompt") this.panel.append(this.optionField(key, value));
    if (!this.panel.children.length) this.panel.append(h("span", { className: "soft" }, "This recipe has no options."));
    this.prompt.focus();
  }

  optionField(key, value) {
    const [low, high, step] = RANGES[key] || [];
    const field = h("input", {
      type: typeof value === "number" ? "number" : "text",
      step: "any",
      value: value ?? "",
      placeholder: value === null ? "default" : "",
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
    this.fields[key] = { field, value };
    field.name = key;
    return h("label", {}, TITLES[key] || key.replaceAll("_", " "), field, slider);
  }

  options() {
    const out = { __proto__: null };
    for (const [key, { field, value }] of Object.entries(this.fields)) {
      if (field.value === "" || field.value === String(value)) continue;
      out[key] = Number.isFinite(Number(field.value)) ? Number(field.value) : field.value;
    }
    if (!this.prompt.hidden && this.prompt.value) out.prompt = this.prompt.value;
    // Text is streamed only for a request with options; the default seed changes nothing.
    if (!Object.keys(out).length && "seed" in this.fields) out.seed = Number(this.fields.seed.value ?? 1);
    return out;
  }

  request() {
    if (this.busy || this.button.disabled) return;
    this.busy = true;
    this.began = performance.now();
    this.numCharacters = 0;
    this.button.textContent = "Stop";
    this.button.classList.remove("primary");
    this.answer = h("div", {});
    this.words = h("span", {});
    this.answer.append(this.words, h("span", { className: "caret" }));
    this.output.replaceChildren(this.answer);
    this.socket.send(JSON.stringify({ request: this.options() }));
  }

  stop() {
    this.socket.send(JSON.stringify({ stop: true }));
  }

  add(piece) {
    this.words.append(piece);
    this.numCharacters += piece.length;
    this.facts.textContent = `${this.numCharacters} characters, ${((1000 * this.numCharacters) / (performance.now() - this.began)).toFixed(0)}/s`;
    this.output.scrollTop = this.output.scrollHeight;
  }

  end({ text, files = [], stopped, seconds }) {
    if (text) this.add(text);
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
    else if (seconds) this.facts.textContent = `${this.numCharacters} characters in ${seconds.toFixed(1)} s`;
    this.finish();
  }

  finish() {
    this.busy = false;
    this.button.textContent = "Generate";
    this.button.classList.add("primary");
    this.output.querySelector(".caret")?.remove();
  }
}
