// The conversation: send, stream, stop, regenerate.

import { ApiError, call, errorMessage } from "./api.js";
import { Conversation, addCalls, increment } from "./conversation.js";
import { AnswerView, ToolView, UserView, button } from "./messages.js";
import { events } from "./sse.js";
import { Timing } from "./timing.js";

const ENDS = { length: "token limit reached", timeout: "time limit reached", abort: "stopped" };
const NEAR_END = 60; // pixels from the end of the log within which it follows the answer
const KEEP_MS = 2000; // between two times that a growing answer is kept
const MOST_SPOKEN = 20; // blocks of the answer that wait for a screen reader

export class Chat {
  model = null;
  canChat = true; // whether the model has a chat template
  conversation = new Conversation();
  #views = new Map(); // message -> view
  #running = null; // AbortController of the streaming answer
  #editing = null;
  #kept = 0; // time at which the growing answer was kept

  /**
   * `page`: {log, welcome, status, spoken}; `settings`: a Settings; `on.busy(isBusy)` when an answer begins and ends,
   * `on.editing(message)` with the message that is edited, or null, `on.unauthorized()` when a key is needed,
   * `on.changed(conversation)` when it should be kept.
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

  async send(text, files = []) {
    if (this.#editing) {
      const message = this.#editing;
      this.cancelEdit();
      this.#cut(message);
    }
    const last = this.conversation.messages.at(-1);
    if (last?.role === "user") this.#cut(last); // it got no answer
    const message = this.conversation.add("user", text, files.length ? { files } : {});
    this.#show(message, new UserView(message));
    await this.#answer();
  }

  async regenerate() {
    // The focused element is about to be removed; the next Tab should begin here and not at the top.
    if (this.page.log.contains(document.activeElement)) this.page.log.focus({ preventScroll: true });
    this.cancelEdit();
    this.#cutAfter(this.conversation.last("user"));
    await this.#answer();
  }

  stop() {
    this.#running?.abort();
  }

  /** Show another conversation. The answer that is streaming ends; `keeps`: what it has is kept. */
  open(conversation, keeps = true) {
    if (this.isBusy && keeps) this.on.changed(this.conversation);
    this.stop();
    this.#running = null;
    this.on.busy(false);
    this.cancelEdit();
    this.conversation = conversation;
    this.#views.clear();
    this.page.log.replaceChildren(this.page.welcome);
    for (const message of conversation.messages) this.#show(message, this.#restored(message));
    this.#offer(this.#views.get(conversation.messages.at(-1)) ?? null);
  }

  #restored(message) {
    if (message.role === "user") return new UserView(message);
    if (message.role === "tool") return new ToolView(message);
    const view = new AnswerView(message.model ?? "Answer", () => message.content, { growth() {}, block() {} });
    view.restore(message);
    return view;
  }

  /** Let the user change a message; what follows it will be replaced. */
  edit(message) {
    if (this.isBusy) return;
    this.cancelEdit();
    this.#editing = message;
    this.#views.get(message).root.classList.add("replaced");
    this.on.editing(message);
  }

  cancelEdit() {
    if (!this.#editing) return false;
    this.#views.get(this.#editing)?.root.classList.remove("replaced");
    this.#editing = null;
    this.on.editing(null);
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
    this.conversation.messages.pop();
  }

  /** Remove everything after a message, including failed answers, which are not in the conversation. */
  #cutAfter(message) {
    const { root } = this.#views.get(message);
    while (root.nextElementSibling) root.nextElementSibling.remove();
    for (const removed of this.conversation.cutAfter(message)) this.#views.delete(removed);
  }

  async #answer() {
    const { conversation } = this;
    const { path, body } = conversation.request(this.model, this.settings.values, this.#chats);
    const message = conversation.add("assistant", "", { model: this.model });
    const view = new AnswerView(this.model, () => message.content, {
      growth: () => this.#follow(),
      block: (text) => this.#speak(text),
    });
    this.#show(message, view);
    this.#offer(null);
    const running = (this.#running = new AbortController());
    this.on.busy(true);
    this.#keep(conversation, true);
    this.page.status.textContent = "Answering.";
    this.page.spoken.replaceChildren();
    const timing = new Timing();
    let end = "";
    try {
      end = ENDS[await this.#stream(path, body, message, view, timing)] ?? "";
    } catch (error) {
      if (error.name === "AbortError") end = ENDS.abort;
      else this.#failed(error, message, view);
    }
    const figures = [String(timing), end].filter(Boolean).join(" · ");
    if (figures) message.figures = figures;
    view.end(figures);
    this.page.status.textContent = end ? `The answer has ended: ${end}.` : "The answer is complete.";
    if (this.#running !== running) return; // another conversation has been opened in the meantime
    this.#running = null;
    this.on.busy(false);
    this.#keep(conversation, true);
    this.#offer(view);
  }

  /** Stream an answer into `message` and `view`; return its finish reason. */
  async #stream(path, body, message, view, timing) {
    const { conversation } = this;
    const running = this.#running;
    const response = await call(path, { body, signal: running.signal });
    let finish = null;
    for await (const { data } of events(response)) {
      if (data === "[DONE]") continue; // read on to the end, or the server sees a disconnect
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(errorMessage(data) || "The server ended this answer with an error.");
      const added = increment(chunk);
      if (added.text || added.reasoning || added.entries.length) timing.arrived(added.entries.length || 1);
      if (added.usage) timing.counted(added.usage.completion_tokens);
      finish = added.finish ?? finish;
      this.#take(added, message);
      view.append(added);
      if (added.calls.length) view.calls.show(message.calls);
      if (this.#running === running) this.#keep(conversation, false);
    }
    if (finish === null) throw new ApiError("The answer is incomplete: the server closed the connection.");
    return finish;
  }

  #take({ text, reasoning, calls }, message) {
    message.content += text;
    if (reasoning) message.reasoning = (message.reasoning ?? "") + reasoning;
    if (calls.length) addCalls((message.calls ??= []), calls);
  }

  /** Have the conversation kept, now or if that was some time ago. */
  #keep(conversation, isNow) {
    const now = performance.now();
    if (!isNow && now - this.#kept < KEEP_MS) return;
    this.#kept = now;
    this.on.changed(conversation);
  }

  #failed(error, message, view) {
    view.fail(error instanceof ApiError ? error.message : `The connection was lost: ${error.message}`);
    view.root.dataset.failed = "";
    if (!message.content) {
      this.conversation.messages = this.conversation.messages.filter((other) => other !== message);
      this.#views.delete(message);
    }
    if (error.status === 401) this.on.unauthorized();
  }

  /** Show the actions of the messages, and those of the last one, whose view is given; with null, none. */
  #offer(last) {
    for (const view of this.#views.values()) {
      view.setActions();
      view.calls?.close();
    }
    if (!last) return;
    for (const [message, view] of this.#views) {
      if (message.role === "user") view.setActions(button("Edit", () => this.edit(message)));
    }
    const calls = this.conversation.messages.at(-1)?.calls;
    if (last instanceof AnswerView) {
      const again = last.root.dataset.failed === undefined ? "Regenerate" : "Try again";
      last.setActions(button(again, () => this.regenerate()));
      if (calls?.length) last.calls.ask(calls, (results) => this.#sendResults(calls, results));
    } else if (last instanceof UserView) {
      const message = this.conversation.messages.at(-1);
      last.setActions(button("Edit", () => this.edit(message)), button("Answer", () => this.regenerate()));
    }
  }

  async #sendResults(calls, results) {
    calls.forEach(({ id }, index) => {
      const message = this.conversation.add("tool", results[index], { tool_call_id: id });
      this.#show(message, new ToolView(message));
    });
    await this.#answer();
  }

  /** Give a complete block of the answer to screen readers, which would otherwise read each token or nothing. */
  #speak(text) {
    const block = document.createElement("p");
    block.textContent = text;
    const { spoken } = this.page;
    spoken.append(block);
    if (spoken.children.length > MOST_SPOKEN) spoken.firstElementChild.remove();
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
