// The conversation: send, stream, stop, regenerate.

import { ApiError, call, errorMessage } from "./api.js";
import { Conversation, increment } from "./conversation.js";
import { AnswerView, UserView, button } from "./messages.js";
import { events } from "./sse.js";
import { Timing } from "./timing.js";

const ENDS = { length: "token limit reached", timeout: "time limit reached", abort: "stopped" };
const NEAR_END = 60; // pixels from the end of the log within which it follows the answer

export class Chat {
  model = null;
  canChat = true; // whether the model has a chat template
  #conversation = new Conversation();
  #views = new Map(); // message -> view
  #running = null; // AbortController of the streaming answer
  #editing = null;

  /**
   * `page`: {log, welcome, input, status}; `settings`: a Settings; `on.busy(isBusy)` when an answer begins and ends,
   * `on.editing(isEditing)`, `on.unauthorized()` when a key is needed.
   */
  constructor(page, settings, on) {
    this.page = page;
    this.settings = settings;
    this.on = on;
  }

  get isBusy() {
    return this.#running !== null;
  }

  get #chats() {
    const mode = this.settings.values.mode;
    return mode ? mode === "chat" : this.canChat;
  }

  async send(text) {
    if (this.#editing) {
      this.#cut(this.#editing);
      this.cancelEdit();
    }
    const last = this.#conversation.messages.at(-1);
    if (last?.role === "user") this.#cut(last); // it got no answer
    this.#show(this.#conversation.add("user", text), new UserView(text));
    await this.#answer();
  }

  async regenerate() {
    // The focused element is about to be removed; the next Tab should begin here and not at the top.
    if (this.page.log.contains(document.activeElement)) this.page.log.focus({ preventScroll: true });
    this.#cutAfter(this.#conversation.last("user"));
    await this.#answer();
  }

  stop() {
    this.#running?.abort();
  }

  reset() {
    this.stop();
    this.#running = null;
    this.on.busy(false);
    this.cancelEdit();
    this.#conversation = new Conversation();
    this.#views.clear();
    this.page.log.replaceChildren(this.page.welcome);
  }

  edit() {
    const message = this.#conversation.last("user");
    if (!message || this.isBusy) return;
    this.#editing = message;
    this.#views.get(message).root.classList.add("replaced");
    this.on.editing(true);
    this.page.input.value = message.content;
    this.page.input.dispatchEvent(new Event("input"));
    this.page.input.focus();
  }

  cancelEdit() {
    if (!this.#editing) return false;
    this.#views.get(this.#editing)?.root.classList.remove("replaced");
    this.#editing = null;
    this.on.editing(false);
    return true;
  }

  #show(message, view) {
    this.page.welcome.remove();
    this.#views.set(message, view);
    this.page.log.append(view.root);
    this.#follow(true);
  }

  #cut(message) {
    this.#cutAfter(message);
    this.#views.get(message).root.remove();
    this.#views.delete(message);
    this.#conversation.messages.pop();
  }

  /** Remove everything after a message, including failed answers, which are not in the conversation. */
  #cutAfter(message) {
    const { root } = this.#views.get(message);
    while (root.nextElementSibling) root.nextElementSibling.remove();
    for (const removed of this.#conversation.cutAfter(message)) this.#views.delete(removed);
  }

  async #answer() {
    const view = new AnswerView(this.model, () => this.#follow());
    const { path, body } = this.#conversation.request(this.model, this.settings.values, this.#chats);
    const message = this.#conversation.add("assistant", "");
    this.#show(message, view);
    this.#offer(null);
    const running = (this.#running = new AbortController());
    this.on.busy(true);
    this.page.status.textContent = "Answering.";
    const timing = new Timing();
    let end = "";
    try {
      end = ENDS[await this.#stream(path, body, message, view, timing)] ?? "";
    } catch (error) {
      if (error.name === "AbortError") end = ENDS.abort;
      else this.#failed(error, message, view);
    }
    view.end([String(timing), end].filter(Boolean).join(" · "));
    this.page.status.textContent = end ? `The answer has ended: ${end}.` : "The answer is complete.";
    if (this.#running !== running) return; // a new conversation has begun in the meantime
    this.#running = null;
    this.on.busy(false);
    this.#offer(view);
  }

  /** Stream an answer into `message` and `view`; return its finish reason. */
  async #stream(path, body, message, view, timing) {
    const response = await call(path, { body, signal: this.#running.signal });
    let finish = null;
    for await (const { data } of events(response)) {
      if (data === "[DONE]") continue; // read on to the end, or the server sees a disconnect
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(errorMessage(data) || "The server ended this answer with an error.");
      const added = increment(chunk);
      if (added.text || added.reasoning || added.entries.length) timing.arrived(added.entries.length || 1);
      if (added.usage) timing.counted(added.usage.completion_tokens);
      message.content += added.text;
      finish = added.finish ?? finish;
      view.append(added);
    }
    if (finish === null) throw new ApiError("The answer is incomplete: the server closed the connection.");
    return finish;
  }

  #failed(error, message, view) {
    view.fail(error instanceof ApiError ? error.message : `The connection was lost: ${error.message}`);
    view.root.dataset.failed = "";
    if (!message.content) {
      this.#conversation.messages.pop();
      this.#views.delete(message);
    }
    if (error.status === 401) this.on.unauthorized();
  }

  /** Show the actions of the last answer and the last message; with null, none. */
  #offer(view) {
    for (const other of this.#views.values()) other.setActions();
    if (!view) return;
    const again = view.root.dataset.failed === undefined ? "Regenerate" : "Try again";
    view.setActions(button(again, () => this.regenerate()));
    this.#views.get(this.#conversation.last("user"))?.setActions(button("Edit", () => this.edit()));
  }

  /** Keep the end in view, unless the reader has scrolled away from it. */
  #follow(always = false) {
    const { log } = this.page;
    if (always) this.following = true;
    if (this.following) log.scrollTop = log.scrollHeight;
  }

  /** Handle scrolling by the reader. */
  scrolled() {
    const { log } = this.page;
    this.following = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_END;
  }
}
