// The live state of the engine. Connected only while it is visible, since the view costs engine time.

import { AdaptersView } from "./adapters.js";
import { BatchView } from "./batch.js";
import { call } from "./api.js";
import { EnginesView } from "./engines.js";
import { changed, whole } from "./feed.js";
import { PagesView } from "./pages.js";
import { PrefixesView } from "./prefixes.js";
import { QueueView } from "./queue.js";
import { write } from "./rows.js";
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
  #engine = null; // that the user has chosen of several
  #table = null; // of the engines, if there are several

  constructor(root, pulse) {
    this.root = root;
    this.note = root.querySelector("#engine-note");
    this.number = root.querySelector("#engine-number");
    this.pulse = pulse;
    this.pages = new PagesView(root);
    this.speed = new SpeedView(root);
    this.timeline = new TimelineView(root);
    this.tree = new TreeView(root);
    this.adapters = new AdaptersView(root);
    this.engines = new EnginesView(root, (engine) => this.#choose(engine));
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
    this.#table = null;
    this.#choose(null);
  }

  /** Show one of several engines, or with null the first that is there. */
  #choose(engine) {
    if (engine !== null && engine === this.#shown) return;
    this.#engine = engine;
    this.#picture = null;
    this.tree.setSource(this.#source);
    for (const view of this.views) view.clear?.();
    this.#showTable();
    this.retry();
  }

  /** The parameters that say what is shown. */
  get #source() {
    const source = {};
    if (this.#model) source.model = this.#model;
    if (this.#engine !== null) source.engine = this.#engine;
    return source;
  }

  /** The number of the engine that is shown, if there are several. */
  get #shown() {
    const engines = this.#table?.engines ?? [];
    return this.#engine ?? (engines.find(({ state }) => state !== "away") ?? engines[0])?.number;
  }

  #showTable() {
    const isOneOfSeveral = this.#table !== null && this.#table.engines.length > 1;
    if (this.#table) this.engines.show(this.#table, this.#shown);
    else this.engines.hide();
    write(this.number, isOneOfSeveral ? String(this.#shown) : "");
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
    let [problem, code] = ["", null];
    try {
      const query = String(new URLSearchParams(this.#source));
      const response = await call(`view/events${query && `?${query}`}`, { signal: stream.signal });
      for await (const { event, data } of events(response)) {
        if (this.#stream !== stream) return; // an event has made this page show another engine
        this.#take(event, JSON.parse(data));
      }
      problem = "The server closed the view; reconnecting …";
    } catch (error) {
      [problem, code] = [error.message, error.code];
    }
    if (this.#stream !== stream) return; // this page closed it
    if (code === "engine_not_found") {
      this.#choose(null);
      return;
    }
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
    if (event === "engines") {
      this.#takeTable(data);
      return;
    }
    if (event === "adapters") {
      this.adapters.show(data);
      return;
    }
    if (event === "history") {
      this.adapters.hide(); // until there is a table of them
      this.speed.start(data.points);
      if (data.engines === 1) this.#takeTable(null);
    }
    if (event === "picture") this.#picture = whole(data);
    else if (event === "change") this.#picture = changed(this.#picture, data);
    else return;
    this.#say("", false);
    this.pulse.className = this.#picture.stats.running ? "pulse busy" : "pulse idle";
    for (const view of this.views) view.add?.(this.#picture);
    this.#draw();
  }

  #takeTable(table) {
    this.#table = table;
    const hasLeft = table && this.#engine !== null && !table.engines.some(({ number }) => number === this.#engine);
    if (hasLeft) this.#choose(null);
    else this.#showTable();
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
