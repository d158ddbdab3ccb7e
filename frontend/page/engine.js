// The live state of the engine. Connected only while it is visible, since the view costs engine time.

import { BatchView } from "./batch.js";
import { call } from "./api.js";
import { changed, whole } from "./feed.js";
import { PagesView } from "./pages.js";
import { PrefixesView } from "./prefixes.js";
import { QueueView } from "./queue.js";
import { SpeculationView } from "./speculation.js";
import { SpeedView } from "./speed.js";
import { events } from "./sse.js";
import { TimelineView } from "./timeline.js";
import { TreeView } from "./tree.js";

const RETRY_MS = 3000;

export class EnginePanel {
  isOpen = false;
  isFull = false;
  #picture = null;
  #stream = null; // AbortController of the connection
  #timer = 0;
  #model = ""; // of several

  constructor(root, pulse) {
    this.root = root;
    this.note = root.querySelector("#engine-note");
    this.pulse = pulse;
    this.pages = new PagesView(root);
    this.speed = new SpeedView(root);
    this.timeline = new TimelineView(root);
    this.tree = new TreeView(root);
    this.views = [
      this.speed, new BatchView(root), new QueueView(root), this.pages, new PrefixesView(root), this.timeline,
      new SpeculationView(root), this.tree,
    ];
    document.addEventListener("visibilitychange", () => this.#update());
    addEventListener("pagehide", () => this.#stream?.abort());
  }

  setOpen(isOpen) {
    this.isOpen = isOpen;
    this.#update();
  }

  /** Take the whole window, with more of everything, or give it back. */
  setFull(isFull) {
    this.isFull = isFull;
    this.root.classList.toggle("full", isFull);
    for (const view of this.views) view.setFull?.(isFull);
    if (this.#picture) this.#draw();
    this.repaint();
  }

  /** Show the engine of one of several models. */
  setModel(model) {
    if (model === this.#model) return;
    this.#model = model;
    this.tree.setModel(model);
    this.retry();
  }

  /** Reconnect at once, for example with a new key. */
  retry() {
    this.#disconnect();
    this.#update();
  }

  /** Repaint after the colours have changed. */
  repaint() {
    this.pages.paint();
    this.timeline.paint();
  }

  #update() {
    const isSeen = this.isOpen && !document.hidden;
    if (isSeen && !this.#stream) this.#connect();
    else if (!isSeen) this.#disconnect();
    this.tree.setLive(isSeen);
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
      const response = await call(`view/events${this.#model && `?model=${encodeURIComponent(this.#model)}`}`, { signal: stream.signal });
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
    if (event === "picture") this.#picture = whole(data);
    else if (event === "change") this.#picture = changed(this.#picture, data);
    else return;
    this.#say("", false);
    this.pulse.className = this.#picture.stats.running ? "pulse busy" : "pulse idle";
    for (const view of this.views) view.add?.(this.#picture);
    this.#draw();
  }

  #draw() {
    for (const view of this.views) view.show(this.#picture);
  }

  #say(text, isBad) {
    if (this.note.textContent !== text) this.note.textContent = text;
    this.note.hidden = !text;
    this.note.classList.toggle("bad", isBad);
  }
}
