// A classic script, so that it runs before anything is painted: a page that turns dark after a flash of light hurts.
(() => {
  let theme = null;
  try {
    theme = JSON.parse(localStorage.getItem("quire.theme"));
  } catch {
    // Storage is forbidden, or holds nothing of ours; the system's theme it is.
  }
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
})();
