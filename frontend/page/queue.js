// The waiting requests: how many, and the first ones in detail.

import { count, whole } from "./numbers.js";
import { fillRows, write } from "./rows.js";

const ROWS = 6;
const ROWS_FULL = 16;
const STATUS = { preempted: ", preempted", waiting_for_structured_output_grammar: ", compiling its grammar" };

export class QueueView {
  #rows = ROWS;

  constructor(root) {
    this.summary = root.querySelector("#queue-summary");
    this.list = root.querySelector("#queue");
  }

  setFull(isFull) {
    this.#rows = isFull ? ROWS_FULL : ROWS;
  }

  show({ stats, waiting, waiting_tokens: tokens }) {
    const text = stats.waiting
      ? `${count(stats.waiting, "request")} with ${count(tokens, "prompt token")}`
      : "No requests are waiting.";
    write(this.summary, text);
    fillRows(this.list, waiting.slice(0, this.#rows), () => document.createElement("li"), fill);
  }
}

function fill(item, [number, prompt, seconds, status]) {
  write(item, `#${number} · ${whole(prompt)} · ${seconds.toFixed(1)} s${STATUS[status] ?? ""}`);
}
