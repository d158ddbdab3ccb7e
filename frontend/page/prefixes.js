// The prefixes with the most cache hits, as branches of the radix tree: those that begin with the same page are together.

import { count, whole } from "./numbers.js";
import { fillRows, rowOf, write } from "./rows.js";

const ROWS = 8;
const ROWS_FULL = 16;
const END = 42; // characters of a line

export class PrefixesView {
  #isFull = false;

  constructor(root) {
    this.none = root.querySelector("#prefixes-none");
    this.list = root.querySelector("#prefixes");
  }

  setFull(isFull) {
    this.#isFull = isFull;
    this.list.replaceChildren(); // rows of the other kind
  }

  show({ prefixes, pages }) {
    this.none.hidden = prefixes.length > 0;
    this.list.classList.toggle("tree", this.#isFull);
    if (this.#isFull) this.#showTree(prefixes.slice(0, ROWS_FULL), pages.block_size);
    else {
      const rows = prefixes.slice(0, ROWS);
      fillRows(this.list, rows, make, (row, prefix) => fill(row, prefix, prefixes[0].hits, pages.block_size));
    }
  }

  #showTree(prefixes, blockSize) {
    const most = Math.max(...prefixes.map(({ hits }) => hits));
    const longest = Math.max(...prefixes.map(({ pages }) => pages));
    const branches = Object.values(Object.groupBy(prefixes, ({ first, is_salted: isSalted, pages }) => (
      first || `${isSalted} ${pages}`)));
    const rows = branches.flatMap((branch) => branch
      .toSorted((one, other) => one.pages - other.pages)
      .map((prefix, index) => ({ prefix, isRoot: index === 0 })));
    fillRows(this.list, rows, makeBranch, (row, each) => fillBranch(row, each, { most, longest, blockSize }));
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

function makeBranch() {
  const row = rowOf("li", ["div", "text first"], ["div", "branch"], ["p", "figures"]);
  row.querySelector(".branch").append(...rowOf("div", ["span", "length"], ["span", "text last"]).children);
  return row;
}

/** Fill a row of the tree: its bar is as long as the prefix, and as strong as its hits. */
function fillBranch(row, { prefix, isRoot }, { most, longest, blockSize }) {
  const { hits, pages, users, is_salted: isSalted, first, last } = prefix;
  row.classList.toggle("root", isRoot);
  write(row.querySelector(".first"), isRoot ? first || hiddenText(isSalted) : "");
  write(row.querySelector(".last"), last ? `… ${last.slice(-END)}` : "");
  row.title = first && `${first} … ${last}`;
  const bar = row.querySelector(".length");
  bar.style.width = `${Math.max(2, (60 * pages) / longest)}%`;
  bar.style.opacity = (0.25 + 0.75 * Math.sqrt(hits / most)).toFixed(2);
  bar.classList.toggle("used", users > 0);
  write(row.querySelector(".figures"), `${count(hits, "hit")} · ${whole(pages * blockSize)} tokens · ${users} now`);
}
