// Formulas in Markdown, as $x$, $$x$$, \(x\) and \[x\], and their rendering by KaTeX, which is loaded with the first one.

import { addStyles } from "./assets.js";

const CLOSES = { "$$": "$$", "\\[": "\\]", "\\(": "\\)" };
const LONGEST = 4000; // characters, so that text with many openings stays fast
const MOST_CACHED = 500;
const MOST_AT_ONCE = 12; // formulas that are rendered in one task
const TASK_MS = 8; // after which a task renders no more
const LONGEST_WAIT_MS = 100; // for the browser to be idle
const RULES = { throwOnError: true, strict: "ignore", trust: false, maxExpand: 500, maxSize: 30 };

/** A plugin of markdown-it: formulas become <span class="math">, with class "display" if on lines of their own. */
export function addMath(markdown) {
  const { escapeHtml } = markdown.utils;
  markdown.inline.ruler.before("escape", "math", inline);
  markdown.block.ruler.before("fence", "math_block", display, { alt: ["paragraph", "reference", "blockquote", "list"] });
  markdown.renderer.rules.math = (tokens, index) => {
    const { content, meta } = tokens[index];
    return `<span class="math${meta.isDisplay ? " display" : ""}${meta.isOpen ? " open" : ""}">${escapeHtml(content)}</span>`;
  };
}

function inline(state, silent) {
  const found = formulaAt(state.src, state.pos);
  if (!found) return false;
  if (!silent) {
    const token = state.push("math", "", 0);
    token.content = found.formula;
    token.meta = { isDisplay: found.isDisplay };
  }
  state.pos = found.end;
  return true;
}

/** Return the formula that begins at an index of a text: {formula, end, isDisplay}, or null. */
function formulaAt(text, start) {
  const open = text.slice(start, start + 2);
  const near = text.slice(start, start + LONGEST);
  const close = CLOSES[open];
  if (close) {
    const end = near.indexOf(close, 2);
    const formula = near.slice(2, end);
    return end > 0 && formula.trim() ? { formula, end: start + end + 2, isDisplay: open !== "\\(" } : null;
  }
  // Dollars are more often money: a formula has no space inside its dollars, and no digit follows them.
  const dollars = /^\$(?![\s$])((?:[^$\\\n]|\\[^\n])*?)(?<!\s)\$(?![\d$])/.exec(near);
  return dollars && dollars[1] ? { formula: dollars[1], end: start + dollars[0].length, isDisplay: false } : null;
}

/** The rule for formulas that begin and end with lines. One that is still open takes the rest, until the text is whole. */
function display(state, startLine, endLine, silent) {
  const line = (number) => state.src.slice(state.bMarks[number] + state.tShift[number], state.eMarks[number]).trimEnd();
  const first = line(startLine);
  const close = CLOSES[first.slice(0, 2)];
  if (!close || first.startsWith("\\(") || state.sCount[startLine] - state.blkIndent >= 4) return false;
  const lines = [first.slice(2)];
  let last = startLine;
  while (!lines.at(-1).includes(close) && last + 1 < endLine && last - startLine < 200) lines.push(line((last += 1)));
  const isOpen = !lines.at(-1).includes(close);
  if (isOpen ? state.env.isWhole || last + 1 < endLine : !lines.at(-1).endsWith(close)) return false;
  if (silent) return true;
  const token = state.push("math", "", 0);
  const formula = lines.join("\n");
  token.content = (isOpen ? formula : formula.slice(0, -2)).trim();
  token.meta = { isDisplay: true, isOpen };
  token.map = [startLine, last + 1];
  token.block = true;
  state.line = last + 1;
  return true;
}

let katex = null;
const rendered = new Map(); // formula with its kind -> element

async function loadKatex() {
  const styles = addStyles("vendor/katex/katex.min.css");
  await import("./vendor/katex/katex.min.js"); // sets globalThis.katex
  await styles;
  return globalThis.katex;
}

const queue = []; // {element, isWanted} of formulas that are not rendered yet
let pump = null; // promise of the time when all are

/**
 * Render the formulas in an element: those that have been rendered before at once, the others a few at a time while the
 * browser has nothing else to do. Those that are no longer `isWanted()` then are left out.
 */
export function renderFormulas(root, isWanted = () => true) {
  for (const element of root.querySelectorAll(".math:not(.open)")) {
    if (rendered.has(keyOf(element))) render(element);
    else queue.push({ element, isWanted });
  }
  if (queue.length) pump ??= renderQueue();
}

/** Return a promise of the time when no formula waits. */
export async function formulasRendered() {
  await pump;
}

async function renderQueue() {
  try {
    katex ??= await loadKatex();
    while (queue.length) await idle(renderSome);
  } catch {
    queue.length = 0; // the source stays
  }
  pump = null;
}

function idle(task) {
  const later = globalThis.requestIdleCallback ?? setTimeout; // Safari has none
  return new Promise((resolve, reject) => {
    later(() => {
      try {
        resolve(task());
      } catch (error) {
        reject(error);
      }
    }, { timeout: LONGEST_WAIT_MS });
  });
}

function renderSome() {
  const end = performance.now() + TASK_MS;
  let number = 0;
  while (queue.length && number < MOST_AT_ONCE && (number === 0 || performance.now() < end)) {
    const { element, isWanted } = queue.shift();
    if (!isWanted()) continue;
    render(element);
    number += 1;
  }
}

function keyOf(element) {
  return `${element.classList.contains("display")} ${element.textContent}`;
}

function render(element) {
  const displayMode = element.classList.contains("display");
  const formula = element.textContent;
  const key = keyOf(element);
  if (!rendered.has(key)) {
    if (rendered.size >= MOST_CACHED) rendered.clear();
    const made = document.createElement("span");
    try {
      katex.render(formula, made, { ...RULES, displayMode }); // makes nodes: style attributes would be forbidden
    } catch {
      made.className = "math";
      made.textContent = formula; // it is wrong or not allowed
    }
    rendered.set(key, made);
  }
  element.replaceChildren(rendered.get(key).cloneNode(true));
  element.title = formula;
  element.classList.remove("math");
  element.classList.add("formula");
}
