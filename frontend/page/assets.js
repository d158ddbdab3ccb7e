// Styles that are loaded when they are first needed.

/** Load a style sheet of the page; the promise is done when it applies. */
export function addStyles(path) {
  const link = document.createElement("link");
  link.rel = "stylesheet";
  link.href = new URL(path, import.meta.url);
  return new Promise((resolve, reject) => {
    link.addEventListener("load", resolve);
    link.addEventListener("error", reject);
    document.head.append(link);
  });
}
