// Views of messages.

import { sizeOf } from "./attachments.js";
import { CallsView } from "./calls.js";
import { copyButton } from "./clipboard.js";
import { RichText } from "./rich.js";
import { appendTokens } from "./tokens.js";

export function element(tag, className, text = "") {
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

/** A message with its foot, which has buttons. */
export class MessageView {
  #actions = element("span", "actions");

  constructor(role, who) {
    this.root = element("article", `message ${role}`);
    this.root.setAttribute("aria-label", who);
    this.text = element("div", "text");
    this.foot = element("div", "foot");
    this.foot.append(this.#actions);
    this.root.append(this.text, this.foot);
  }

  setActions(...buttons) {
    this.#actions.replaceChildren(...buttons);
  }
}

export class UserView extends MessageView {
  constructor({ content, files = [] }) {
    super("user", "You");
    this.text.textContent = content;
    if (!content) this.text.remove();
    for (const { name, text } of files) {
      const file = element("details", "file");
      file.append(element("summary", "", `${name} · ${sizeOf(text)}`), element("pre", "", text));
      this.root.prepend(file);
    }
  }
}

/** The result of a tool, which the user gave. */
export class ToolView extends MessageView {
  constructor({ content }) {
    super("tool", "Tool result");
    this.root.prepend(element("p", "who", "Tool result"));
    this.text.textContent = content;
  }
}

/** An answer as it arrives: thoughts, text in Markdown, tool calls, and tokens if there are log probabilities. */
export class AnswerView extends MessageView {
  #thoughts = element("details", "thoughts");
  #thoughtsTitle = element("summary", "", "Thinking …");
  #reasoning = element("div", "text reasoning");
  #figures = element("span", "figures");
  #tokens = null;
  #hasTokens = false;
  #pending = []; // increments of thoughts and tokens, shown once per frame
  #began = 0; // time of the first thought

  /** `content()` returns the text to copy; `on.block(text)` is called for each complete block of the answer. */
  constructor(who, content, on) {
    super("assistant", who);
    Object.assign(this, { content, on });
    this.text.classList.add("rich");
    this.rich = new RichText(this.text, on);
    const calls = element("div", "calls");
    this.calls = new CallsView(calls);
    this.#thoughts.append(this.#thoughtsTitle, this.#reasoning);
    this.#thoughts.hidden = true;
    this.text.after(calls);
    this.root.prepend(element("p", "who", who), this.#thoughts);
    this.root.setAttribute("aria-busy", "true");
    this.root.classList.add("streaming");
    this.foot.prepend(this.#figures);
    this.copy = copyButton(content, "Copy the answer");
    this.copy.hidden = true;
    this.foot.append(this.copy);
  }

  append(increment) {
    if (increment.text) {
      this.#endThoughts();
      this.rich.append(increment.text);
    }
    this.#hasTokens ||= increment.entries.length > 0;
    if (!increment.reasoning && !this.#hasTokens) return;
    if (!this.#pending.length) requestAnimationFrame(() => this.#show());
    this.#pending.push(increment);
  }

  #show() {
    for (const increment of this.#pending.splice(0)) this.#write(increment);
  }

  #write({ text, reasoning, entries }) {
    if (reasoning) this.#think(reasoning);
    if (!this.#hasTokens) return;
    if (!this.#tokens) this.#addTokens();
    appendTokens(this.#tokens, text, entries);
  }

  #think(text) {
    this.#began ||= performance.now();
    this.#thoughts.hidden = false;
    if (this.#reasoning.firstChild) this.#reasoning.firstChild.appendData(text);
    else this.#reasoning.textContent = text;
  }

  #endThoughts() {
    if (!this.#began || this.#thoughtsTitle.dataset.done) return;
    this.#thoughtsTitle.dataset.done = "yes";
    const seconds = (performance.now() - this.#began) / 1000;
    this.#thoughtsTitle.textContent = seconds < 0.1 ? "Thoughts" : `Thought for ${seconds.toFixed(1)} s`;
  }

  #addTokens() {
    this.#tokens = element("div", "text tokens");
    this.#tokens.tabIndex = 0; // the arrow keys start here
    this.#tokens.setAttribute("aria-label", "Tokens; the arrow keys move between them");
    this.text.after(this.#tokens);
    this.root.classList.add("by-token");
    const toggle = button("Formatted", () => {
      toggle.textContent = this.root.classList.toggle("by-token") ? "Formatted" : "Tokens";
    });
    this.copy.before(toggle);
  }

  /** Render what arrives only while the answer is shown. */
  setShown(isShown) {
    this.rich.setShown(isShown);
  }

  /** End the answer; `figures` is a line for the foot. A long text is rendered later in any case, a short one if `isLater`. */
  end(figures, isLater = false) {
    this.#show();
    this.#endThoughts();
    this.rich.end(isLater);
    this.root.classList.remove("streaming");
    this.root.removeAttribute("aria-busy");
    this.#figures.textContent = figures;
    this.copy.hidden = !this.content();
  }

  /** Show an answer that was kept; its text `isLater` than others. */
  restore({ content, reasoning, calls, figures, isPartial }, isLater) {
    if (reasoning) {
      this.#think(reasoning);
      this.#thoughtsTitle.textContent = "Thoughts";
      this.#thoughtsTitle.dataset.done = "yes";
    }
    this.rich.append(content);
    if (calls) this.calls.show(calls);
    this.end(figures ?? (isPartial ? "incomplete: this page was closed" : ""), isLater);
  }

  fail(message) {
    const note = element("p", "error", message);
    note.setAttribute("role", "alert");
    this.foot.before(note);
  }
}
