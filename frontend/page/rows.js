// Lists whose rows are used again from picture to picture, so that nothing flickers.

/** Makes `list` have a row for each of `items`: `make()` gives a new one, `fill(row, item)` writes into it. */
export function fillRows(list, items, make, fill) {
  while (list.children.length > items.length) list.lastElementChild.remove();
  while (list.children.length < items.length) list.append(make());
  items.forEach((item, index) => fill(list.children[index], item));
}

/** An element with children of these classes, as [tag, class]. */
export function rowOf(tag, ...children) {
  const row = document.createElement(tag);
  for (const [name, className] of children) {
    const child = document.createElement(name);
    child.className = className;
    row.append(child);
  }
  return row;
}

/** Sets a text only where it has changed. */
export function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
