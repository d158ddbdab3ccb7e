// The conversations kept in this browser, in IndexedDB; without it, in memory until the page ends.

const NAME = "quire";
const MOST = 500; // conversations; the ones longest unused make room
const FORMAT = "quire.conversations";
const ROLES = ["user", "assistant", "tool"];

/** Return a promise of the result of an IDBRequest. */
function done(request) {
  return new Promise((resolve, reject) => {
    request.addEventListener("success", () => resolve(request.result));
    request.addEventListener("error", () => reject(request.error));
  });
}

async function openDatabase() {
  const request = indexedDB.open(NAME, 1);
  request.addEventListener("upgradeneeded", () => {
    request.result.createObjectStore("conversations", { keyPath: "id" });
    request.result.createObjectStore("heads", { keyPath: "id" });
  });
  return done(request);
}

export class Library {
  #database = null;
  #memory = new Map();
  #channel = globalThis.BroadcastChannel ? new BroadcastChannel("quire.library") : null;

  /** `onChange()` is called when conversations have changed, here or in another tab. */
  constructor(onChange) {
    this.onChange = onChange;
    this.#channel?.addEventListener("message", onChange);
    this.ready = openDatabase().then((database) => { this.#database = database; }, () => {});
  }

  get isKept() {
    return this.#database !== null;
  }

  get limit() {
    return MOST;
  }

  /** Return {id, title, updated} of all conversations, the latest first. */
  async heads() {
    await this.ready;
    const heads = this.#database ? await done(this.#store("heads").getAll()) : [...this.#memory.values()].map(head);
    return heads.sort((one, other) => other.updated - one.updated);
  }

  async get(id) {
    await this.ready;
    return this.#database ? done(this.#store("conversations").get(id)) : this.#memory.get(id);
  }

  async all() {
    await this.ready;
    return this.#database ? done(this.#store("conversations").getAll()) : [...this.#memory.values()];
  }

  /** Keep conversations, in place of those with the same ids. */
  async put(...conversations) {
    await this.ready;
    if (this.#database) {
      const [whole, heads, ended] = this.#write();
      for (const conversation of conversations) {
        whole.put(conversation);
        heads.put(head(conversation));
      }
      await ended;
    } else for (const conversation of conversations) this.#memory.set(conversation.id, conversation);
    await this.#makeRoom();
    this.#changed();
  }

  async remove(...ids) {
    await this.ready;
    if (this.#database) {
      const [whole, heads, ended] = this.#write();
      for (const id of ids) {
        whole.delete(id);
        heads.delete(id);
      }
      await ended;
    } else for (const id of ids) this.#memory.delete(id);
    this.#changed();
  }

  /** Return the ids of conversations with all words of a text, each with some text around the first: Map of id to snippet. */
  async search(text) {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    const found = new Map();
    for (const { id, title, messages } of await this.all()) {
      const whole = [title, ...messages.map(({ content }) => content)].join("\n");
      const lower = whole.toLowerCase();
      if (words.every((word) => lower.includes(word))) found.set(id, snippet(whole, lower.lastIndexOf(words[0]), words[0].length));
    }
    return found;
  }

  async #makeRoom() {
    const heads = await this.heads();
    if (heads.length > MOST) await this.remove(...heads.slice(MOST).map(({ id }) => id));
  }

  #store(name) {
    return this.#database.transaction(name).objectStore(name);
  }

  /** Return both stores for writing, and a promise of the end of the transaction. */
  #write() {
    const transaction = this.#database.transaction(["conversations", "heads"], "readwrite");
    const ended = new Promise((resolve, reject) => {
      transaction.addEventListener("complete", resolve);
      transaction.addEventListener("abort", () => reject(transaction.error));
    });
    return [transaction.objectStore("conversations"), transaction.objectStore("heads"), ended];
  }

  #changed() {
    this.#channel?.postMessage("changed");
    this.onChange();
  }
}

function head({ id, title, updated }) {
  return { id, title, updated };
}

function snippet(text, index, length) {
  const from = Math.max(0, index - 24);
  return { before: (from ? "…" : "") + text.slice(from, index), match: text.slice(index, index + length), after: text.slice(index + length, index + 60) };
}

/** Return conversations as the text of a file. */
export function exported(conversations) {
  return JSON.stringify({ format: FORMAT, version: 1, conversations }, null, 1);
}

/** Return the conversations in the text of a file. Throws an Error with a message for people. */
export function imported(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch {
    throw new Error("This file is not JSON.");
  }
  if (file?.format !== FORMAT || !Array.isArray(file.conversations)) {
    throw new Error("This file has no conversations that were exported here.");
  }
  return file.conversations.slice(0, MOST).map(checked);
}

function checked(given) {
  const messages = given?.messages;
  const isGood = typeof given?.id === "string" && Array.isArray(messages) &&
    messages.every((each) => ROLES.includes(each?.role) && typeof each.content === "string");
  if (!isGood) throw new Error("This file is damaged: a conversation in it lacks its messages.");
  const time = Number.isFinite(given.updated) ? given.updated : Date.now();
  const start = Number.isInteger(given.start) && messages[given.start]?.role === "user" ? given.start : 0;
  return { id: given.id, title: String(given.title ?? ""), isNamed: Boolean(given.isNamed), created: time, updated: time, messages: messages.map(checkedMessage), start };
}

/** Return a message with the known fields that have the right types. */
function checkedMessage({ role, content, model, reasoning, figures, files, calls, isPartial, tool_call_id: call }) {
  const message = { role, content };
  if (typeof model === "string") message.model = model;
  if (typeof reasoning === "string") message.reasoning = reasoning;
  if (typeof figures === "string") message.figures = figures;
  if (isPartial === true) message.isPartial = true;
  if (typeof call === "string") message.tool_call_id = call;
  if (Array.isArray(files)) message.files = files.filter(({ name, text }) => typeof name === "string" && typeof text === "string");
  if (Array.isArray(calls)) message.calls = calls.filter((each) => typeof each?.function?.name === "string" && typeof each.function.arguments === "string");
  return message;
}
