// Units of metrics by their names. A name that is not known stays bare.

import { bytes, num, percent, scaled } from "./dom.js";

const BY_NAME = [
  [/(^|_)nats(_|$)/, "nats"],
  [/^bits?_per_byte$|^bpb$/, "bits/byte"],
  [/^psnr/, "dB"],
  [/_db$/, "dB"],
  [/^tokens_per_s$/, "tokens/s"],
  [/(_|^)per_s$/, "1/s"],
  [/(^|_)(seconds|secs)$/, "s"],
  [/_ms$/, "ms"],
  [/^(memory|.*_bytes)$/, "B"],
];
// What an item is, and what the loss is measured in, by recipe.
const BY_RECIPE = {
  __proto__: null,
  gpt: { loss: "nats", items_per_s: "blocks/s" },
  ebt: { loss: "nats", items_per_s: "blocks/s" },
  thinker: { loss: "nats", items_per_s: "questions/s" },
  flow: { items_per_s: "images/s" },
  world: { items_per_s: "windows/s" },
};
export const AXES = [
  ["step", "Steps", "steps"],
  ["seconds", "Time", "seconds of training"],
  ["items", "Items", "items"],
  ["tokens", "Tokens", "tokens"],
  ["flops", "FLOPs", "training FLOPs, by the recipe's formula"],
];
export const axisTitle = (axis) => AXES.find(([name]) => name === axis)?.[2] || axis;

export function unitOf(key, recipe = "") {
  const name = key.replace(/^(eval|test)\//, "");
  const own = BY_RECIPE[recipe];
  if (own && Object.hasOwn(own, name)) return own[name];
  if (name === "items_per_s") return "items/s";
  return BY_NAME.find(([pattern]) => pattern.test(name))?.[1] || "";
}

export const SHARES = new Set(["wait", "mfu", "mfu_measured"]);

// A value of a metric as people read it.
export function textOf(key, value, unit = "") {
  if (SHARES.has(key)) return percent(value);
  if (key && unitOf(key) === "B") return bytes(value);
  return `${key?.endsWith("per_s") ? scaled(value) : num(value)} ${unit}`.trim();
}
