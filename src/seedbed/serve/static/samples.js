// What a run generated, step by step: a slider over text, pictures and films.

import { enlarge, h, num } from "./dom.js";

const FILM = /\.(mp4|webm)$/i,
  PICTURE = /\.(png|jpe?g|gif|webp)$/i;
// Smaller pictures are enlarged by whole factors, so that a pixel stays a square.
const SMALL = 360;

export class Samples {
  constructor(place, tools) {
    Object.assign(this, { place, tools, found: [], at: -1, slider: null, label: h("span", { className: "num soft" }) });
    this.slider = h("input", { type: "range", min: 0, ariaLabel: "Sample", className: "grow", oninput: () => this.choose(Number(this.slider.value)) });
  }

  // The newest sample is shown until an earlier one is chosen.
  show(found) {
    const follow = this.at >= this.found.length - 1,
      isSame = JSON.stringify(found) === JSON.stringify(this.found);
    if (isSame && this.place.childElementCount) return;
    this.found = found;
    if (!found.length) {
      this.tools.replaceChildren();
      const how = h("code", {}, "every.sample");
      return this.place.replaceChildren(h("div", { className: "empty" }, "No samples yet. ", how, " says how often a run shows what it can do."));
    }
    this.slider.max = found.length - 1;
    if (!this.label.isConnected || this.slider.isConnected !== found.length > 1)
      this.tools.replaceChildren(found.length > 1 ? this.slider : h("span", { className: "grow" }), this.label);
    if (follow) this.choose(found.length - 1);
    else this.say();
  }

  say() {
    const { step } = this.found[this.at],
      text = `step ${num(step)} · ${this.at + 1} of ${this.found.length}`;
    this.label.textContent = text;
    this.slider.value = this.at;
    this.slider.setAttribute("aria-valuetext", text);
  }

  choose(at) {
    this.at = at;
    this.say();
    const { step, files, text } = this.found[at];
    const stem = (src) => src.replace(/\.\w+$/, "");
    const films = files.filter((src) => FILM.test(src)).map(stem);
    // A film that is also there as GIF is shown once.
    const media = files.filter((src) => !(/\.gif$/i.test(src) && films.includes(stem(src)))).map((src) => medium(src, step));
    this.place.replaceChildren(
      ...(media.length ? [h("div", { className: "pictures" }, media)] : []),
      ...(text ? [h("pre", { className: "sample-text", tabIndex: 0 }, text)] : []),
    );
  }
}

function medium(src, step) {
  const name = decodeURIComponent(src.split("/").at(-1));
  if (FILM.test(src)) {
    const film = h("video", { src, controls: true, loop: true, muted: true, ariaLabel: `${name} at step ${step}`, onloadedmetadata: () => fit(film, film.videoWidth) });
    return film;
  }
  if (!PICTURE.test(src)) return h("a", { href: src, target: "_blank" }, name);
  const picture = h("img", { src, alt: `${name} at step ${step}`, loading: "lazy", onload: () => fit(picture, picture.naturalWidth) });
  return h("button", { className: "picture", title: "Enlarge", onclick: () => enlarge(src) }, picture);
}

function fit(one, width) {
  const factor = Math.floor(SMALL / width);
  if (factor < 2) return;
  one.style.width = `${factor * width}px`;
  one.classList.add("pixels");
}
