// Before the first paint: the theme that was chosen last, or the system's, as it changes.
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
