// A text in Markdown that grows while it is shown.

import { CodeView } from "./code.js";
import { renderFormulas } from "./formulas.js";
import { blocksOf, sanitized } from "./markdown.js";

const PERIOD_MS = 50;
const MOST_LOAD = 0.25; // share of the time that rendering may take: what is slow to render is rendered less often
const LONGEST = 500_000; // characters; what is beyond is shown as plain text

/**
 * Shows a growing text in `root`. Blocks that later text cannot change are rendered once, so that the time of an update
 * depends on the last block and not on the whole text.
 */
export class RichText {
  #env = {};
  #tail = ""; // the text from the first block that may still change
  #length = 0;
  #views = []; // of the tail's blocks
  #timer = 0;
  #ready = 0; // time of the next rendering

  /** `on.rendered()` is called after each rendering, `on.block(text)` with the text of each complete block. */
  constructor(root, on) {
    this.root = root;
    this.on = on;
  }

  append(text) {
    this.#length += text.length;
    if (this.#length > LONGEST) {
      this.#overflow(text);
      return;
    }
    this.#tail += text.replaceAll("\r", "");
    this.#timer ||= setTimeout(() => this.#render(false), Math.max(0, this.#ready - performance.now()));
  }

  /** Show all of the text, which will not grow. */
  end() {
    clearTimeout(this.#timer);
    this.#render(true);
  }

  #render(isWhole) {
    const began = performance.now();
    this.#timer = 0;
    this.#env.isWhole = isWhole;
    const blocks = blocksOf(this.#tail, this.#env);
    blocks.forEach((block, index) => this.#show(block, index, !isWhole && index === blocks.length - 1));
    for (const surplus of this.#views.splice(blocks.length)) surplus.root.remove();
    this.#settle(blocks, isWhole);
    const now = performance.now();
    this.#ready = Math.max(began + PERIOD_MS, now + (now - began) * (1 / MOST_LOAD - 1));
    this.on.rendered();
  }

  #show(block, index, isGrowing) {
    const old = this.#views[index];
    const isCode = block.code !== undefined;
    if (isCode && old instanceof CodeView && old.language === block.language) old.update(block.code, isGrowing);
    else if (isCode || old?.html !== block.html) {
      const made = isCode ? new CodeView(block.language) : new BlockView(block.html);
      if (isCode) made.update(block.code, isGrowing);
      if (old) old.root.replaceWith(made.root);
      else this.root.append(made.root);
      this.#views[index] = made;
    }
  }

  /** Leave the blocks that later text cannot change: those before a block whose first line is complete. */
  #settle(blocks, isWhole) {
    const lines = this.#tail.split("\n");
    const settled = isWhole ? blocks.length : blocks.findLastIndex(({ line }) => line < lines.length - 1);
    if (settled <= 0) return;
    for (const view of this.#views.splice(0, settled)) this.on.block(view.root.textContent);
    this.#tail = isWhole ? "" : lines.slice(blocks[settled].line).join("\n");
  }

  #overflow(text) {
    clearTimeout(this.#timer);
    if (this.#tail) this.#render(true);
    this.rest ??= this.root.appendChild(Object.assign(document.createElement("div"), { className: "block plain" }));
    this.rest.append(text);
  }
}

class BlockView {
  constructor(html) {
    this.html = html;
    this.root = document.createElement("div");
    this.root.className = "block";
    this.root.append(sanitized(html));
    for (const table of this.root.querySelectorAll("table")) wrapped(table);
    for (const pre of this.root.querySelectorAll("pre")) nested(pre);
    renderFormulas(this.root);
  }
}

/** Let a wide table scroll within the message. */
function wrapped(table) {
  const frame = document.createElement("div");
  frame.className = "table";
  frame.tabIndex = 0;
  frame.setAttribute("role", "region");
  frame.setAttribute("aria-label", "Table");
  table.replaceWith(frame);
  frame.append(table);
}

/** Give code within a list or a quotation the view of other code. */
function nested(pre) {
  const view = new CodeView(/language-(\S+)/.exec(pre.firstElementChild?.className ?? "")?.[1] ?? "");
  view.update(pre.textContent, false);
  pre.replaceWith(view.root);
}
