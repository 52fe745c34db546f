// The filter of the list: `optim.lr>1e-3 status:done|failed recipe:gpt tag:x -archived:yes words`. All terms must hold.

const TERM = /^(-?)([\p{L}_][\p{L}\p{N}_./]*)(>=|<=|!=|[:=<>])(.*)$/u;
const PARTS = /(?:[^\s"]|"[^"]*")+/g;
const UNITS = { __proto__: null, s: 1, m: 60, h: 3600, d: 86400 };

// The terms of an expression: words, or a key with an operator and a value.
export function parse(text) {
  return (text.match(PARTS) || []).map((part) => {
    const [, not, key, op, value] = part.match(TERM) || [];
    const plain = (s) => s.replaceAll('"', "");
    if (key === undefined) return part.length > 1 && part[0] === "-" ? { not: true, word: plain(part.slice(1)).toLowerCase() } : { word: plain(part).toLowerCase() };
    return { not: not === "-", key, op, values: plain(value).split("|") };
  });
}

// A function of a run; `of(run, key)` gives the value of a key, or undefined where the run has none.
export function predicate(text, of) {
  const terms = parse(text);
  return (run) => terms.every((term) => (term.key === undefined ? hasWord(run, term.word) : holds(of(run, term.key), term)) !== Boolean(term.not));
}

// Keys of the expression that no run has.
export const unknown = (text, isKnown) => parse(text).flatMap(({ key }) => (key === undefined || isKnown(key) ? [] : [key]));

const hasWord = (run, word) =>
  [run.name, run.label, run.why, run.title, run.parent, run.sweep, ...(run.tags || [])].some((one) => String(one || "").toLowerCase().includes(word));

function holds(value, { op, values }) {
  const all = Array.isArray(value) ? value : [value];
  if (op === "!=") return !values.some((wanted) => all.some((one) => isEqual(one, wanted)));
  return values.some((wanted) => all.some((one) => compare(one, op, wanted)));
}

function compare(value, op, wanted) {
  if (value === undefined || value === null || value === "") return false;
  if (op === "=") return isEqual(value, wanted);
  // A colon finds parts of texts; numbers are found as they are.
  if (op === ":") return isEqual(value, wanted) || (number(value) === null && String(value).toLowerCase().includes(wanted.toLowerCase()));
  const [x, y] = [number(value), number(wanted)];
  if (x === null || y === null) return false;
  return op === "<" ? x < y : op === "<=" ? x <= y : op === ">" ? x > y : x >= y;
}

function isEqual(value, wanted) {
  const [x, y] = [number(value), number(wanted)];
  return x !== null && y !== null ? x === y : String(value ?? "").toLowerCase() === wanted.toLowerCase();
}

// A number, or a time such as 7d or 2h in seconds; null for anything else.
export function number(value) {
  if (typeof value === "number") return value;
  const text = String(value ?? "").trim(),
    time = text.match(/^(\d+(?:\.\d+)?)([smhd])$/);
  if (time) return Number(time[1]) * UNITS[time[2]];
  return text === "" || Number.isNaN(Number(text)) ? null : Number(text);
}
