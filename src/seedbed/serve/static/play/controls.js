// From keys, mouse, fingers and gamepads to one number per axis, inside the range that was recorded.

// What each intent is bound to: keys, a gamepad's stick or button, and a side of the touch screen.
const INTENTS = {
  __proto__: null,
  forward: { keys: ["KeyW"], pad: [1, -1], touch: ["left", "y", -1] },
  back: { keys: ["KeyS"], pad: [1, 1], touch: ["left", "y", 1] },
  left: { keys: ["KeyA"], pad: [0, -1], touch: ["left", "x", -1] },
  right: { keys: ["KeyD"], pad: [0, 1], touch: ["left", "x", 1] },
  up: { keys: ["KeyR"], button: 7 },
  down: { keys: ["KeyF"], button: 6 },
  turnLeft: { keys: ["ArrowLeft"], pad: [2, -1], touch: ["right", "x", -1], drag: ["x", -1] },
  turnRight: { keys: ["ArrowRight"], pad: [2, 1], touch: ["right", "x", 1], drag: ["x", 1] },
  lookUp: { keys: ["ArrowUp"], pad: [3, -1], touch: ["right", "y", -1], drag: ["y", -1] },
  lookDown: { keys: ["ArrowDown"], pad: [3, 1], touch: ["right", "y", 1], drag: ["y", 1] },
  rollLeft: { keys: ["KeyQ"], button: 4 },
  rollRight: { keys: ["KeyE"], button: 5 },
};

// Which intent drives the negative and the positive side of an axis. Body axes: x forward, y left, z up; a positive
// pitch turns the nose down, a positive roll leans to the right.
const AXES = {
  __proto__: null,
  x: ["back", "forward"],
  y: ["right", "left"],
  z: ["down", "up"],
  yaw: ["turnRight", "turnLeft"],
  pitch: ["lookUp", "lookDown"],
  roll: ["rollLeft", "rollRight"],
  forward: ["back", "forward"],
  right: ["left", "right"],
  left: ["right", "left"],
  turn: ["turnLeft", "turnRight"],
  look: ["lookDown", "lookUp"],
};
// Buttons of games, by the words in their names: "upright" is up and right at once.
const BUTTONS = {
  __proto__: null,
  up: { keys: ["KeyW", "ArrowUp"], pad: [1, -1], touch: ["left", "y", -1] },
  down: { keys: ["KeyS", "ArrowDown"], pad: [1, 1], touch: ["left", "y", 1] },
  left: { keys: ["KeyA", "ArrowLeft"], pad: [0, -1], touch: ["left", "x", -1] },
  right: { keys: ["KeyD", "ArrowRight"], pad: [0, 1], touch: ["left", "x", 1] },
  fire: { keys: ["KeyJ"], button: 0, touch: ["right", "x", 1] },
};
const HALF_PRESSED = 0.4;
const CAPS = { __proto__: null, ArrowLeft: "←", ArrowRight: "→", ArrowUp: "↑", ArrowDown: "↓", Space: "␣" };
const DEAD_ZONE = 0.12;
const STICK = 60; // pixels for a whole deflection under a finger
const DRAG = 8; // pixels between two steps for a whole deflection of the mouse
const BEYOND = 2; // how far shift goes

export class Controls {
  constructor(axes, facts, surface, sticks) {
    this.axes = axes;
    this.ramp = facts.ramp || axes.map(() => 1);
    this.joint = facts.joint || null;
    this.buttons = facts.buttons || axes.map(() => false);
    this.oneOf = facts.one_of === true;
    this.bound = bind(axes, this.buttons);
    this.value = axes.map(() => 0);
    this.pressed = new Set();
    this.beyond = false;
    this.drag = { x: 0, y: 0 };
    this.fingers = new Map();
    this.sticks = sticks;
    this.listen(surface);
  }

  listen(surface) {
    addEventListener("keydown", (event) => {
      if (typing(event) || event.ctrlKey || event.metaKey || event.altKey) return;
      this.beyond = event.shiftKey;
      if (!this.uses(event.code)) return;
      this.pressed.add(event.code);
      event.preventDefault();
    });
    addEventListener("keyup", (event) => {
      this.beyond = event.shiftKey;
      this.pressed.delete(event.code);
    });
    addEventListener("blur", () => this.release());
    surface.addEventListener("pointerdown", (event) => this.touchDown(event, surface));
    surface.addEventListener("pointermove", (event) => this.touchMove(event));
    for (const name of ["pointerup", "pointercancel"]) surface.addEventListener(name, (event) => this.touchUp(event));
  }

  uses(code) {
    const words = this.oneOf ? Object.values(BUTTONS) : [];
    return [...this.bound.flat(), ...words].some((side) => side && side.keys.includes(code));
  }

  release() {
    this.pressed.clear();
    this.fingers.clear();
    this.beyond = false;
    this.showSticks();
  }

  touchDown(event, surface) {
    surface.setPointerCapture(event.pointerId);
    surface.focus({ preventScroll: true });
    const box = surface.getBoundingClientRect();
    const kind = event.pointerType === "touch" ? (event.clientX < box.x + box.width / 2 ? "left" : "right") : "drag";
    this.fingers.set(event.pointerId, { kind, x0: event.clientX, y0: event.clientY, x: event.clientX, y: event.clientY });
    this.showSticks();
    event.preventDefault();
  }

  touchMove(event) {
    const finger = this.fingers.get(event.pointerId);
    if (!finger) return;
    if (finger.kind === "drag") {
      this.drag.x += event.clientX - finger.x;
      this.drag.y += event.clientY - finger.y;
    }
    finger.x = event.clientX;
    finger.y = event.clientY;
  }

  touchUp(event) {
    this.fingers.delete(event.pointerId);
    this.showSticks();
  }

  showSticks() {
    for (const side of ["left", "right"]) {
      const finger = [...this.fingers.values()].find((one) => one.kind === side);
      const stick = this.sticks[side];
      stick.hidden = !finger;
      if (!finger) continue;
      const box = stick.parentElement.getBoundingClientRect();
      stick.style.left = `${finger.x0 - box.x}px`;
      stick.style.top = `${finger.y0 - box.y}px`;
    }
  }

  // The controls for one step, in recorded units: deflections move towards what is held by at most 1 / ramp.
  next() {
    const pad = [...(navigator.getGamepads?.() || [])].find((one) => one && one.connected);
    const chosen = this.oneOf ? this.choose(pad) : -1;
    this.value = this.axes.map((axis, n) => {
      if (this.oneOf && !axis.is_time) return n === chosen ? 1 : 0;
      if (axis.is_time || axis.dead) return 0;
      if (this.buttons[n]) return this.held(this.bound[n][1], pad) > HALF_PRESSED ? 1 : 0;
      const [less, more] = this.bound[n];
      const held = this.held(more, pad) - this.held(less, pad);
      const slow = approach(this.value[n], held * (this.beyond ? BEYOND : 1), 1 / Math.max(1, this.ramp[n]));
      const pulled = this.pulled(more) - this.pulled(less);
      return pulled ? clamp(pulled, this.beyond ? BEYOND : 1) : slow;
    });
    this.drag = { x: 0, y: 0 };
    return this.axes.map((axis, n) => (axis.is_time ? axis.scale : this.buttons[n] ? this.value[n] : toRaw(axis, this.value[n])));
  }

  // Where exactly one button was down at any time: the one that names most of what is held, or the one for nothing.
  choose(pad) {
    const held = Object.keys(BUTTONS).filter((word) => this.held(BUTTONS[word], pad) > HALF_PRESSED);
    let best = [-1, 0];
    this.axes.forEach((axis, n) => {
      if (axis.is_time) return;
      const words = wordsOf(axis.name);
      const fits = words ? words.every((word) => held.includes(word)) : this.held(this.bound[n][1], pad) > HALF_PRESSED;
      const score = words ? words.length : 9;
      if (fits && score > best[0]) best = [score, n];
    });
    return best[1];
  }

  held(side, pad) {
    if (!side) return 0;
    if (side.keys.some((code) => this.pressed.has(code))) return 1;
    return Math.max(this.fingered(side), pad ? padded(side, pad) : 0);
  }

  fingered(side) {
    if (!side.touch) return 0;
    const [where, axis, sign] = side.touch;
    const finger = [...this.fingers.values()].find((one) => one.kind === where);
    return finger ? clamp((sign * (finger[axis] - finger[`${axis}0`])) / STICK, 1, 0) : 0;
  }

  pulled(side) {
    return side && side.drag ? Math.max(0, (side.drag[1] * this.drag[side.drag[0]]) / DRAG) : 0;
  }

  // Whether these controls are rarer than 1 % of the recorded ones: on an axis, or all together.
  isUnlike(raw) {
    if (this.axes.some((axis, n) => !axis.is_time && !axis.dead && Math.abs(raw[n]) > axis.limit * 1.0001)) return true;
    if (!this.joint) return false;
    const from = raw.map((value, n) => value - this.joint.mean[n]);
    const distance = this.joint.inverse.reduce((sum, row, i) => sum + from[i] * row.reduce((s, w, j) => s + w * from[j], 0), 0);
    return distance > this.joint.limit;
  }
}

// Half a deflection is the median of that side, a full one its 90th percentile.
export function toRaw(axis, deflection) {
  const side = deflection < 0 ? 0 : 1;
  const size = Math.abs(deflection);
  if (size <= 0.5) return 2 * size * axis.half[side];
  if (size <= 1) return axis.half[side] + (2 * size - 1) * (axis.full[side] - axis.half[side]);
  return size * axis.full[side];
}

// Keys for both sides of every axis; an axis or button of another name gets the next free digits.
export function bind(axes, buttons = []) {
  let digit = 1;
  const spare = () => (digit <= 10 ? { keys: [`Digit${digit++ % 10}`] } : null);
  return axes.map((axis, n) => {
    if (axis.is_time || axis.dead) return [null, null];
    if (buttons[n]) {
      const words = wordsOf(axis.name);
      return [null, words ? (words.length === 1 ? BUTTONS[words[0]] : null) : spare()];
    }
    const named = AXES[axis.name];
    if (named) return named.map((intent) => INTENTS[intent]);
    return [axis.full[0] ? spare() : null, axis.full[1] ? spare() : null];
  });
}

// The words of a button's name: none for "noop", null where it is made of others.
function wordsOf(name) {
  if (name === "noop") return [];
  const words = name.match(/up|down|left|right|fire/g) || [];
  return words.join("") === name && words.length ? words : null;
}

export function caps(side) {
  return side ? side.keys.slice(0, 1).map((code) => CAPS[code] || code.replace(/^(Key|Digit)/, "")).join(" ") : "";
}

function padded(side, pad) {
  if (side.button !== undefined) return pad.buttons[side.button]?.value || 0;
  if (!side.pad) return 0;
  const value = side.pad[1] * (pad.axes[side.pad[0]] || 0);
  return value > DEAD_ZONE ? clamp((value - DEAD_ZONE) / (1 - DEAD_ZONE), 1, 0) : 0;
}

function approach(now, goal, most) {
  return now + clamp(goal - now, most);
}

function clamp(value, high, low = -high) {
  return Math.min(high, Math.max(low, value));
}

// Sliders and lists handle keys themselves.
function typing(event) {
  return ["SELECT", "INPUT"].includes(event.target.tagName);
}
