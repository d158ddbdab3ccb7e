// Helpers to build the page. Texts are set as text, never as markup.

export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in made) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

// Return the nodes of a text that has `code` between backticks.
export function words(text) {
  return (text ?? "").split("`").map((part, index) => (index % 2 ? element("code", {}, part) : part));
}

export function details(className, title, ...children) {
  return element("details", { className }, element("summary", {}, ...title), ...children);
}
