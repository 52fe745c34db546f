// The state of the Compare page, kept in its address: a link shows the same view, and Back goes back.

const LISTS = ["run", "pin", "wide", "hide"];
const FLAGS = ["logx", "logy", "together"];

export function read(query) {
  const number = (key) => (query.get(key) !== null && Number.isFinite(Number(query.get(key))) ? Number(query.get(key)) : null);
  const [low, high] = [number("low"), number("high")];
  return {
    x: query.get("x") || "step",
    find: query.get("find") || "",
    smooth: Math.min(Math.max(number("smooth") ?? 0.8, 0), 0.99),
    span: low !== null && high !== null && low < high ? [low, high] : null,
    ...Object.fromEntries(FLAGS.map((key) => [key, query.get(key) === "1"])),
    ...Object.fromEntries(LISTS.map((key) => [key, [...new Set(query.getAll(key))]])),
  };
}

export function address(view) {
  const pairs = LISTS.flatMap((key) => (view[key] || []).map((value) => [key, value]));
  if (view.x && view.x !== "step") pairs.push(["x", view.x]);
  if (view.find) pairs.push(["find", view.find]);
  if (view.smooth !== undefined && view.smooth !== 0.8) pairs.push(["smooth", view.smooth]);
  if (view.span) pairs.push(["low", view.span[0]], ["high", view.span[1]]);
  for (const key of FLAGS) if (view[key]) pairs.push([key, 1]);
  return `/compare?${new URLSearchParams(pairs)}`;
}

// A choice is a step that Back undoes; what changes while a person types or drags a slider is not.
export function save(view, { step = true } = {}) {
  const path = address(view);
  if (path === location.pathname + location.search) return;
  if (step) history.pushState(null, "", path);
  else history.replaceState(history.state, "", path);
}
