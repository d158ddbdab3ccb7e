// A text in Markdown that grows while it is shown.

import { CodeView } from "./code.js";
import { renderFormulas } from "./formulas.js";
import { blocksOf, sanitized } from "./markdown.js";

const PERIOD_MS = 50;
const MOST_LOAD = 0.25; // share of the time that rendering may take: what is slow to render is rendered less often
const LONGEST = 500_000; // characters; what is beyond is shown as plain text
const [LEAST, MOST] = [500, 8000]; // characters that are added at once
const [SHORT_MS, LONG_MS] = [8, 24]; // of a task that adds more next time, or less

let atOnce = 4000; // characters that this browser adds in a short task; measured

/**
 * Shows a growing text in `root`. Blocks that later text cannot change are rendered once, so that the time of an update
 * depends on the last block and not on the whole text; and a long text is shown in many short tasks.
 */
export class RichText {
  #env = {};
  #waiting = ""; // text that is not rendered yet
  #tail = ""; // the text from the first block that may still change
  #length = 0;
  #views = []; // of the tail's blocks
  #timer = 0;
  #ready = 0; // time of the next rendering
  #isOver = false;
  #isShown = true;

  /** `on.rendered()`, if there is one, is called after each rendering, `on.block(text)` with the text of each complete block. */
  constructor(root, on) {
    this.root = root;
    this.on = on;
  }

  /** Whether there is text that is still to be rendered. */
  get isBusy() {
    return Boolean(this.#waiting || this.#timer || (this.#isOver && this.#tail));
  }

  append(text) {
    const room = LONGEST - this.#length;
    this.#length += text.length;
    if (room > 0) this.#waiting += text.slice(0, room).replaceAll("\r", "");
    if (text.length > room) this.#overflow(text.slice(Math.max(0, room)));
    this.#schedule();
  }

  /** Show all of the text, which will not grow. A short one is there at once, unless `isLater`. */
  end(isLater = false) {
    this.#isOver = true;
    if (!this.#isShown) return;
    if (isLater || this.#waiting.length > atOnce) this.#schedule();
    else this.#step();
  }

  /** Render only while `isShown`. */
  setShown(isShown) {
    this.#isShown = isShown;
    if (isShown) this.#schedule();
    else this.#stop();
  }

  #stop() {
    clearTimeout(this.#timer);
    this.#timer = 0;
  }

  #schedule() {
    if (!this.#isShown || !(this.#waiting || this.#isOver)) return;
    this.#timer ||= setTimeout(() => this.#step(), Math.max(0, this.#ready - performance.now()));
  }

  #step() {
    this.#stop();
    const began = performance.now();
    const size = Math.min(atOnce, this.#waiting.length);
    this.#tail += this.#waiting.slice(0, size);
    this.#waiting = this.#waiting.slice(size);
    this.#render(this.#isOver && !this.#waiting);
    const now = performance.now();
    if (size === atOnce && now - began < SHORT_MS) atOnce = Math.min(MOST, 2 * atOnce);
    if (now - began > LONG_MS) atOnce = Math.max(LEAST, Math.round(atOnce / 2));
    const isBehind = this.#waiting.length > 0;
    this.#ready = isBehind ? now : Math.max(began + PERIOD_MS, now + (now - began) * (1 / MOST_LOAD - 1));
    this.on.rendered?.();
    if (isBehind) this.#schedule();
  }

  #render(isWhole) {
    this.#env.isWhole = isWhole;
    const blocks = blocksOf(this.#tail, this.#env);
    blocks.forEach((block, index) => this.#show(block, index, !isWhole && index === blocks.length - 1));
    for (const surplus of this.#views.splice(blocks.length)) surplus.remove();
    this.#finish(blocks, isWhole);
  }

  #show(block, index, isGrowing) {
    const old = this.#views[index];
    const isCode = block.code !== undefined;
    if (isCode && old instanceof CodeView && old.language === block.language) old.update(block.code, isGrowing);
    else if (isCode || old?.html !== block.html) {
      const made = isCode ? new CodeView(block.language) : new BlockView(block.html);
      if (isCode) made.update(block.code, isGrowing);
      if (old) old.replaceWith(made);
      else if (this.rest) this.rest.before(made.root);
      else this.root.append(made.root);
      this.#views[index] = made;
    }
  }

  /** Leave the blocks that later text cannot change: those before a block whose first line is complete. */
  #finish(blocks, isWhole) {
    const lines = this.#tail.split("\n");
    const finished = isWhole ? blocks.length : blocks.findLastIndex(({ line, isStart }) => isStart && line < lines.length - 1);
    if (finished <= 0) {
      if (isWhole) this.#tail = "";
      return;
    }
    for (const view of this.#views.splice(0, finished)) this.on.block(view.root.textContent);
    this.#tail = isWhole ? "" : lines.slice(blocks[finished].line).join("\n");
  }

  #overflow(text) {
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
    renderFormulas(this.root, () => !this.isGone);
  }

  replaceWith(view) {
    this.root.replaceWith(view.root);
    this.isGone = true;
  }

  remove() {
    this.root.remove();
    this.isGone = true;
  }
}

/** Let a wide table scroll within the message. */
function wrapped(table) {
  const frame = document.createElement("div");
  frame.className = `table ${table.className}`.trim();
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
