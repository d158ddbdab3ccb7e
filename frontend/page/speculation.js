// Speculation: the drafted tokens of the last minute, and how many of them held.

import { short, whole } from "./numbers.js";
import { write } from "./rows.js";
import { Line } from "./speed.js";

export class SpeculationView {
  #counts = []; // [drafted, held] per second, of the last minute

  constructor(root) {
    this.section = root.querySelector("#speculation");
    this.summary = root.querySelector("#speculation-summary");
    this.share = root.querySelector("#speculation-share");
    this.drafted = new Line(root.querySelector("#drafted-line"));
    this.held = new Line(root.querySelector("#held-line"));
    this.bar = root.querySelector("#held-bar");
  }

  clear() {
    this.#counts = [];
    this.drafted.clear();
    this.held.clear();
    this.last = null;
  }

  add({ draft_tokens_per_second: drafted, accepted_tokens_per_second: held }) {
    this.#counts.push([drafted, held]);
    if (this.#counts.length > 240) this.#counts.shift();
    this.drafted.add(drafted);
    this.held.add(held);
    this.last = drafted ? { drafted, held } : this.last;
  }

  show({ stats }) {
    this.section.classList.toggle("none", !this.last);
    if (!this.last) return;
    const { drafted, held } = this.last;
    const sum = (index) => this.#counts.reduce((total, each) => total + each[index], 0);
    const share = sum(0) ? sum(1) / sum(0) : held / drafted;
    write(this.share, `${Math.round(100 * share)} %`);
    this.bar.style.width = `${(100 * share).toFixed(1)}%`;
    const step = `the last step drafted ${whole(stats.draft_tokens)}, ${whole(stats.accepted_tokens)} held`;
    write(this.summary, `${short(drafted)} drafted/s, ${short(held)} held/s; ${step}`);
    const most = this.drafted.most || 1;
    this.drafted.draw(most);
    this.held.draw(most);
  }
}
