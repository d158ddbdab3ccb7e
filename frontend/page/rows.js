// Lists that reuse their rows from picture to picture, so that nothing flickers.

/** Give `list` one row per item: `make()` returns a new row, `fill(row, item)` writes into it. */
export function fillRows(list, items, make, fill) {
  while (list.children.length > items.length) list.lastElementChild.remove();
  while (list.children.length < items.length) list.append(make());
  items.forEach((item, index) => fill(list.children[index], item));
}

/** Return an element with children given as [tag, class]. */
export function rowOf(tag, ...children) {
  const row = document.createElement(tag);
  for (const [name, className] of children) {
    const child = document.createElement(name);
    child.className = className;
    row.append(child);
  }
  return row;
}

/** Set a text only if it has changed. */
export function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
