// The conversation that is shown, and those that are answered in the background: send, stream, stop, regenerate.

import { ApiError, TOO_LONG, call, errorOf } from "./api.js";
import { fittingStart } from "./context.js";
import { Conversation, addCalls, increment } from "./conversation.js";
import { AnswerView, ToolView, UserView, button } from "./messages.js";
import { routeText } from "./route.js";
import { events } from "./sse.js";
import { Thread } from "./thread.js";
import { Timing } from "./timing.js";

const ENDS = { length: "token limit reached", timeout: "time limit reached", abort: "stopped" };
const NEAR_END = 60; // pixels from the end of the log within which it follows the answer
const KEEP_MS = 2000; // between two times that a growing answer is kept
const RESTORED_AT_ONCE = 16_000; // characters of a conversation's end that are rendered before it is shown
const MOST_SPOKEN = 20; // blocks of the answer that wait for a screen reader

export class Chat {
  model = null;
  canChat = true; // whether the model has a chat template
  #thread = new Thread(new Conversation()); // that is shown
  #answered = new Map(); // conversation id -> Thread with a streaming answer
  #editing = null;
  #scrollTop = 0; // of the log, when it scrolled last
  #sizes = new ResizeObserver(() => this.#follow()); // of the log and the thread: text, errors, formulas, settings

  /**
   * `page`: {log, welcome, status, spoken}; `settings`: a Settings; `on.busy(isBusy)` when an answer begins and ends or
   * another conversation is shown, `on.editing(message)` with the message that is edited, or null, `on.unauthorized()`
   * when a key is needed, `on.changed(conversation)` when it should be kept, `on.answering()` when an answer begins or
   * ends in any conversation, `on.answered(conversation)` when one is complete that is not shown.
   */
  constructor(page, settings, on) {
    this.page = page;
    this.settings = settings;
    this.on = on;
    page.log.append(this.#thread.root);
    this.#sizes.observe(page.log);
    this.#sizes.observe(this.#thread.root);
  }

  /** The conversation that is shown. */
  get conversation() {
    return this.#thread.conversation;
  }

  /** Whether the conversation that is shown is being answered. */
  get isBusy() {
    return this.#thread.answer !== null;
  }

  isAnswering(id) {
    return this.#answered.has(id);
  }

  /** Return the conversation of this id if it is shown or being answered, which may be newer than what is kept. */
  find(id) {
    return id === this.conversation.id ? this.conversation : this.#answered.get(id)?.conversation;
  }

  get #chats() {
    const mode = this.settings.values.mode;
    return mode ? mode === "chat" : this.canChat;
  }

  async send(text, files = []) {
    const thread = this.#thread;
    if (this.#editing) {
      const message = this.#editing;
      this.cancelEdit();
      this.#cut(thread, message);
    }
    const last = thread.conversation.messages.at(-1);
    if (last?.role === "user") this.#cut(thread, last); // it got no answer
    const message = thread.conversation.add("user", text, files.length ? { files } : {});
    this.#show(thread, message, new UserView(message));
    await this.#answer(thread);
  }

  async regenerate() {
    const thread = this.#thread;
    this.#keepFocus();
    this.cancelEdit();
    this.#cutAfter(thread, thread.conversation.last("user"));
    await this.#answer(thread);
  }

  /** Answer again without the oldest turns, so that the model's context holds the rest; `failed` is the view of the answer. */
  async #goOn(thread, failed) {
    const { conversation } = thread;
    const last = conversation.last("user");
    this.#keepFocus();
    this.cancelEdit();
    this.#offer(thread, null);
    const request = (start) => conversation.request(this.model, this.settings.values, this.#chats, start);
    let problem = "The last message alone is too long for the model's context: shorten it, or lower max tokens in the settings.";
    let start = null;
    try {
      start = await fittingStart(conversation.laterTurns, request);
    } catch (error) {
      problem = error.message;
    }
    if (thread.answer || conversation.last("user") !== last) return; // the user has gone on meanwhile
    if (start === null) {
      failed.fail(problem);
      this.#offer(thread, failed);
      return;
    }
    conversation.start = start;
    this.#cutAfter(thread, last);
    await this.#answer(thread);
  }

  /** Move the focus from an element that is about to be removed, so that the next Tab begins here and not at the top. */
  #keepFocus() {
    if (this.page.log.contains(document.activeElement)) this.page.log.focus({ preventScroll: true });
  }

  /** Stop the answer in the conversation that is shown. */
  stop() {
    this.#thread.answer?.stop.abort();
  }

  /** Have all conversations kept that are being answered, since the page may end. */
  keepAll() {
    for (const thread of this.#answered.values()) this.#keep(thread, true);
  }

  /** Stop the answer of a conversation that is deleted; return what there is of it, if it was being answered. */
  drop(id) {
    const thread = this.#answered.get(id);
    if (!thread) return null;
    const kept = structuredClone(thread.conversation.kept);
    thread.isDropped = true;
    thread.answer.stop.abort();
    this.#answered.delete(id);
    return kept;
  }

  /** Show another conversation. The answer that is streaming in this one goes on. */
  open(conversation) {
    if (conversation === this.conversation) return;
    this.cancelEdit();
    this.#thread.answer?.view.setShown(false);
    this.#sizes.unobserve(this.#thread.root);
    this.#thread = this.#answered.get(conversation.id) ?? this.#restored(conversation);
    const { root, answer } = this.#thread;
    this.#sizes.observe(root);
    this.page.log.replaceChildren(...(conversation.messages.length ? [root] : [this.page.welcome, root]));
    answer?.view.setShown(true);
    this.page.spoken.replaceChildren();
    this.page.status.textContent = answer ? "Answering." : "";
    this.on.busy(answer !== null);
    this.#follow(true);
  }

  /** Return a thread of a conversation that was kept. What will be in sight is rendered first. */
  #restored(conversation) {
    const thread = new Thread(conversation);
    const { messages } = conversation;
    let room = RESTORED_AT_ONCE;
    const isLater = new Map(messages.toReversed().map((message) => [message, (room -= message.content.length) < 0]));
    for (const message of messages) {
      const view = this.#viewOf(thread, message);
      thread.views.set(message, view);
      thread.root.append(view.root);
      if (view instanceof AnswerView) view.restore(message, isLater.get(message));
    }
    thread.divide();
    this.#offer(thread, thread.views.get(messages.at(-1)) ?? null);
    return thread;
  }

  #viewOf(thread, message) {
    if (message.role === "user") return new UserView(message);
    if (message.role === "tool") return new ToolView(message);
    const block = (text) => { if (thread === this.#thread && thread.answer) this.#speak(text); };
    return new AnswerView(message.model ?? "Answer", () => message.content, { block });
  }

  /** Let the user change a message; what follows it will be replaced. */
  edit(message) {
    if (this.isBusy) return;
    this.cancelEdit();
    this.#editing = message;
    this.#thread.views.get(message).root.classList.add("replaced");
    this.on.editing(message);
  }

  cancelEdit() {
    if (!this.#editing) return false;
    this.#thread.views.get(this.#editing)?.root.classList.remove("replaced");
    this.#editing = null;
    this.on.editing(null);
    return true;
  }

  #show(thread, message, view) {
    this.page.welcome.remove();
    thread.views.set(message, view);
    thread.root.append(view.root);
    if (thread === this.#thread) this.#follow(true);
  }

  #cut(thread, message) {
    this.#cutAfter(thread, message);
    thread.views.get(message).root.remove();
    thread.views.delete(message);
    thread.conversation.cut(message);
  }

  /** Remove everything after a message, including failed answers, which are not in the conversation. */
  #cutAfter(thread, message) {
    const { root } = thread.views.get(message);
    while (root.nextElementSibling) root.nextElementSibling.remove();
    for (const removed of thread.conversation.cutAfter(message)) thread.views.delete(removed);
  }

  async #answer(thread) {
    const { conversation } = thread;
    thread.isTooLong = false;
    thread.divide();
    const { path, body } = conversation.request(this.model, this.settings.values, this.#chats);
    const message = conversation.add("assistant", "", { model: this.model, isPartial: true });
    const view = this.#viewOf(thread, message);
    this.#show(thread, message, view);
    this.#offer(thread, null);
    thread.answer = { stop: new AbortController(), view };
    this.#answered.set(conversation.id, thread);
    this.on.busy(true);
    this.on.answering();
    this.#keep(thread, true);
    this.page.status.textContent = "Answering.";
    this.page.spoken.replaceChildren();
    const timing = new Timing();
    let [end, route] = ["", ""];
    try {
      const { finish, ...ended } = await this.#stream(path, body, message, thread, timing);
      [end, route] = [ENDS[finish] ?? "", ended.route];
    } catch (error) {
      if (error.name === "AbortError") end = ENDS.abort;
      else this.#failed(error, message, thread);
    }
    delete message.isPartial;
    const figures = [String(timing), route, end].filter(Boolean).join(" · ");
    if (figures) message.figures = figures;
    view.end(figures);
    this.#ended(thread, end);
  }

  #ended(thread, end) {
    const { view } = thread.answer;
    thread.answer = null;
    if (thread.isDropped) return;
    this.#answered.delete(thread.conversation.id);
    this.#keep(thread, true);
    this.#offer(thread, view);
    this.on.answering();
    if (thread !== this.#thread) {
      this.on.answered(thread.conversation);
      return;
    }
    const isFailed = view.root.dataset.failed !== undefined; // an alert has said so
    this.page.status.textContent = isFailed ? "" : end ? `The answer has ended: ${end}.` : "The answer is complete.";
    this.on.busy(false);
  }

  /** Stream an answer into `message` and its view; return its finish reason, and its route in words. */
  async #stream(path, body, message, thread, timing) {
    const { stop, view } = thread.answer;
    const response = await call(path, { body, signal: stop.signal });
    let finish = null;
    let route = "";
    for await (const { data } of events(response)) {
      if (data === "[DONE]") continue; // read on to the end, or the server sees a disconnect
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(errorOf(data).message || "The server ended this answer with an error.");
      const added = increment(chunk);
      if (added.text || added.reasoning || added.entries.length) timing.arrived(added.entries.length || 1);
      if (added.usage) timing.counted(added.usage.completion_tokens);
      finish = added.finish ?? finish;
      if (added.route) route = routeText(added.route);
      this.#take(added, message);
      view.append(added);
      if (added.calls.length) view.calls.show(message.calls);
      this.#keep(thread, false);
    }
    if (finish === null) throw new ApiError("The answer is incomplete: the server closed the connection.");
    return { finish, route };
  }

  #take({ text, reasoning, calls }, message) {
    message.content += text;
    if (reasoning) message.reasoning = (message.reasoning ?? "") + reasoning;
    if (calls.length) addCalls((message.calls ??= []), calls);
  }

  /** Have a conversation kept, now or if that was some time ago. */
  #keep(thread, isNow) {
    const now = performance.now();
    if (thread.isDropped || (!isNow && now - thread.kept < KEEP_MS)) return;
    thread.kept = now;
    this.on.changed(thread.conversation);
  }

  #failed(error, message, thread) {
    const { view } = thread.answer;
    view.fail(error instanceof ApiError ? error.message : `The connection was lost: ${error.message}`);
    view.root.dataset.failed = "";
    if (!message.content) {
      thread.conversation.messages = thread.conversation.messages.filter((other) => other !== message);
      thread.views.delete(message);
    }
    thread.isTooLong = error.code === TOO_LONG;
    if (error.status === 401) this.on.unauthorized();
  }

  /** Show the actions of a thread's messages, and those of the last one, whose view is given; with null, none. */
  #offer(thread, last) {
    for (const view of thread.views.values()) {
      view.setActions();
      view.calls?.close();
    }
    if (!last) return;
    for (const [message, view] of thread.views) {
      if (message.role === "user") view.setActions(button("Edit", () => this.edit(message)));
    }
    const message = thread.conversation.messages.at(-1);
    if (last instanceof AnswerView) {
      const again = last.root.dataset.failed === undefined ? "Regenerate" : "Try again";
      const actions = [button(again, () => this.regenerate())];
      if (thread.isTooLong && thread.conversation.laterTurns.length) {
        actions.unshift(button("Go on without the oldest messages", () => this.#goOn(thread, last)));
      }
      last.setActions(...actions);
      if (message?.calls?.length) last.calls.ask(message.calls, (results) => this.#sendResults(thread, message.calls, results));
    } else if (last instanceof UserView) {
      last.setActions(button("Edit", () => this.edit(message)), button("Answer", () => this.regenerate()));
    }
  }

  async #sendResults(thread, calls, results) {
    calls.forEach(({ id }, index) => {
      const message = thread.conversation.add("tool", results[index], { tool_call_id: id });
      this.#show(thread, message, new ToolView(message));
    });
    await this.#answer(thread);
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
    if (!this.following) return;
    log.scrollTop = log.scrollHeight;
    this.#scrollTop = log.scrollTop; // less than before where the log has shrunk
  }

  /** Handle scrolling, by the reader or by `#follow`, whose event comes when the log may have grown further. */
  scrolled() {
    const { scrollTop, scrollHeight, clientHeight } = this.page.log;
    const isUp = scrollTop < this.#scrollTop;
    this.following = scrollHeight - scrollTop - clientHeight < NEAR_END || (this.following && !isUp);
    this.#scrollTop = scrollTop;
  }
}
