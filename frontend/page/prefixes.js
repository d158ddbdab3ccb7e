// The prefixes with the most cache hits, beside the chat; the full view has the whole tree.

import { count } from "./numbers.js";
import { fillRows, rowOf, write } from "./rows.js";

const ROWS = 8;
const END = 42; // characters of a line

export class PrefixesView {
  constructor(root) {
    this.none = root.querySelector("#prefixes-none");
    this.list = root.querySelector("#prefixes");
  }

  show({ prefixes, pages }) {
    this.none.hidden = prefixes.length > 0;
    const rows = prefixes.slice(0, ROWS);
    fillRows(this.list, rows, make, (row, prefix) => fill(row, prefix, prefixes[0].hits, pages.block_size));
  }
}

function hiddenText(isSalted) {
  return isSalted ? "hidden: it has a cache salt" : "hidden: others can see this page";
}

function make() {
  return rowOf("li", ["div", "text first"], ["div", "text last"], ["div", "heat"], ["p", "figures"]);
}

function fill(row, { hits, pages, users, is_salted: isSalted, first, last }, most, blockSize) {
  write(row.querySelector(".first"), first || hiddenText(isSalted));
  write(row.querySelector(".last"), last && `… ${last.slice(-END)}`);
  row.title = first && `${first} … ${last}`;
  row.querySelector(".heat").style.width = `${(100 * hits) / most}%`;
  const length = `${count(pages, "page")}, ${count(pages * blockSize, "token")}`;
  write(row.querySelector(".figures"), `${count(hits, "hit")} · ${length} · ${users} now`);
}
