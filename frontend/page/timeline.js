// The last minute of steps: tokens of each and where its time went. The engine is looked at four times a second, so of
// short steps this shows a sample.

import { count, milliseconds, short, whole } from "./numbers.js";
import { write } from "./rows.js";

const SAMPLES = 240;
const GAP = 26; // pixels between the two charts, with the labels
const TOKENS = [
  ["decode", ({ decode_tokens: tokens }) => tokens],
  ["held", ({ accepted_tokens: tokens }) => tokens],
  ["prefill", ({ prefill_tokens: tokens }) => tokens],
];
const SECONDS = [
  ["execute", ({ execute_seconds: seconds }) => seconds],
  ["schedule", ({ schedule_seconds: seconds }) => seconds],
  ["update", ({ update_seconds: seconds }) => seconds],
];

export class TimelineView {
  #samples = []; // stats of a step, or null where there was no new one
  #step = null;
  #isFull = false;
  #hovered = null;

  constructor(root) {
    this.canvas = root.querySelector("#timeline");
    this.summary = root.querySelector("#timeline-summary");
    this.empty = this.summary.textContent;
    this.swatches = Object.fromEntries(
      [...TOKENS, ...SECONDS].map(([name]) => [name, root.querySelector(`#timeline-legend .${name}`)]),
    );
    new ResizeObserver(() => this.paint()).observe(this.canvas.parentElement);
    this.canvas.addEventListener("pointermove", (event) => this.#hover(event.offsetX));
    this.canvas.addEventListener("pointerleave", () => this.#hover(null));
  }

  setFull(isFull) {
    this.#isFull = isFull;
  }

  clear() {
    this.#samples = [];
    this.#step = this.#hovered = null;
    write(this.summary, this.empty);
    this.paint();
  }

  add({ stats }) {
    const isNew = this.#step !== null && stats.step !== this.#step;
    this.#step = stats.step;
    this.#samples.push(isNew ? stats : null);
    if (this.#samples.length > SAMPLES) this.#samples.shift();
  }

  show() {
    this.paint();
    this.#describe();
  }

  #describe() {
    const step = this.#hovered ?? this.#samples.findLast(Boolean);
    if (!step) return;
    const seconds = SECONDS.reduce((sum, [, of]) => sum + of(step), 0);
    write(this.summary, [
      `Step ${whole(step.step)}`,
      step.prefill_tokens ? `${count(step.prefill_tokens, "token")} of prompts` : "",
      step.decode_tokens ? `${whole(step.decode_tokens + step.accepted_tokens)} decoded` : "",
      step.accepted_tokens ? `${whole(step.accepted_tokens)} of them drafted` : "",
      `${milliseconds(seconds)} ms, ${milliseconds(step.execute_seconds)} of them in kernels`,
    ].filter(Boolean).join(" · "));
  }

  #hover(x) {
    const index = x === null ? -1 : this.#samples.length - Math.ceil((this.canvas.clientWidth - x) / this.#pitch);
    this.#hovered = this.#samples[index] ?? null;
    this.#describe();
  }

  get #pitch() {
    return this.canvas.clientWidth / SAMPLES;
  }

  paint() {
    const { canvas } = this;
    const [width, height] = [canvas.clientWidth, canvas.clientHeight];
    if (!width || !this.#isFull) return;
    [canvas.width, canvas.height] = [Math.round(width * devicePixelRatio), Math.round(height * devicePixelRatio)];
    const context = canvas.getContext("2d");
    context.scale(devicePixelRatio, devicePixelRatio);
    const style = getComputedStyle(canvas);
    context.font = `${style.fontSize} system-ui, sans-serif`;
    const upper = (height - 2 * GAP) * 0.55;
    const inks = { text: style.color, line: style.borderBottomColor };
    for (const [name, swatch] of Object.entries(this.swatches)) inks[name] = getComputedStyle(swatch).backgroundColor;
    this.#chart(context, inks, { top: GAP, height: upper, parts: TOKENS, label: (most) => count(most, "token") });
    this.#chart(context, inks, {
      top: upper + 2 * GAP, height: height - upper - 2 * GAP, parts: SECONDS, label: (most) => `${short(most * 1000)} ms`,
    });
  }

  #chart(context, inks, { top, height, parts, label }) {
    const total = (step) => parts.reduce((sum, [, of]) => sum + of(step), 0);
    const most = Math.max(0, ...this.#samples.map((step) => (step ? total(step) : 0)));
    const bottom = top + height;
    const start = SAMPLES - this.#samples.length;
    context.fillStyle = inks.line;
    context.fillRect(0, bottom - 1, this.canvas.clientWidth, 1);
    context.fillStyle = inks.text;
    context.fillText(most ? `${label(most)} at most` : "", 0, top - 8);
    // Prompts have a hundred times the tokens of decode steps: the root of a step's size keeps both visible.
    const scale = (value) => Math.sqrt(value / most) * (height - 1);
    this.#samples.forEach((step, index) => {
      if (!step || !most) return;
      const whole = total(step);
      const full = scale(whole);
      let base = bottom - 1;
      for (const [name, of] of parts) {
        const size = whole ? (of(step) / whole) * full : 0;
        context.fillStyle = inks[name];
        context.fillRect((start + index) * this.#pitch, base - size, Math.max(1, this.#pitch - 1), size);
        base -= size;
      }
    });
  }
}
