// Shortcuts of the whole page.

/** Call `actions[name]()` for keys with names like "Escape" or "Ctrl+Shift+O". Cmd of a Mac counts as Ctrl. */
export function watchShortcuts(actions) {
  document.addEventListener("keydown", (event) => {
    if (event.isComposing || event.altKey) return;
    const key = event.key.length === 1 ? event.key.toUpperCase() : event.key;
    const hasCtrl = event.ctrlKey || event.metaKey;
    const hasShift = event.shiftKey && /^[A-Z]$/.test(key); // for others it belongs to the layout
    const name = `${hasCtrl ? "Ctrl+" : ""}${hasShift ? "Shift+" : ""}${key}`;
    const action = Object.hasOwn(actions, name) ? actions[name] : null;
    if (!action) return;
    if (name !== "Escape") event.preventDefault();
    action();
  });
}
