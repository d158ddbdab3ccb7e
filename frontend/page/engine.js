// The live state of the engine. Connected only while it is visible, since the view costs engine time.

import { BatchView } from "./batch.js";
import { call } from "./api.js";
import { PagesView } from "./pages.js";
import { PrefixesView } from "./prefixes.js";
import { QueueView } from "./queue.js";
import { SpeedView } from "./speed.js";
import { events } from "./sse.js";

const RETRY_MS = 3000;

export class EnginePanel {
  isOpen = false;
  #stream = null; // AbortController of the connection
  #timer = 0;

  constructor(root, pulse) {
    this.note = root.querySelector("#engine-note");
    this.pulse = pulse;
    this.pages = new PagesView(root);
    this.speed = new SpeedView(root);
    this.views = [this.speed, new BatchView(root), new QueueView(root), this.pages, new PrefixesView(root)];
    document.addEventListener("visibilitychange", () => this.#update());
    addEventListener("pagehide", () => this.#stream?.abort());
  }

  setOpen(isOpen) {
    this.isOpen = isOpen;
    this.#update();
  }

  /** Reconnect at once, for example with a new key. */
  retry() {
    this.#disconnect();
    this.#update();
  }

  /** Repaint after the colours have changed. */
  repaint() {
    this.pages.paint();
  }

  #update() {
    const isSeen = this.isOpen && !document.hidden;
    if (isSeen && !this.#stream) this.#connect();
    else if (!isSeen) this.#disconnect();
  }

  #disconnect() {
    clearTimeout(this.#timer);
    this.#stream?.abort();
    this.#stream = null;
    this.pulse.className = "pulse";
  }

  async #connect() {
    const stream = (this.#stream = new AbortController());
    let problem;
    try {
      const response = await call("view/events", { signal: stream.signal });
      for await (const { event, data } of events(response)) this.#take(event, JSON.parse(data));
      problem = "The server closed the view; reconnecting …";
    } catch (error) {
      problem = error.message;
    }
    if (this.#stream !== stream) return; // this page closed it
    this.pulse.className = "pulse";
    this.#say(problem, true);
    this.#timer = setTimeout(() => {
      this.#stream = null;
      this.#update();
    }, RETRY_MS);
  }

  #take(event, data) {
    if (event === "problem") {
      this.#say(data.message, true);
      return;
    }
    if (event === "history") this.speed.start(data.points);
    if (event !== "picture") return;
    this.#say("", false);
    this.pulse.className = data.stats.running ? "pulse busy" : "pulse idle";
    for (const view of this.views) view.show(data);
  }

  #say(text, isBad) {
    if (this.note.textContent !== text) this.note.textContent = text;
    this.note.hidden = !text;
    this.note.classList.toggle("bad", isBad);
  }
}
