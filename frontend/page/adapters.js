// The adapters of the model. Nothing is shown where there is none.

import { whole } from "./numbers.js";
import { fillRows, rowOf, write } from "./rows.js";

export class AdaptersView {
  constructor(root) {
    this.section = root.querySelector("#adapters");
    this.count = root.querySelector("#adapters-count");
    this.more = root.querySelector("#adapters-more");
    this.body = root.querySelector("#adapters tbody");
  }

  hide() {
    this.section.hidden = true;
  }

  /** Show a table of adapters, which may be a part of all. */
  show({ adapters, count }) {
    this.section.hidden = !count;
    write(this.count, whole(count));
    fillRows(this.body, adapters, makeRow, fillRow);
    this.more.hidden = count === adapters.length;
    write(this.more, `and ${whole(count - adapters.length)} more`);
  }
}

function makeRow() {
  const row = rowOf("tr", ["th", "name"], ["td", "requests"], ["td", "path"]);
  row.firstElementChild.scope = "row";
  return row;
}

function fillRow(row, { name, path, requests }) {
  const texts = { name, path, requests: whole(requests) };
  for (const [part, text] of Object.entries(texts)) write(row.querySelector(`.${part}`), text);
  row.querySelector(".name").title = name;
  row.querySelector(".path").title = path;
}
