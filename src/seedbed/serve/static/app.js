// Routing, the theme, and global keys.

import { h, problem } from "./dom.js";

const PAGES = [
  [/^\/$/, "list"],
  [/^\/run\/([^/]+)$/, "run"],
  [/^\/compare$/, "compare"],
  [/^\/sweeps$/, "sweeps"],
  [/^\/sweep\/([^/]+)$/, "sweep"],
  [/^\/ablation\/([^/]+)$/, "ablation"],
  [/^\/journal$/, "journal"],
  [/^\/playground\/([^/]+)$/, "playground"],
];
const ABOVE = { __proto__: null, run: "list", playground: "list", sweep: "sweeps", ablation: "sweeps" };
const main = document.getElementById("main");
let leave = () => {},
  turn = 0;

async function show() {
  const mine = ++turn;
  leave();
  leave = () => {};
  const [found, page] = PAGES.map(([pattern, name]) => [location.pathname.match(pattern), name]).find(([match]) => match) || [
    null,
    null,
  ];
  for (const link of document.querySelectorAll("nav [data-page]")) {
    if (link.dataset.page === (ABOVE[page] || page)) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  const place = h("div", {});
  const waiting = h("div", { className: "empty big waiting" }, "loading…");
  main.replaceChildren(waiting, place);
  if (!page) return place.append(problem(new Error("there is no such page")));
  try {
    const { open } = await import(`./${page}.js`);
    const left = await open(
      place,
      found[1] === undefined ? null : decodeURIComponent(found[1]),
      new URLSearchParams(location.search),
    );
    if (mine !== turn) return left?.();
    leave = left || (() => {});
  } catch (error) {
    place.replaceChildren(problem(error), h("p", {}, h("a", { className: "button", href: "/" }, "All runs")));
    document.title = "seedbed";
  } finally {
    waiting.remove();
  }
}

export function go(path) {
  history.pushState(null, "", path);
  scrollTo(0, 0);
  show();
}

addEventListener("popstate", show);
addEventListener("click", (event) => {
  const link = event.target.closest("a");
  if (
    !link ||
    event.defaultPrevented ||
    event.button ||
    event.ctrlKey ||
    event.metaKey ||
    event.shiftKey ||
    link.target ||
    link.hash
  )
    return;
  if (link.origin !== location.origin || !PAGES.some(([pattern]) => pattern.test(link.pathname))) return;
  event.preventDefault();
  go(link.pathname + link.search);
});

// Cycles through the system's theme, light and dark.
document.getElementById("theme").addEventListener("click", () => {
  const order = ["", "light", "dark"];
  const next = order[(order.indexOf(localStorage.getItem("seedbed-theme") || "") + 1) % 3];
  if (next) localStorage.setItem("seedbed-theme", next);
  else localStorage.removeItem("seedbed-theme");
  dispatchEvent(new Event("theme-chosen"));
});

const KEYS = [
  ["/", "search"],
  ["j k", "next, previous run"],
  ["Enter", "open it"],
  ["x", "select it for comparison"],
  ["c", "compare the selected runs"],
  ["g", "back to all runs"],
  ["← →", "in a chart: move the cursor; with Shift, in large steps"],
  ["+ - 0", "in a chart: zoom in, out, all"],
  ["Esc", "close, clear"],
  ["?", "this list"],
];
function keys() {
  if (document.querySelector("dialog")) return;
  const rows = KEYS.map(([key, what]) =>
    h(
      "tr",
      {},
      h(
        "td",
        {},
        key.split(" ").map((k) => [h("kbd", {}, k), " "]),
      ),
      h("td", {}, what),
    ),
  );
  const dialog = h(
    "dialog",
    { onclick: () => dialog.close(), onclose: () => dialog.remove() },
    h("h2", {}, "Keyboard"),
    h("table", {}, h("tbody", {}, rows)),
  );
  document.body.append(dialog);
  dialog.showModal();
}
document.getElementById("keys").addEventListener("click", keys);
addEventListener("keydown", (event) => {
  if (event.target.matches("input, textarea, select") || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "?") keys();
  if (event.key === "g") go("/");
});

show();
