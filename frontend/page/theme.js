// A classic script, so that it runs before the first paint: a dark page must not flash light first.
(() => {
  let theme = null;
  try {
    theme = JSON.parse(localStorage.getItem("quire.theme"));
  } catch {
    // Storage is forbidden or holds an invalid value; use the system's theme.
  }
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
})();
