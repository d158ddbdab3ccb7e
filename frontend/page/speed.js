// Tokens per second and latencies, with their last minute as sparklines.

import { milliseconds, short } from "./numbers.js";

const POINTS = 240; // a minute at 4 Hz
const WIDTH = 100;
const HEIGHT = 30;

export class SpeedView {
  constructor(root) {
    this.tiles = [
      tile(root, "decode-rate", "decode-line", (picture) => picture.decode_tokens_per_second, short),
      tile(root, "prefill-rate", "prefill-line", (picture) => picture.prefill_tokens_per_second, short),
      tile(root, "ttft", "ttft-line", (picture) => picture.ttft, milliseconds),
      tile(root, "itl", "itl-line", (picture) => picture.itl, milliseconds),
    ];
  }

  /** `points`: the last minute as [tokens per second, TTFT, ITL]. */
  start(points) {
    const [decode, , ttft, itl] = this.tiles;
    for (const { line } of this.tiles) line.clear();
    for (const point of points) [decode, ttft, itl].forEach(({ line }, index) => line.add(point[index]));
  }

  add(picture) {
    for (const { value, line } of this.tiles) line.add(value(picture));
  }

  show(picture) {
    for (const { value, label, line, write } of this.tiles) {
      line.draw();
      const now = value(picture);
      if (now !== null) label.textContent = write(now);
    }
  }
}

function tile(root, label, line, value, write) {
  return {
    value,
    write,
    label: root.querySelector(`#${label}`),
    line: new Line(root.querySelector(`#${line}`)),
  };
}

/** A sparkline from zero to its highest value. A null repeats the value before it, and is nothing before all values. */
export class Line {
  #values = [];

  constructor(svg) {
    svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("aria-hidden", "true");
    [this.area, this.path] = ["area", "line"].map((name) => {
      const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
      path.setAttribute("class", name);
      svg.append(path);
      return path;
    });
  }

  clear() {
    this.#values = [];
  }

  add(value) {
    const known = value ?? this.#values.at(-1);
    if (known === undefined) return;
    this.#values.push(known);
    if (this.#values.length > POINTS) this.#values.shift();
  }

  get most() {
    return Math.max(0, ...this.#values);
  }

  /** Draw the line; `most` is the value at the top. */
  draw(most = this.most || 1) {
    const start = POINTS - this.#values.length;
    const points = this.#values.map((each, index) => {
      const x = ((start + index) / (POINTS - 1)) * WIDTH;
      return `${x.toFixed(2)},${(HEIGHT - 1 - (each / most) * (HEIGHT - 2)).toFixed(2)}`;
    });
    const line = points.length ? `M${points.join("L")}` : "";
    const left = ((start / (POINTS - 1)) * WIDTH).toFixed(2);
    this.path.setAttribute("d", line);
    this.area.setAttribute("d", line && `${line}L${WIDTH},${HEIGHT}L${left},${HEIGHT}Z`);
  }
}
