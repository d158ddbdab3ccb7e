// A conversation with its views.

import { element } from "./messages.js";
import { count } from "./numbers.js";

/** A conversation with its views, which live on while it is answered and others are shown. */
export class Thread {
  views = new Map(); // message -> view
  answer = null; // {stop: AbortController, view} of the streaming answer
  isDropped = false; // what still arrives is not to be kept
  isTooLong = false; // the last answer failed since the model's context is too short
  kept = 0; // time at which the growing answer was kept
  #gap = element("p", "gap");

  constructor(conversation) {
    this.conversation = conversation;
    this.root = document.createElement("div");
    this.root.className = "thread";
  }

  /** Say which messages are not sent. */
  divide() {
    const { start, messages } = this.conversation;
    this.#gap.remove();
    if (!start) return;
    this.#gap.textContent = `${count(start, "message")} above ${start === 1 ? "is" : "are"} left out: the model's context is too short for them.`;
    this.views.get(messages[start])?.root.before(this.#gap);
  }
}
