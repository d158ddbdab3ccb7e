// The engines of a set side by side, of which one is shown in detail. Nothing is shown where there is only one.

import { short, whole } from "./numbers.js";
import { fillRows, rowOf, write } from "./rows.js";

const UNKNOWN = "–";
const CELLS = {
  state: ({ state }) => state,
  running: ({ running }) => numberOf(running, whole),
  waiting: ({ waiting }) => numberOf(waiting, whole),
  kv: ({ kv_usage: usage }) => numberOf(usage, (share) => `${Math.round(100 * share)} %`),
  rate: ({ tokens_per_second: rate }) => numberOf(rate, short),
  requests: ({ requests }) => whole(requests),
  losses: ({ losses }) => whole(losses),
};

export class EnginesView {
  /** `choose(number)` is called when the user wants to see an engine. */
  constructor(root, choose) {
    this.section = root.querySelector("#engines");
    this.router = root.querySelector("#engines-router");
    this.body = root.querySelector("#engines tbody");
    this.body.addEventListener("click", (event) => {
      const row = event.target.closest("tr");
      if (row) choose(Number(row.dataset.engine));
    });
  }

  hide() {
    this.section.hidden = true;
  }

  /** Show a table of engines, in which `shown` is the one that is shown in detail. */
  show({ router, engines }, shown) {
    this.section.hidden = engines.length < 2;
    write(this.router, router);
    fillRows(this.body, engines, makeRow, (row, engine) => fillRow(row, engine, engine.number === shown));
  }
}

function numberOf(value, format) {
  return value === null ? UNKNOWN : format(value);
}

function makeRow() {
  const row = rowOf("tr", ["th", "name"], ...Object.keys(CELLS).map((name) => ["td", name]));
  const button = document.createElement("button");
  button.type = "button";
  button.className = "link";
  row.firstElementChild.scope = "row";
  row.firstElementChild.append(button);
  return row;
}

function fillRow(row, engine, isShown) {
  const button = row.querySelector("button");
  row.dataset.engine = engine.number;
  row.dataset.state = engine.state;
  row.classList.toggle("shown", isShown);
  write(button, engine.prefill ? `${engine.number} (prefill)` : String(engine.number));
  button.setAttribute("aria-label", `Engine ${engine.number}`);
  button.setAttribute("aria-pressed", String(isShown));
  for (const [name, text] of Object.entries(CELLS)) write(row.querySelector(`.${name}`), text(engine));
}
