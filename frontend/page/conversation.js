// A conversation, and the requests that continue it.

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "repetition_penalty"];
const TOP = 5; // likeliest tokens shown for each token

export class Conversation {
  messages = []; // {role: "user" | "assistant", content}

  add(role, content) {
    const message = { role, content };
    this.messages.push(message);
    return message;
  }

  /** Remove and return all messages after one. */
  cutAfter(message) {
    return this.messages.splice(this.messages.indexOf(message) + 1);
  }

  last(role) {
    return this.messages.findLast((message) => message.role === role);
  }

  /** Return path and body of the request for the next answer. `chat`: send messages, else a text to continue. */
  request(model, settings, chat) {
    const body = { model, stream: true, stream_options: { include_usage: true } };
    for (const name of NUMBERS) {
      if (typeof settings[name] === "number") body[name] = settings[name];
    }
    return chat ? this.#chat(body, settings) : this.#completion(body, settings);
  }

  #chat(body, settings) {
    const system = settings.system?.trim();
    body.messages = [...(system ? [{ role: "system", content: system }] : []), ...this.messages];
    if (settings.logprobs) Object.assign(body, { logprobs: true, top_logprobs: TOP });
    return { path: "v1/chat/completions", body };
  }

  #completion(body, settings) {
    body.prompt = this.messages.map((message) => message.content).join("");
    body.max_tokens ??= 256; // the API's own default is 16
    if (settings.logprobs) body.logprobs = TOP;
    return { path: "v1/completions", body };
  }
}

/** Return the increment in a chunk of either endpoint: {text, reasoning, entries, finish, usage}. */
export function increment(chunk) {
  const choice = chunk.choices?.[0];
  const delta = choice?.delta;
  return {
    text: delta?.content ?? choice?.text ?? "",
    reasoning: delta?.reasoning_content ?? delta?.reasoning ?? "",
    entries: entries(choice?.logprobs),
    finish: choice?.finish_reason ?? null,
    usage: chunk.usage ?? null,
  };
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
