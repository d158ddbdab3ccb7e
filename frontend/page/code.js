// Blocks of code: with their language, a button that copies, and highlighting by highlight.js, loaded with the first.

import { copyButton } from "./clipboard.js";
import { sanitized } from "./markdown.js";

const LONGEST = 30_000; // characters that are highlighted
const LONGEST_GROWING = 6000; // the same while more is coming, since all is highlighted again

let highlighter = null;

export class CodeView {
  #code = document.createElement("code");
  #text = "";
  #isHighlighted = false;

  constructor(language) {
    this.language = language;
    this.root = document.createElement("div");
    this.root.className = "block code";
    const head = document.createElement("div");
    head.className = "code-head";
    const name = document.createElement("span");
    name.textContent = language || "text";
    head.append(name, copyButton(() => this.#text, "Copy the code"));
    const pre = document.createElement("pre");
    pre.tabIndex = 0; // so that it can be scrolled by keyboard
    pre.setAttribute("aria-label", language ? `Code in ${language}` : "Code");
    pre.setAttribute("role", "region");
    pre.append(this.#code);
    this.root.append(head, pre);
  }

  replaceWith(view) {
    this.root.replaceWith(view.root);
  }

  remove() {
    this.root.remove();
  }

  /** Show a text; `isGrowing` while more of it may come. */
  update(text, isGrowing) {
    if (text !== this.#text) this.#write(text);
    const most = isGrowing ? LONGEST_GROWING : LONGEST;
    if (!text || this.#isHighlighted || !this.language || text.length > most) return;
    if (highlighter instanceof Promise || highlighter === null) this.#highlightLater();
    else this.#highlight();
  }

  #write(text) {
    const isPlain = !this.#isHighlighted && this.#code.firstChild;
    if (isPlain && text.startsWith(this.#text)) this.#code.firstChild.appendData(text.slice(this.#text.length));
    else this.#code.textContent = text;
    this.#text = text;
    this.#isHighlighted = false;
  }

  #highlightLater() {
    highlighter ??= import("./vendor/highlight.js/highlight.min.js").then((module) => module.default);
    highlighter.then((library) => { highlighter = library; this.#highlight(); }, () => { highlighter = null; });
  }

  #highlight() {
    if (!highlighter.getLanguage(this.language)) return;
    const { value } = highlighter.highlight(this.#text, { language: this.language, ignoreIllegals: true });
    this.#code.replaceChildren(sanitized(value));
    this.#isHighlighted = true;
  }
}
