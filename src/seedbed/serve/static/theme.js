// Sets the theme before the first paint: the last choice, or the system's.
(() => {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const apply = () => {
    document.documentElement.dataset.theme = localStorage.getItem("seedbed-theme") || (system.matches ? "dark" : "light");
    dispatchEvent(new Event("theme"));
  };
  system.addEventListener("change", apply);
  addEventListener("theme-chosen", apply);
  apply();
})();
