// DOM elements, number formats and requests. Text is always inserted as text: no markup is parsed.

const SVG = "http://www.w3.org/2000/svg";

function fill(el, attributes, children) {
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) el.addEventListener(key.slice(2), value);
    else if (key === "style") Object.assign(el.style, value);
    else if (key in el && !(el instanceof SVGElement) && key !== "list" && key !== "role") el[key] = value;
    else el.setAttribute(key, value === true ? "" : value);
  }
  el.append(...children.flat(3).filter((c) => c !== null && c !== undefined && c !== false));
  return el;
}

export const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
export const s = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

export async function get(path) {
  const answer = await fetch(path, { headers: { accept: "application/json" } });
  const value = await answer.json().catch(() => ({ error: `the server answered ${answer.status}` }));
  if (!answer.ok) throw new Error(value.error || `the server answered ${answer.status}`);
  return value;
}

export async function post(path, value) {
  const answer = await fetch(path, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(value),
  });
  const text = await answer.text();
  let read;
  try {
    read = JSON.parse(text);
  } catch {
    read = { error: text.trim() };
  }
  if (!answer.ok) throw new Error(read.error || `the server answered ${answer.status}`);
  return read;
}

export const runPath = (name) => `/run/${encodeURIComponent(name)}`;
export const apiPath = (name, part = "") => `/api/runs/${encodeURIComponent(name)}${part}`;

const isNumber = (v) => typeof v === "number" && Number.isFinite(v);

export function num(value, digits = 4) {
  if (!isNumber(value)) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  if (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e5)) return value.toExponential(Math.max(digits - 2, 1));
  return value.toFixed(digits);
}

export function scaled(value) {
  if (!isNumber(value)) return "–";
  for (const suffix of ["", "k", "M", "G"]) {
    if (Math.abs(value) < 999.5) return `${Number(value.toPrecision(3))}${suffix}`;
    value /= 1000;
  }
  return `${value.toPrecision(3)}T`;
}

export function duration(seconds) {
  if (!isNumber(seconds)) return "–";
  const total = Math.max(Math.round(seconds), 0);
  const [hours, minutes, rest] = [Math.floor(total / 3600), Math.floor(total / 60) % 60, total % 60];
  const two = (n) => String(n).padStart(2, "0");
  if (hours >= 48) return `${Math.floor(hours / 24)}d ${two(hours % 24)}h`;
  return hours ? `${hours}:${two(minutes)}:${two(rest)}` : `${minutes}:${two(rest)}`;
}

export function bytes(value) {
  if (!isNumber(value)) return "–";
  for (const [unit, size, digits] of [
    ["kB", 1e3, 0],
    ["MB", 1e6, 0],
    ["GB", 1e9, 1],
  ]) {
    if (value < 999.5 * size) return `${(value / size).toFixed(digits)} ${unit}`;
  }
  return `${(value / 1e12).toFixed(1)} TB`;
}

export function age(created) {
  const seconds = (Date.now() - Date.parse(created)) / 1000;
  if (!isNumber(seconds)) return "–";
  for (const [unit, size] of [
    ["d", 86400],
    ["h", 3600],
    ["m", 60],
  ]) {
    if (seconds >= size) return `${Math.floor(seconds / size)}${unit}`;
  }
  return "now";
}

export const percent = (value, digits = 1) => (isNumber(value) ? `${(100 * value).toFixed(digits)} %` : "–");

export function status(word) {
  return h("span", { className: `status ${String(word).split(" ")[0]}` }, word || "–");
}

// A loss curve as a thumbnail; `tone` is the colour of the run's status.
export function spark(values, tone) {
  const known = (values || []).filter(isNumber);
  if (known.length < 2) return h("span", { className: "faint small" }, known.length ? "one row" : "no rows yet");
  const constant = known.every((v) => v === known[0]);
  // The first steps of a run are far above all others: the largest tenth may be clipped.
  const low = Math.min(...known),
    high = [...known].sort((a, b) => a - b)[Math.floor((known.length < 12 ? 1 : 0.9) * (known.length - 1))],
    span = high - low || 1;
  const at = (v, i) => [(i * 124) / (known.length - 1), constant ? 13 : Math.max(24 - (22 * (v - low)) / span, 0)];
  const path = known
    .map(
      (v, i) =>
        `${i ? "L" : "M"}${at(v, i)
          .map((n) => n.toFixed(1))
          .join(" ")}`,
    )
    .join("");
  const [x, y] = at(known.at(-1), known.length - 1);
  const title = `loss ${num(known[0])} → ${num(known.at(-1))}`;
  return s(
    "svg",
    { class: `spark ${tone}`, viewBox: "0 0 124 26", preserveAspectRatio: "none", role: "img", "aria-label": title },
    s("path", { d: path, "vector-effect": "non-scaling-stroke" }),
    s("circle", { cx: x, cy: y, r: 2.2 }),
  );
}

export const tone = (word) =>
  word === "running" ? "live" : ["nan", "diverged", "failed", "damaged"].includes(word) ? "bad" : "still";

export function card(title, extra, body, attributes = {}) {
  return h("section", { className: "card", ...attributes }, h("header", {}, h("h2", {}, title), ...[extra].flat()), body);
}

export function command(text) {
  const button = h(
    "button",
    {
      className: "quiet",
      title: "Copy",
      onclick: async () => {
        await navigator.clipboard.writeText(text);
        button.textContent = "copied";
        setTimeout(() => (button.textContent = "copy"), 1500);
      },
    },
    "copy",
  );
  return h("div", { className: "command" }, h("code", { tabIndex: 0 }, text), button);
}

// Buttons of which one is pressed.
export function segments(label, choices, chosen, choose) {
  const buttons = choices.map(([value, text]) =>
    h(
      "button",
      {
        type: "button",
        ariaPressed: String(value === chosen),
        onclick: () => {
          for (const [i, button] of buttons.entries()) button.ariaPressed = String(choices[i][0] === value);
          choose(value);
        },
      },
      text,
    ),
  );
  return h("div", { className: "segments", role: "group", ariaLabel: label }, buttons);
}

export function problem(error) {
  return h("div", { className: "say bad", role: "alert" }, error.message || String(error));
}

export function enlarge(src) {
  const dialog = h(
    "dialog",
    { onclick: () => dialog.close(), onclose: () => dialog.remove() },
    h("img", { src, alt: "enlarged", onload: (event) => event.target.classList.toggle("pixels", event.target.naturalWidth < innerWidth / 2) }),
  );
  document.body.append(dialog);
  dialog.showModal();
}

// A switch of one key of `look`; changes are drawn at once.
export function toggle(look, key, text, draw) {
  const button = h(
    "button",
    {
      className: "chip",
      ariaPressed: String(look[key]),
      onclick: () => {
        look[key] = !look[key];
        button.ariaPressed = String(look[key]);
        draw();
      },
    },
    text,
  );
  return button;
}

// The slider of `look.smooth`; curves are redrawn after a pause.
export function smoothing(look, draw) {
  let later;
  const amount = h("span", { className: "num soft", style: { width: "30px" } }, look.smooth.toFixed(2));
  const slider = h("input", {
    type: "range",
    min: 0,
    max: 0.99,
    step: 0.01,
    value: look.smooth,
    ariaLabel: "Smoothing",
    style: { width: "110px" },
    oninput: () => {
      look.smooth = Number(slider.value);
      amount.textContent = look.smooth.toFixed(2);
      clearTimeout(later);
      later = setTimeout(draw, 120);
    },
  });
  return h("label", { className: "bar small soft" }, "smooth", slider, amount);
}
