// The KV pool as a map: one square per page, or per several pages, with the colours of their states mixed.

import { count, whole } from "./numbers.js";
import { write } from "./rows.js";

const STATES = ["free", "held", "shared", "cached", "pinned"];
const SMALLEST = 4; // pixels of a cell with its gap
const LARGEST = 14;
const LARGEST_FULL = 22;
const SHAPE = 0.6; // height of a large map, of its width
const SHAPE_FULL = 0.45;

export class PagesView {
  #map = null; // {cells: Uint8Array, perCell}

  #largest = LARGEST;
  #shape = SHAPE;

  constructor(root) {
    this.canvas = root.querySelector("#pages");
    this.size = root.querySelector("#pages-size");
    this.swatches = STATES.map((state) => root.querySelector(`.legend .${state}`));
    this.counts = [...root.querySelectorAll(".legend dd")];
    new ResizeObserver(() => this.paint()).observe(this.canvas.parentElement);
  }

  show({ pages }) {
    pages.num_pages.forEach((number, state) => write(this.counts[state], whole(number)));
    const total = pages.num_pages.reduce((sum, number) => sum + number);
    const each = pages.pages_per_cell > 1 ? `, ${pages.pages_per_cell} per square` : "";
    write(this.size, `${whole(total)} of ${count(pages.block_size, "token")}${each}`);
    if (this.#map?.cells === pages.cells) return;
    this.#map = { cells: pages.cells, perCell: pages.pages_per_cell };
    this.paint();
  }

  setFull(isFull) {
    [this.#largest, this.#shape] = isFull ? [LARGEST_FULL, SHAPE_FULL] : [LARGEST, SHAPE];
  }

  paint() {
    const width = this.canvas.clientWidth;
    if (!this.#map || !width) return;
    const { cells, perCell } = this.#map;
    const number = perCell === 1 ? cells.length : cells.length / STATES.length;
    const { side, columns } = layout(number, width, this.#largest, this.#shape);
    const height = Math.ceil(Math.ceil(number / columns) * side);
    const scale = devicePixelRatio;
    this.canvas.style.height = `${height}px`;
    [this.canvas.width, this.canvas.height] = [Math.round(width * scale), Math.round(height * scale)];
    const context = this.canvas.getContext("2d");
    const colours = this.swatches.map((swatch) => rgb(getComputedStyle(swatch).backgroundColor));
    const gap = Math.round((side > 6 ? 2 : 1) * scale);
    const edge = (index) => Math.round(index * side * scale); // whole pixels, or gaps would blur
    for (let cell = 0; cell < number; cell += 1) {
      const [column, row] = [cell % columns, Math.floor(cell / columns)];
      const [left, top] = [edge(column), edge(row)];
      context.fillStyle = css(perCell === 1 ? colours[cells[cell]] : mix(cells, cell, colours));
      context.fillRect(left, top, edge(column + 1) - left - gap, edge(row + 1) - top - gap);
    }
  }
}

/** Return the largest squares with which the map's height is about `shape` of its width, or less. */
function layout(number, width, largest, shape) {
  const fitting = Math.max(SMALLEST, Math.min(largest, Math.sqrt((width * width * shape) / number)));
  const columns = Math.floor(width / fitting);
  return { side: width / columns, columns };
}

function mix(cells, cell, colours) {
  const mixed = [0, 0, 0];
  colours.forEach((colour, state) => {
    const part = cells[cell * STATES.length + state] / 255;
    for (const channel of [0, 1, 2]) mixed[channel] += part * colour[channel];
  });
  return mixed;
}

function rgb(colour) {
  return colour.match(/[\d.]+/g).slice(0, 3).map(Number);
}

function css([red, green, blue]) {
  return `rgb(${red} ${green} ${blue})`;
}
