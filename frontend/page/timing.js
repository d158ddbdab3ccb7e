// The speed of an answer as its reader saw it.

import { duration } from "./numbers.js";

// Shorter times measure how fast the browser reads its buffer.
const SHORTEST_SECONDS = 0.05;

export class Timing {
  #sent = performance.now();
  #first = null;
  #last = null;
  #tokens = 0;

  /** Record an arrival of `tokens` tokens. */
  arrived(tokens) {
    this.#last = performance.now();
    this.#first ??= this.#last;
    this.#tokens += tokens;
  }

  /** Take the server's own count. */
  counted(tokens) {
    this.#tokens = tokens;
  }

  /** Return "120 tokens · 85.3 tok/s · TTFT in this browser 41 ms", as far as known. */
  toString() {
    if (this.#first === null) return "";
    const parts = [`${this.#tokens} ${this.#tokens === 1 ? "token" : "tokens"}`];
    const seconds = (this.#last - this.#first) / 1000;
    if (this.#tokens > 1 && seconds > SHORTEST_SECONDS) parts.push(`${((this.#tokens - 1) / seconds).toFixed(1)} tok/s`);
    parts.push(`TTFT in this browser ${duration(this.#first - this.#sent)}`);
    return parts.join(" · ");
  }
}
