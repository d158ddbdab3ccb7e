// Values that the page remembers in this browser.

const PREFIX = "quire.";

/** Return the remembered value, or `fallback` without one or if storage is forbidden. */
export function recall(name, fallback) {
  try {
    const text = localStorage.getItem(PREFIX + name);
    return text === null ? fallback : JSON.parse(text);
  } catch {
    return fallback;
  }
}

export function remember(name, value) {
  try {
    localStorage.setItem(PREFIX + name, JSON.stringify(value));
  } catch {
    // Storage is full or forbidden; the value is lost with the page.
  }
}

/** Return what `rememberHere` kept for this tab. */
export function recallHere(name, fallback) {
  try {
    return JSON.parse(sessionStorage.getItem(PREFIX + name)) ?? fallback;
  } catch {
    return fallback;
  }
}

/** Remember a value in this tab only. */
export function rememberHere(name, value) {
  try {
    sessionStorage.setItem(PREFIX + name, JSON.stringify(value));
  } catch {
    // Storage is forbidden; the value is lost with the page.
  }
}
