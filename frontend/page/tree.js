// The prefix cache as a radix tree. The server sends a bounded part of it: the upper levels, and what the viewer opens.

import { call } from "./api.js";
import { count, whole } from "./numbers.js";
import { rowOf, write } from "./rows.js";
import { depthOf, layOut, sizeOf } from "./tree_layout.js";

const PERIOD_MS = 1500;
const BRANCHES = 12; // that are shown of a run when it is opened
const MORE = 24;
const MOST_BRANCHES = 200; // the server's limits
const MOST_OPENED = 128;
const MOST_RUNS = 256;
const STATES = ["free", "held", "shared", "cached", "pinned"];
const ORDER = ["pinned", "shared", "held", "cached"]; // the states of a run from its first page to its last
const FIELDS = ["id", "parent", "is_salted", "hits", "users", "num_pages", "branches", "pages_below", "is_next_evicted"];
const WHOLE_CACHE = -1;
const [HEIGHT, GAP_Y, GAP_X, NARROW_GAP] = [4, 0.6, 3.2, 1.8]; // of a node and between nodes, in em
const [NARROWEST, WIDEST] = [13, 32];
const NARROW_FRAME = 32;
const CORNER = 0.7;
const SVG = "http://www.w3.org/2000/svg";

export class TreeView {
  #isFull = false;
  #isLive = false;
  #timer = 0;
  #request = null; // AbortController of the poll
  #seen = ""; // state of the engine at the last poll
  #now = "";
  #tag = "";
  #source = {}; // the parameters that say of which engine
  #answer = null; // {runs, blockSize, showsText}
  #texts = new Map(); // id -> [first, last]
  #shown = new Map(); // id -> number of branches that the viewer wants
  #items = [];
  #nodes = new Map(); // key -> element
  #current = WHOLE_CACHE; // key of the item that has the focus of the tree

  constructor(root) {
    this.root = root.querySelector("#tree-section");
    this.tree = root.querySelector("#tree");
    this.size = root.querySelector("#tree-size");
    this.summary = root.querySelector("#tree-summary");
    this.detail = root.querySelector("#tree-detail");
    this.links = document.createElementNS(SVG, "svg");
    this.links.setAttribute("aria-hidden", "true");
    this.tree.append(this.links);
    this.tree.addEventListener("keydown", (event) => this.#key(event));
    this.tree.addEventListener("click", (event) => this.#click(event));
    this.tree.addEventListener("focusin", (event) => this.#select(this.#itemOf(event.target)));
    new ResizeObserver(() => this.#place()).observe(this.tree.parentElement);
  }

  setFull(isFull) {
    this.#isFull = isFull;
    this.#update();
  }

  /** Show the prefix cache of another engine; `source` has the parameters that name it. */
  setSource(source) {
    this.#source = source;
    this.#tag = this.#seen = "";
    this.#texts.clear();
    this.#shown.clear();
  }

  /** Ask the server only while `isLive`. */
  setLive(isLive) {
    this.#isLive = isLive;
    this.#update();
  }

  /** Note the state of the engine: a tree that has not changed is not asked for again. */
  show({ stats, prefixes }) {
    const hits = prefixes.reduce((sum, { hits: of }) => sum + of, 0);
    this.#now = [stats.step, stats.pages_free, stats.pages_cached, stats.pages_held, stats.evictions, hits].join();
  }

  #update() {
    clearTimeout(this.#timer);
    if (this.#isFull && this.#isLive) this.#poll(true);
    else this.#request?.abort();
  }

  async #poll(isNeeded) {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#poll(false), PERIOD_MS);
    if (!isNeeded && (this.#now === this.#seen || this.#request)) return;
    this.#request?.abort();
    const request = (this.#request = new AbortController());
    const seen = this.#now;
    try {
      const shown = [...this.#shown].map(([id, number]) => `${id}:${number}`).join();
      const query = new URLSearchParams({ shown, known: this.#tag, ...this.#source });
      const response = await call(`view/prefixes?${query}`, { signal: request.signal });
      this.#take(await response.json());
      this.#seen = seen;
    } catch (error) {
      if (error.name !== "AbortError") write(this.summary, error.message);
    } finally {
      if (this.#request === request) this.#request = null;
    }
  }

  #take({ tag, goes_on: goesOn, block_size: blockSize, shows_text: showsText, runs, texts }) {
    this.#tag = tag;
    if (!goesOn) this.#texts.clear();
    for (const [id, text] of Object.entries(texts)) this.#texts.set(Number(id), text);
    const named = runs.map((run) => Object.fromEntries(FIELDS.map((field, index) => [field, run[index]])));
    this.#answer = { runs: named, blockSize, showsText };
    const ids = new Set(named.map(({ id }) => id));
    for (const id of this.#shown.keys()) if (!ids.has(id)) this.#shown.delete(id); // evicted
    this.#draw();
  }

  #draw() {
    const { runs } = this.#answer;
    const closed = new Set([...this.#shown].flatMap(([id, number]) => (number ? [] : [id])));
    this.#items = layOut(runs, closed);
    if (!this.#items.some(({ key }) => key === this.#current)) this.#current = WHOLE_CACHE;
    this.#describe();
    const longest = Math.max(1, ...runs.map(sizeOf));
    const hadFocus = this.tree.contains(document.activeElement);
    const kept = new Set();
    let before = this.links;
    for (const item of this.#items) {
      const node = this.#nodes.get(item.key) ?? this.#make(item);
      kept.add(item.key);
      if (before.nextSibling !== node) before.after(node);
      before = node;
      this.#fill(node, item, longest);
    }
    for (const [key, node] of this.#nodes) {
      if (kept.has(key)) continue;
      node.remove();
      this.#nodes.delete(key);
    }
    if (hadFocus && !this.tree.contains(document.activeElement)) this.#nodes.get(this.#current).focus();
    this.#place();
    this.#showDetail();
  }

  #describe() {
    const [cache] = this.#answer.runs;
    write(this.size, `${count(cache.pages_below, "page")}, ${whole(cache.pages_below * this.#answer.blockSize)} tokens`);
    const isCut = this.#answer.runs.length >= MOST_RUNS;
    write(this.summary, cache.branches
      ? `Prompts that begin alike share their pages. ${isCut ? "Only a part fits here: close some branches to see others." : ""}`
      : "Nothing is cached yet.");
    this.tree.hidden = cache.branches === 0;
  }

  #make({ key, run }) {
    const node = rowOf("div", ["span", "run-text"], ["span", "run-figures"], ["span", "run-toggle"], ["span", "run-pages"]);
    node.className = run ? "run" : "run more";
    node.setAttribute("role", "treeitem");
    node.dataset.key = key;
    const strip = node.querySelector(".run-pages");
    strip.setAttribute("aria-hidden", "true");
    strip.append(...ORDER.map((state) => Object.assign(document.createElement("i"), { className: state })));
    node.querySelector(".run-toggle").setAttribute("aria-hidden", "true");
    this.#nodes.set(key, node);
    return node;
  }

  #fill(node, item, longest) {
    const { run, hidden } = item;
    node.setAttribute("aria-level", item.level);
    node.setAttribute("aria-posinset", item.position);
    node.setAttribute("aria-setsize", item.setSize);
    node.setAttribute("aria-selected", String(item.key === this.#current));
    node.tabIndex = item.key === this.#current ? 0 : -1;
    if (hidden) {
      write(node.querySelector(".run-text"), `${count(hidden.branches, "more branch", "more branches")}`);
      write(node.querySelector(".run-figures"), count(hidden.pages, "page"));
      return;
    }
    node.classList.toggle("used", run.users > 0);
    node.classList.toggle("hidden-text", !this.#texts.has(run.id));
    if (run.branches) node.setAttribute("aria-expanded", String(item.isExpanded));
    else node.removeAttribute("aria-expanded");
    write(node.querySelector(".run-text"), this.#label(run));
    write(node.querySelector(".run-figures"), this.#figures(run));
    write(node.querySelector(".run-toggle"), run.branches ? `${item.isExpanded ? "−" : "+"} ${whole(run.branches)}` : "");
    const strip = node.querySelector(".run-pages");
    const size = sizeOf(run);
    strip.style.width = `${size ? Math.max(5, 100 * Math.sqrt(size / longest)) : 0}%`;
    ORDER.forEach((state, index) => { strip.children[index].style.flexGrow = run.num_pages[STATES.indexOf(state)]; });
  }

  #label(run) {
    if (run.id === WHOLE_CACHE) return "All prompts";
    const text = this.#texts.get(run.id)?.[0];
    if (text !== undefined) return visible(text);
    return run.is_salted ? (sizeOf(run) ? "hidden: it has a salt" : "A cache salt") : "hidden: others can see this page";
  }

  #figures(run) {
    const size = sizeOf(run);
    return [
      size ? count(size * this.#answer.blockSize, "token") : count(run.pages_below, "page"),
      run.id === WHOLE_CACHE ? count(run.branches, "branch", "branches") : count(run.hits, "hit"),
      run.users ? `${whole(run.users)} now` : "",
      run.is_next_evicted ? "evicted next" : "",
    ].filter(Boolean).join(" · ");
  }

  /** Put the nodes where they belong, and draw the links between them. */
  #place() {
    if (!this.#items.length || !this.tree.clientWidth) return;
    const em = parseFloat(getComputedStyle(this.tree).fontSize);
    const space = this.tree.parentElement.clientWidth - em;
    const gap = (space < NARROW_FRAME * em ? NARROW_GAP : GAP_X) * em;
    const levels = Math.max(...this.#items.map(({ level }) => level));
    const width = Math.min(WIDEST * em, Math.max(NARROWEST * em, (space - (levels - 1) * gap) / levels));
    const [height, rowHeight] = [HEIGHT * em, (HEIGHT + GAP_Y) * em];
    const left = ({ level }) => (level - 1) * (width + gap);
    const top = ({ row }) => row * rowHeight;
    for (const item of this.#items) {
      const { style } = this.#nodes.get(item.key);
      style.transform = `translate(${left(item)}px, ${top(item)}px)`;
      [style.width, style.height] = [`${width}px`, `${height}px`];
    }
    const right = Math.max(...this.#items.map(left)) + width;
    const bottom = Math.max(...this.#items.map(top)) + height;
    [this.tree.style.width, this.tree.style.height] = [`${right}px`, `${bottom}px`];
    this.links.setAttribute("width", right);
    this.links.setAttribute("height", bottom);
    const most = Math.max(1, ...this.#items.map(({ run }) => run?.hits ?? 0));
    const linked = this.#items.filter(({ parent }) => parent);
    linked.sort((one, other) => Boolean(one.run?.users) - Boolean(other.run?.users)); // those in use are on top
    this.links.replaceChildren(...linked.map((item) => {
      const path = document.createElementNS(SVG, "path");
      const [x1, y1] = [left(item.parent) + width, top(item.parent) + height / 2];
      const [x2, y2] = [left(item), top(item) + height / 2];
      const middle = x1 + (x2 - x1) / 2;
      const corner = CORNER * em;
      path.setAttribute("d", y1 === y2 ? `M${x1},${y1}H${x2}` : `M${x1},${y1}H${middle - corner}q${corner},0 ${corner},${corner}` +
        `V${y2 - corner}q0,${corner} ${corner},${corner}H${x2}`);
      path.setAttribute("class", item.run?.users ? "used" : item.hidden ? "more" : "");
      path.setAttribute("stroke-width", (0.08 + 0.45 * Math.sqrt((item.run?.hits ?? 0) / most)) * em);
      return path;
    }));
  }

  #itemOf(element) {
    const key = element.closest?.("[role=treeitem]")?.dataset.key;
    return this.#items.find((item) => String(item.key) === key);
  }

  #select(item) {
    if (!item || item.key === this.#current) return;
    const old = this.#nodes.get(this.#current);
    old?.setAttribute("aria-selected", "false");
    if (old) old.tabIndex = -1;
    this.#current = item.key;
    const node = this.#nodes.get(item.key);
    node.setAttribute("aria-selected", "true");
    node.tabIndex = 0;
    this.#showDetail();
  }

  #showDetail() {
    const item = this.#items.find(({ key }) => key === this.#current);
    this.detail.hidden = !item?.run || item.run.id === WHOLE_CACHE;
    if (this.detail.hidden) return;
    const { run } = item;
    const { blockSize } = this.#answer;
    const [first = this.#label(run), last = ""] = this.#texts.get(run.id) ?? [];
    const size = sizeOf(run);
    const numbers = STATES.map((state, index) => (run.num_pages[index] ? `${whole(run.num_pages[index])} ${state}` : ""));
    write(this.detail.querySelector(".detail-figures"), [
      size ? `${count(size, "page")}: ${numbers.filter(Boolean).join(", ")}` : "",
      size ? `tokens ${whole((depthOf(item) - size) * blockSize + 1)} to ${whole(depthOf(item) * blockSize)} of its prompts` : "",
      count(run.hits, "hit"),
      run.users ? `held by ${whole(run.users)} now` : "",
      run.branches ? `${count(run.branches, "branch", "branches")} with ${count(run.pages_below, "page")}` : "no branches",
    ].filter(Boolean).join(" · "));
    write(this.detail.querySelector(".detail-first"), first);
    write(this.detail.querySelector(".detail-last"), last);
    this.detail.querySelector(".detail-gap").hidden = !last;
  }

  #click(event) {
    const item = this.#itemOf(event.target);
    if (!item) return;
    this.#nodes.get(item.key).focus({ preventScroll: true });
    if (item.hidden || event.target.closest(".run-toggle")) this.#toggle(item);
  }

  #toggle(item) {
    const { run } = item;
    if (item.hidden) {
      const shown = item.parent.children.length - 1;
      this.#open(item.parent.run.id, Math.min(MOST_BRANCHES, shown + MORE));
    } else if (run.branches) this.#open(run.id, item.isExpanded ? 0 : BRANCHES);
  }

  #open(id, branches) {
    this.#shown.delete(id);
    this.#shown.set(id, branches); // the latest one last
    if (this.#shown.size > MOST_OPENED) this.#shown.delete(this.#shown.keys().next().value);
    this.#draw();
    this.#poll(true);
  }

  #key(event) {
    const item = this.#itemOf(event.target);
    if (!item || event.ctrlKey || event.metaKey || event.altKey) return;
    const index = this.#items.indexOf(item);
    const go = (to) => { if (to) this.#nodes.get(to.key).focus(); };
    const actions = {
      ArrowDown: () => go(this.#items[index + 1]),
      ArrowUp: () => go(this.#items[index - 1]),
      Home: () => go(this.#items[0]),
      End: () => go(this.#items.at(-1)),
      ArrowRight: () => { if (item.isExpanded) go(item.children[0]); else if (item.run?.branches) this.#toggle(item); },
      ArrowLeft: () => { if (item.isExpanded) this.#toggle(item); else go(item.parent); },
      Enter: () => this.#toggle(item),
      " ": () => this.#toggle(item),
    };
    if (!actions[event.key]) return;
    event.preventDefault();
    actions[event.key]();
  }
}

/** Return a text on one line. */
function visible(text) {
  return text.trim().replaceAll(/\s*\n\s*/g, " ⏎ ") || "(spaces)";
}
