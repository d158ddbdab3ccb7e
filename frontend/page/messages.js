// Views of messages.

import { appendTokens } from "./tokens.js";

function element(tag, className, text = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.textContent = text;
  return made;
}

export function button(text, onclick) {
  const made = element("button", "link", text);
  made.type = "button";
  made.addEventListener("click", onclick);
  return made;
}

/** A message with its foot, which has buttons while it is the last of its kind. */
export class MessageView {
  constructor(role, who) {
    this.root = element("article", `message ${role}`);
    this.root.setAttribute("aria-label", who);
    this.text = element("div", "text");
    this.foot = element("div", "foot");
    this.root.append(this.text, this.foot);
  }

  setActions(...buttons) {
    for (const old of this.foot.querySelectorAll("button")) old.remove();
    this.foot.append(...buttons);
  }
}

export class UserView extends MessageView {
  constructor(content) {
    super("user", "You");
    this.text.textContent = content;
  }
}

/** An answer as it arrives. Increments are shown once per frame, so that the page stays responsive with a fast model. */
export class AnswerView extends MessageView {
  #reasoning = element("div", "text reasoning");
  #figures = element("span", "figures");
  #pending = []; // increments

  /** `onGrowth` is called when the answer has grown. */
  constructor(who, onGrowth) {
    super("assistant", who);
    this.onGrowth = onGrowth;
    this.root.prepend(element("p", "who", who), this.#reasoning);
    this.root.setAttribute("aria-busy", "true");
    this.root.classList.add("streaming");
    this.foot.append(this.#figures);
  }

  append(increment) {
    if (!this.#pending.length) requestAnimationFrame(() => this.#show());
    this.#pending.push(increment);
  }

  #show() {
    for (const increment of this.#pending.splice(0)) this.#write(increment);
    this.onGrowth();
  }

  #write({ text, reasoning, entries }) {
    if (reasoning) this.#reasoning.append(reasoning);
    if (!text && !entries.length) return;
    if (entries.length) this.text.tabIndex = 0; // the arrow keys start here
    appendTokens(this.text, text, entries);
  }

  /** End the answer; `figures` is a line for the foot. */
  end(figures) {
    this.#show();
    this.root.classList.remove("streaming");
    this.root.removeAttribute("aria-busy");
    this.#figures.textContent = figures;
  }

  fail(message) {
    const note = element("p", "error", message);
    note.setAttribute("role", "alert");
    this.foot.before(note);
  }
}
