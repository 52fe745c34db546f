// The page: requests steps at the chosen rate, draws the frames and shows the controls.

import { Controls, caps } from "./controls.js";

const theme = localStorage.getItem("seedbed-theme");
if (theme) document.documentElement.dataset.theme = theme;

const $ = (id) => document.getElementById(id);
const NAMES = { __proto__: null, nothing: "rollout only", simulator: "+ simulator", recording: "+ recording" };
const IN_FLIGHT = 2; // steps requested before an answer, so that transfer and computation overlap
const MEMORY_EVERY = 4; // steps between two updates of the memory view

const page = { facts: null, controls: null, running: true, reference: "nothing", seed: 0, interval: 33, next: 0, number: 0 };
const asked = new Map(); // number of a message -> when it was sent
const shown = []; // when the last frames were drawn

const backendName = document.querySelector('meta[name="backend"]').content;
const { [backendName === "web" ? "Web" : "Live"]: Backend } = await import(`./${backendName}.js`);
const backend = new Backend({ hello, frame, error, state });
wire();
backend.open();
requestAnimationFrame(tick);

// ---- messages of the backend --------------------------------------------------------------------------------------------

function hello(facts) {
  page.facts = facts;
  asked.clear();
  $("run").textContent = facts.hello;
  document.title = `${facts.hello} · seedbed`;
  $("size").textContent = `${facts.width} × ${facts.height}, ${facts.runtime}`;
  $("about").textContent = facts.about || "";
  $("error").hidden = true;
  for (const id of ["rollout", "reference"]) Object.assign($(id), { width: facts.width, height: facts.height });
  if (!page.controls) {
    page.controls = new Controls(facts.axes, facts, $("rollout"), { left: $("stick-left"), right: $("stick-right") });
    drawAxes();
    drawChoices();
  }
  $("seed").max = facts.num_seeds - 1;
  Object.assign($("level"), { max: facts.max_level || 0, value: facts.level });
  $("level-number").textContent = facts.level.toFixed(2);
  $("anchor").hidden = facts.fixed === true;
  $("level").closest("label").hidden = facts.fixed === true || !facts.max_level;
  $("locked-row").hidden = !facts.noisy;
  $("record").hidden = facts.fixed === true;
  state("ready", true);
  reset(page.seed);
}

function frame(header, images) {
  const sent = asked.get(header.id);
  asked.delete(header.id);
  $("veil").hidden = true;
  const memory = images.filter((one) => one.kind === "memory");
  for (const one of images) if (one.kind !== "memory") paint($(one.kind), one.image);
  if (memory.length) drawMemory(memory);
  const reference = images.some((one) => one.kind === "reference");
  $("reference-figure").hidden = !reference;
  $("views").dataset.count = reference ? 2 : 1;
  if (reference) $("difference").textContent = difference();
  measure(header, sent);
  drawValues(header.action);
  showStatus(header);
}

function showStatus(header) {
  const recording = header.recorded !== null && header.recorded !== undefined;
  $("record").setAttribute("aria-pressed", recording);
  $("record").firstChild.textContent = recording ? `Save ${header.recorded} frames ` : "Record ";
  if (header.saved) {
    note(`${header.num_frames} frames in ${header.saved} · look at them: seedbed data inspect ${header.saved}`);
  }
  if (header.ended) {
    pause(true);
    note("the recording ends here; reset, or choose another start");
  }
}

function error(text, fatal, number) {
  if (number !== undefined) asked.delete(number);
  if (fatal) {
    $("error").textContent = text;
    $("error").hidden = false;
    $("veil").hidden = true;
    state("not playing", false);
  } else {
    note(text);
  }
}

function state(word, good) {
  $("state").textContent = word;
  $("state").className = good ? "on" : "off";
  if (!good) asked.clear();
}

// ---- requests ----------------------------------------------------------------------------------------------------------

function send(message) {
  const id = ++page.number;
  asked.set(id, performance.now());
  backend.send({ ...message, id });
}

function tick(now) {
  requestAnimationFrame(tick);
  if (!page.facts || !page.running || asked.size >= IN_FLIGHT || now < page.next) return;
  // A late frame is not caught up: the rollout slows down instead of jumping.
  page.next = Math.max(page.next + page.interval, now - page.interval);
  step();
}

function step() {
  const controls = page.controls.next();
  $("warning").hidden = page.reference === "recording" || !page.controls.isUnlike(controls);
  const wanted = $("memory-card").open && (!page.running || page.number % MEMORY_EVERY === 0);
  send({ do: "step", controls, memory: wanted });
}

function reset(seed) {
  page.seed = Math.min(Math.max(0, seed), page.facts.num_seeds - 1);
  page.controls.value.fill(0);
  $("seed").value = page.seed;
  $("seed-number").textContent = `${page.seed + 1} of ${page.facts.num_seeds}`;
  send({ do: "reset", seed: page.seed, reference: page.reference, memory: $("memory-card").open });
}

function pause(stop = page.running) {
  page.running = !stop;
  $("pause").firstChild.textContent = page.running ? "Pause " : "Resume ";
  $("pause").setAttribute("aria-label", page.running ? "pause" : "resume");
}

function record() {
  const recording = $("record").getAttribute("aria-pressed") === "true";
  send(recording ? { do: "save" } : { do: "record", of: page.reference === "simulator" ? "simulator" : "rollout" });
  if (!recording) note(page.reference === "simulator" ? "recording what the simulator shows" : "recording the rollout");
}

function wire() {
  $("pause").onclick = () => pause();
  $("step").onclick = () => { pause(true); step(); };
  $("reset").onclick = () => reset(page.seed);
  $("record").onclick = record;
  $("anchor").onclick = () => send({ do: "anchor", memory: $("memory-card").open });
  $("seed").oninput = () => reset(Number($("seed").value));
  $("seed-back").onclick = () => reset(page.seed - 1);
  $("seed-next").onclick = () => reset(page.seed + 1);
  $("level").oninput = () => {
    $("level-number").textContent = Number($("level").value).toFixed(2);
    send({ do: "set", level: Number($("level").value) });
  };
  $("locked").onchange = () => send({ do: "set", locked: $("locked").checked });
  $("memory-card").ontoggle = () => { if (page.facts && !page.running) send({ do: "set", memory: true }); };
  $("speed").onchange = pace;
  returnFocus();
  const keys = { Space: () => pause(), Period: $("step").onclick, Backspace: $("reset").onclick, Enter: record };
  addEventListener("keydown", (event) => {
    const onButton = event.target.tagName === "BUTTON" && (event.code === "Space" || event.code === "Enter");
    const taken = onButton || ["INPUT", "SELECT", "SUMMARY"].includes(event.target.tagName);
    if (!page.facts || event.repeat || taken || event.ctrlKey || event.metaKey || event.altKey || !keys[event.code]) return;
    if (event.code === "Enter" && $("record").hidden) return;
    event.preventDefault();
    keys[event.code]();
  });
}

// A clicked control returns the keyboard focus to the rollout; one reached by keyboard keeps it.
function returnFocus() {
  let pointed = false;
  addEventListener("pointerdown", () => { pointed = true; }, true);
  addEventListener("keydown", () => { pointed = false; }, true);
  const focus = () => { if (pointed) $("rollout").focus({ preventScroll: true }); };
  addEventListener("change", focus);
  addEventListener("click", (event) => { if (event.target.closest("button, summary")) focus(); });
}

function pace() {
  page.interval = Number($("speed").value);
}

// ---- drawing ------------------------------------------------------------------------------------------------------------

function paint(canvas, image) {
  const context = canvas.getContext("2d", { willReadFrequently: canvas.id !== "memory" });
  if (image instanceof ImageData) context.putImageData(image, 0, 0);
  else {
    context.drawImage(image, 0, 0);
    image.close();
  }
}

// PSNR between the two views.
function difference() {
  const [a, b] = ["rollout", "reference"].map((id) => $(id).getContext("2d").getImageData(0, 0, $(id).width, $(id).height).data);
  let sum = 0;
  for (let i = 0; i < a.length; i += 4) for (let c = 0; c < 3; c++) sum += (a[i + c] - b[i + c]) ** 2;
  const mean = sum / (0.75 * a.length);
  return mean ? `${(10 * Math.log10(65025 / mean)).toFixed(1)} dB` : "equal";
}

function measure(header, sent) {
  const now = performance.now();
  shown.push(now);
  while (shown.length && shown[0] < now - 1000) shown.shift();
  $("fps").textContent = page.running ? shown.length : "paused";
  if (sent !== undefined) $("latency").textContent = `${(now - sent).toFixed(0)} ms`;
  if (header.ms !== undefined) $("network").textContent = `${header.ms.toFixed(1)} ms`;
  $("frame").textContent = header.steps;
}

function drawChoices() {
  $("references").replaceChildren(...page.facts.references.map((name) => {
    const button = document.createElement("button");
    button.textContent = NAMES[name] || name;
    button.dataset.reference = name;
    button.setAttribute("role", "radio");
    button.setAttribute("aria-checked", name === page.reference);
    button.onclick = () => choose(name);
    return button;
  }));
  $("references").hidden = page.facts.references.length < 2;
  const usual = 1000 * page.facts.seconds;
  const paces = [[usual, `as recorded, ${(1000 / usual).toFixed(0)} fps`], [2 * usual, "half"], [0, "as fast as it goes"]];
  $("speed").replaceChildren(...paces.map(([value, text]) => new Option(text, value)));
  pace();
}

function choose(name) {
  page.reference = name;
  $("anchor").disabled = name === "nothing";
  $("reference-name").textContent = name;
  for (const button of $("references").children) button.setAttribute("aria-checked", button.dataset.reference === name);
  reset(page.seed);
  note({ simulator: "the same controls move both", recording: "recorded controls apply; the reference shows the recorded frames" }[name] || "");
}

function drawAxes() {
  const { axes } = page.facts;
  $("axes").replaceChildren(...axes.map((axis, n) => {
    const row = document.createElement("div");
    row.className = axis.dead ? "axis dead" : "axis";
    const title = document.createElement("b");
    title.textContent = axis.name;
    title.title = axis.dead ? "never moved in the recording" : `${axis.name} in ${axis.unit || "its own unit"} per frame`;
    const track = document.createElement("div");
    track.className = "track";
    const value = document.createElement("output");
    row.append(title, track, value);
    if (!axis.is_time) {
      const marks = [["zero", 0], ["tick", axis.half[0]], ["tick", axis.half[1]], ["tick", axis.full[0]], ["tick", axis.full[1]]];
      marks.push(["edge", -axis.limit], ["edge", axis.limit]);
      for (const [kind, at] of marks) {
        const mark = document.createElement("i");
        mark.className = kind;
        mark.style.left = `${position(axis, at)}%`;
        track.append(mark);
      }
      const fill = document.createElement("i");
      fill.className = "fill";
      track.append(fill);
      for (const side of page.controls.bound[n]) {
        const key = document.createElement("kbd");
        key.textContent = caps(side);
        track.append(key);
      }
    }
    return row;
  }));
}

// Position of a value on its track in percent; a tenth on both sides lies beyond the 99th percentile.
function position(axis, value) {
  return 50 + 50 * Math.max(-1, Math.min(1, value / (1.25 * (axis.limit || 1))));
}

function drawValues(action) {
  page.facts.axes.forEach((axis, n) => {
    const row = $("axes").children[n];
    const unit = axis.unit ? ` ${axis.unit}` : "";
    const digits = Math.abs(action[n]) < 10 ? 3 : 1;
    row.querySelector("output").textContent = `${(Math.round(1000 * action[n]) / 1000 || 0).toFixed(digits)}${unit}`;
    const fill = row.querySelector(".fill");
    if (!fill) return;
    const [low, high] = [0, position(axis, action[n]) - 50].sort((a, b) => a - b);
    fill.style.left = `${50 + low}%`;
    fill.style.width = `${high - low}%`;
    fill.classList.toggle("over", Math.abs(action[n]) > axis.limit * 1.0001);
  });
}

function drawMemory(strips) {
  const home = $("memory");
  while (home.children.length < strips.length) {
    const strip = document.createElement("div");
    strip.className = "strip";
    strip.append(document.createElement("p"), document.createElement("canvas"));
    home.append(strip);
  }
  strips.forEach((one, n) => {
    const [text, canvas] = home.children[n].children;
    const [height, width] = [one.image.height, one.image.width / one.num];
    text.textContent = `${one.num} frame${one.num > 1 ? "s" : ""} of ${width} × ${height}`;
    if (canvas.width !== one.image.width) Object.assign(canvas, { width: one.image.width, height });
    paint(canvas, one.image);
  });
}

function note(text) {
  $("note").textContent = text;
}
