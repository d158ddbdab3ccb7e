// The live view's events: a whole picture of the engine, and changes to it.

/** Return the picture after a change; `pages.cells` are bytes. Parts that did not change are the same objects. */
export function changed(picture, change) {
  return {
    ...picture,
    ttft: null,
    itl: null,
    ...change,
    stats: { ...picture.stats, ...change.stats },
    pages: change.pages ? changedPages(picture.pages, change.pages) : picture.pages,
    prefixes: change.prefixes?.map((each) => changedPrefix(picture.prefixes, each)) ?? picture.prefixes,
  };
}

/** Return a whole picture as it came, with its bytes decoded. */
export function whole(picture) {
  return { ...picture, pages: { ...picture.pages, cells: decoded(picture.pages.cells) } };
}

function changedPages(pages, { num_pages: numbers = pages.num_pages, runs = [] }) {
  if (!runs.length) return { ...pages, num_pages: numbers };
  const cells = pages.cells.slice();
  for (const [index, bytes] of runs) cells.set(decoded(bytes), index);
  return { ...pages, num_pages: numbers, cells };
}

function changedPrefix(prefixes, { new: added, old, hits, users }) {
  return added ?? { ...prefixes[old], hits, users };
}

function decoded(base64) {
  return Uint8Array.fromBase64?.(base64) ?? Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
}
