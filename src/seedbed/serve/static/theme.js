// Before the first paint: the theme that was chosen last, or the system's.
(() => {
  const chosen = localStorage.getItem("seedbed-theme");
  if (chosen) document.documentElement.dataset.theme = chosen;
})();
