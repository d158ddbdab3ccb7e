// The last step: its requests, what it computed for each, and their progress.

import { count, milliseconds, whole } from "./numbers.js";
import { fillRows, rowOf, write } from "./rows.js";

const ROWS = 12;
const ROWS_FULL = 18;

export class BatchView {
  #rows = ROWS;

  constructor(root) {
    this.number = root.querySelector("#step-number");
    this.summary = root.querySelector("#step-summary");
    this.list = root.querySelector("#batch");
    this.more = root.querySelector("#batch-more");
  }

  setFull(isFull) {
    this.#rows = isFull ? ROWS_FULL : ROWS;
  }

  clear() {
    write(this.number, "");
    write(this.summary, "Nothing has run yet.");
    this.list.replaceChildren();
    this.more.hidden = true;
  }

  show({ stats, batch, batch_size: size }) {
    if (!stats.step) return;
    const requests = batch.map(request);
    const prefills = requests.filter(({ inPrefill }) => inPrefill);
    const decodes = requests.filter(({ inPrefill }) => !inPrefill);
    const rows = [...prefills, ...decodes].slice(0, this.#rows);
    const longest = Math.max(...rows.map(({ prompt, output }) => prompt + output));
    const seconds = stats.schedule_seconds + stats.execute_seconds + stats.update_seconds;
    write(this.number, whole(stats.step));
    write(this.summary, [
      `${whole(size - prefills.length)} in decode`,
      prefills.length ? `${whole(prefills.length)} in prefill, ${count(stats.prefill_tokens, "token")}` : "",
      `${milliseconds(seconds)} ms`,
    ].filter(Boolean).join(" · "));
    this.list.classList.toggle("idle", stats.running === 0);
    fillRows(this.list, rows, makeRow, (row, each) => fillRow(row, each, longest));
    this.more.hidden = size <= rows.length;
    write(this.more, `and ${whole(size - rows.length)} more`);
  }
}

function request([number, inPrefill, tokens, computed, prompt, output]) {
  return { number, inPrefill, tokens, computed, prompt, output };
}

function makeRow() {
  const row = rowOf("li", ["span", "name"], ["span", "what"], ["span", "track"], ["span", "size"]);
  row.querySelector(".track").append(
    ...rowOf("span", ["span", "prompt"], ["span", "output"], ["span", "step"]).children,
  );
  return row;
}

/** Fill a row; its track shows prompt tokens computed before, outputs, and this step's tokens, all on one scale. */
function fillRow(row, { number, inPrefill, tokens, computed, prompt, output }, longest) {
  write(row.querySelector(".name"), `#${number}`);
  const before = Math.max(0, computed - tokens);
  const parts = { prompt: Math.min(prompt, before), output: Math.max(0, before - prompt), step: computed - before };
  for (const [name, size] of Object.entries(parts)) {
    row.querySelector(`.${name}`).style.width = `${(100 * size) / longest}%`;
  }
  write(row.querySelector(".what"), `${inPrefill ? "prefill" : "decode"} +${whole(tokens)}`);
  const size = inPrefill ? `${whole(computed)} of ${whole(prompt)}` : `${whole(prompt)} + ${whole(output)}`;
  write(row.querySelector(".size"), size);
  row.querySelector(".track").title = `${whole(prompt)} prompt tokens, ${whole(output)} output tokens, ${whole(computed)} computed`;
}
