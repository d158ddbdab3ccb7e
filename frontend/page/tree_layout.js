// Where the parts of the prefix tree are drawn: levels from left to right, and each branch on a row of its own below
// those before it, the first one beside its parent.

/**
 * Return the items of a tree in depth-first order: {key, run, parent, level, row, position, setSize, children,
 * isExpanded} for runs; those for branches that are not shown have `hidden`: {branches, pages} in place of `run`.
 * `children` and `parent` are items. `closed`: ids of runs whose branches are left out.
 */
export function layOut(runs, closed) {
  const branches = new Map(runs.map((_, index) => [index, []]));
  runs.forEach((run, index) => branches.get(run.parent)?.push(index));
  const items = [];
  let row = 0;
  const place = (item) => { items.push(item); return item; };

  function visit(index, parent, position, setSize) {
    const run = runs[index];
    const shown = closed.has(run.id) ? [] : branches.get(index);
    const item = place({
      key: run.id, run, parent, level: (parent?.level ?? 0) + 1, row, position, setSize, children: [], isExpanded: shown.length > 0,
    });
    const more = shown.length ? run.branches - shown.length : 0;
    const size = shown.length + (more ? 1 : 0);
    shown.forEach((child, number) => {
      if (number) row += 1;
      item.children.push(visit(child, item, number + 1, size));
    });
    if (more) {
      row += 1;
      const drawn = shown.reduce((sum, child) => sum + sizeOf(runs[child]) + runs[child].pages_below, 0);
      item.children.push(place({
        key: `more ${run.id}`, hidden: { branches: more, pages: run.pages_below - drawn }, parent: item, level: item.level + 1,
        row, position: size, setSize: size, children: [], isExpanded: false,
      }));
    }
    return item;
  }

  if (runs.length) visit(0, null, 1, 1);
  return items;
}

/** Return the number of pages of a run. */
export function sizeOf(run) {
  return run.num_pages.reduce((sum, number) => sum + number, 0);
}

/** Return the number of pages from the start of a prompt to the end of an item's run. */
export function depthOf(item) {
  return (item.run ? sizeOf(item.run) : 0) + (item.parent ? depthOf(item.parent) : 0);
}
