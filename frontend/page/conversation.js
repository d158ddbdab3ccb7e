// A conversation, and the requests that continue it.

import { withFiles } from "./attachments.js";

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "repetition_penalty", "presence_penalty", "frequency_penalty"];
const TOP = 5; // likeliest tokens shown for each token
const TITLE_LENGTH = 80;

/**
 * Messages are {role: "user", content, files?: [{name, text}]}, {role: "assistant", content, model, reasoning?, calls?,
 * figures?, isPartial?}, where `isPartial` says that more of it was still to come, or {role: "tool", content, tool_call_id}.
 */
export class Conversation {
  /** `kept`: what `kept` returned earlier; without it the conversation is new. */
  constructor(kept = {}) {
    const now = Date.now();
    this.id = kept.id ?? `${now.toString(36)}-${Math.random().toString(36).slice(2, 10)}`;
    this.title = kept.title ?? "";
    this.isNamed = kept.isNamed ?? false;
    this.created = kept.created ?? now;
    this.updated = kept.updated ?? now;
    this.messages = kept.messages ?? [];
    this.start = kept.start ?? 0; // of the messages that are sent; those before it no longer fit the model's context
  }

  /** What is kept of it: plain values, without an answer that has not begun. */
  get kept() {
    const { id, title, isNamed, created, updated } = this;
    const start = this.messages.slice(0, this.start).filter(hasContent).length;
    return { id, title, isNamed, created, updated, messages: this.messages.filter(hasContent), start };
  }

  add(role, content, more = {}) {
    const message = { role, content, ...more };
    this.messages.push(message);
    this.updated = Date.now();
    if (!this.isNamed && role === "user" && this.messages.length === 1) this.title = titleOf(message);
    return message;
  }

  /** Remove and return a message and all after it. Where that reaches those that are not sent, all that remain are sent. */
  cut(message) {
    const index = this.messages.indexOf(message);
    if (index < this.start) this.start = 0;
    return this.messages.splice(index);
  }

  /** Remove and return all messages after one. */
  cutAfter(message) {
    return this.messages.splice(this.messages.indexOf(message) + 1);
  }

  /** The indices of the messages with which a shorter request could begin. */
  get laterTurns() {
    return this.messages.flatMap(({ role }, index) => (role === "user" && index > this.start ? [index] : []));
  }

  last(role) {
    return this.messages.findLast((message) => message.role === role);
  }

  /** Return path and body of the request for the next answer. `chat`: send messages, else a text to continue. */
  request(model, settings, chat, start = this.start) {
    const body = { model, stream: true, stream_options: { include_usage: true }, return_route: true };
    for (const name of NUMBERS) {
      if (typeof settings[name] === "number") body[name] = settings[name];
    }
    const messages = this.messages.slice(start);
    return chat ? this.#chat(body, settings, messages) : this.#completion(body, settings, messages);
  }

  #chat(body, settings, messages) {
    const system = settings.system?.trim();
    body.messages = [...(system ? [{ role: "system", content: system }] : []), ...messages.map(sent)];
    if (settings.tools) body.tools = settings.tools;
    if (settings.logprobs) Object.assign(body, { logprobs: true, top_logprobs: TOP });
    return { path: "v1/chat/completions", body };
  }

  #completion(body, settings, messages) {
    body.prompt = messages.map(({ content, files }) => withFiles(content, files)).join("");
    body.max_tokens ??= 256; // the API's own default is 16
    if (settings.logprobs) body.logprobs = TOP;
    return { path: "v1/completions", body };
  }
}

function hasContent({ role, content, reasoning, calls }) {
  return role !== "assistant" || content || reasoning || calls;
}

function titleOf({ content, files }) {
  const line = content.trim().split("\n")[0] || files?.[0]?.name || "";
  return line.length > TITLE_LENGTH ? `${line.slice(0, TITLE_LENGTH - 1)}…` : line;
}

/** Return a message as the API takes it. */
function sent({ role, content, files, calls, tool_call_id: id }) {
  if (role === "tool") return { role, content, tool_call_id: id };
  if (calls?.length) return { role, content, tool_calls: calls };
  return { role, content: withFiles(content, files) };
}

/** Return the increment in a chunk of either endpoint: {text, reasoning, entries, calls, finish, usage, route}. */
export function increment(chunk) {
  const choice = chunk.choices?.[0];
  const delta = choice?.delta;
  return {
    text: delta?.content ?? choice?.text ?? "",
    reasoning: delta?.reasoning_content ?? delta?.reasoning ?? "",
    calls: delta?.tool_calls ?? [],
    entries: entries(choice?.logprobs),
    finish: choice?.finish_reason ?? null,
    usage: chunk.usage ?? null,
    route: choice?.route ?? null,
  };
}

/** Add the increments of tool calls to the calls so far. */
export function addCalls(calls, increments) {
  for (const { index = calls.length, id, function: { name, arguments: text } = {} } of increments) {
    calls[index] ??= { id: "", type: "function", function: { name: "", arguments: "" } };
    if (id) calls[index].id = id;
    calls[index].function.name += name ?? "";
    calls[index].function.arguments += text ?? "";
  }
}

/** Return the logprobs of either endpoint as [{token, logprob, top: [{token, logprob}]}]. */
function entries(logprobs) {
  if (!logprobs) return [];
  if (logprobs.content) {
    return logprobs.content.map(({ token, logprob, top_logprobs: top }) => ({ token, logprob, top: top ?? [] }));
  }
  return (logprobs.tokens ?? []).map((token, index) => ({
    token,
    logprob: logprobs.token_logprobs[index],
    top: Object.entries(logprobs.top_logprobs?.[index] ?? {}).map(([other, logprob]) => ({ token: other, logprob })),
  }));
}
