// The panel of conversations: list, search, rename, delete with undo, export, import.

import { exported, imported } from "./library.js";

const DAY = 86_400_000;
const SEARCH_MS = 120;
const MARKS = { answering: "Being answered: ", new: "New answer: " };
const ICONS = {
  rename: "M3 13.5V17h3.5L16 7.5 12.5 4zM11 5.5 14.5 9",
  export: "M10 3v9m0 0 3.5-3.5M10 12 6.5 8.5M4 14v3h12v-3",
  delete: "M4 6h12M8 6V4h4v2M5.5 6l1 11h7l1-11",
};

export class ConversationsPanel {
  #heads = [];
  #new = new Set(); // ids of conversations with an answer that came while others were shown
  #found = null; // Map of id to snippet while searching
  #timer = 0;

  /**
   * `on.open(id)`, `on.removed(id)`, which returns the conversation if there is more of it than what is kept,
   * `on.rename(id, title)`, `on.isAnswering(id)`; `toast`: a Toast. `current` is the id of the conversation that is shown.
   */
  constructor(root, library, toast, on) {
    Object.assign(this, { root, library, toast, on, current: null });
    this.list = root.querySelector("#conversations");
    this.field = root.querySelector("#search");
    this.note = root.querySelector("#library-note");
    this.field.addEventListener("input", () => {
      clearTimeout(this.#timer);
      this.#timer = setTimeout(() => this.refresh(), SEARCH_MS);
    });
    const file = root.querySelector("#import-file");
    root.querySelector("#import").addEventListener("click", () => file.click());
    root.querySelector("#export").addEventListener("click", async () => this.#save(await library.all(), "conversations"));
    file.addEventListener("change", () => this.#import(file));
    this.list.addEventListener("keydown", (event) => this.#move(event));
  }

  /** Read the list again. */
  async refresh() {
    const text = this.field.value.trim();
    [this.#heads, this.#found] = [await this.library.heads(), text ? await this.library.search(text) : null];
    this.#draw();
  }

  /** Mark the conversation that is shown. */
  mark(id) {
    this.current = id;
    this.#new.delete(id);
    this.markAll();
  }

  /** Mark the conversation as one with a new answer. */
  markNew(id) {
    this.#new.add(id);
    this.markAll();
  }

  /** Bring the marks up to date. */
  markAll() {
    for (const item of this.list.querySelectorAll("li[data-id]")) this.#markItem(item);
  }

  #markItem(item) {
    const isCurrent = item.dataset.id === this.current;
    item.classList.toggle("current", isCurrent);
    const open = item.querySelector(".open");
    if (isCurrent) open?.setAttribute("aria-current", "true");
    else open?.removeAttribute("aria-current");
    const mark = item.querySelector(".mark");
    const state = this.on.isAnswering(item.dataset.id) ? "answering" : this.#new.has(item.dataset.id) ? "new" : "";
    if (mark && mark.dataset.state !== state) {
      mark.dataset.state = state;
      mark.firstElementChild.textContent = MARKS[state] ?? "";
    }
  }

  #draw() {
    if (this.list.querySelector("input")) return; // a rename is going on
    const focused = document.activeElement?.closest?.("#conversations li")?.dataset.id;
    const heads = this.#found ? this.#heads.filter(({ id }) => this.#found.has(id)) : this.#heads;
    let group = null;
    const items = heads.flatMap((head) => {
      const name = age(head.updated);
      const items = name === group ? [this.#item(head)] : [heading(name), this.#item(head)];
      group = name;
      return items;
    });
    this.list.replaceChildren(...items);
    if (focused) this.#itemOf(focused)?.querySelector(".open").focus();
    this.note.textContent = this.#noteOf(heads.length);
  }

  #noteOf(number) {
    if (this.#found) return number ? `${number} found` : "No conversation has these words.";
    if (!this.library.isKept) return "This browser keeps nothing: conversations end with the page.";
    if (!number) return "Conversations are kept in this browser only.";
    return number >= this.library.limit * 0.9 ? `${number} of ${this.library.limit}; the oldest make room.` : "";
  }

  #itemOf(id) {
    return this.list.querySelector(`li[data-id="${CSS.escape(id)}"]`);
  }

  #item({ id, title }) {
    const item = document.createElement("li");
    item.dataset.id = id;
    const open = document.createElement("button");
    open.type = "button";
    open.className = "open";
    const mark = document.createElement("span");
    mark.className = "mark";
    mark.append(Object.assign(document.createElement("span"), { className: "visually-hidden" }));
    open.append(mark, title || "Untitled");
    open.title = title;
    const snippet = this.#found?.get(id);
    if (snippet) open.append(snippetOf(snippet));
    open.addEventListener("click", () => this.on.open(id));
    item.append(
      open,
      iconButton("rename", `Rename ${title}`, () => this.#rename(id)),
      iconButton("export", `Export ${title}`, async () => this.#save([await this.library.get(id)], title)),
      iconButton("delete", `Delete ${title}`, () => this.#remove(id)),
    );
    this.#markItem(item);
    return item;
  }

  #rename(id) {
    const item = this.#itemOf(id);
    const open = item.querySelector(".open");
    const field = document.createElement("input");
    field.value = open.title;
    field.maxLength = 120;
    field.setAttribute("aria-label", "Title");
    item.classList.add("renaming");
    open.replaceWith(field);
    field.select();
    let isOver = false;
    const end = async (isKept) => {
      if (isOver) return;
      isOver = true;
      field.replaceWith(open);
      item.classList.remove("renaming");
      open.focus();
      const title = field.value.trim();
      if (isKept && title && title !== open.title) await this.on.rename(id, title);
      await this.refresh();
    };
    field.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== "Escape") return;
      event.stopPropagation();
      event.preventDefault();
      end(event.key === "Enter");
    });
    field.addEventListener("blur", () => end(true));
  }

  async #remove(id) {
    const item = this.#itemOf(id);
    const neighbour = item.nextElementSibling ?? item.previousElementSibling;
    const conversation = await this.library.get(id);
    if (!conversation) return;
    const latest = this.on.removed(id) ?? conversation; // before: an answer that is still growing would keep it again
    await this.library.remove(id);
    await this.refresh();
    (neighbour?.dataset.id ? this.#itemOf(neighbour.dataset.id)?.querySelector(".open") : this.field)?.focus();
    this.toast.show(`Deleted “${conversation.title || "Untitled"}”.`, "Undo", async () => {
      await this.library.put(latest);
      this.on.open(id);
    });
  }

  #save(conversations, title) {
    const name = `quire-${title.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40)}.json`;
    const url = URL.createObjectURL(new Blob([exported(conversations)], { type: "application/json" }));
    Object.assign(document.createElement("a"), { href: url, download: name }).click();
    setTimeout(() => URL.revokeObjectURL(url), 10_000);
  }

  async #import(field) {
    const [file] = field.files;
    field.value = "";
    if (!file) return;
    try {
      const conversations = imported(await file.text());
      await this.library.put(...conversations);
      this.toast.show(conversations.length === 1 ? "Imported 1 conversation." : `Imported ${conversations.length} conversations.`);
    } catch (error) {
      this.toast.show(error.message);
    }
  }

  /** Let the arrow keys move between conversations. */
  #move(event) {
    if ((event.key !== "ArrowDown" && event.key !== "ArrowUp") || !event.target.matches(".open")) return;
    const all = [...this.list.querySelectorAll(".open")];
    const next = all[all.indexOf(event.target) + (event.key === "ArrowDown" ? 1 : -1)];
    if (!next) return;
    event.preventDefault();
    next.focus();
  }
}

function heading(text) {
  const item = document.createElement("li");
  item.className = "age";
  item.textContent = text;
  return item;
}

function snippetOf({ before, match, after }) {
  const line = document.createElement("span");
  line.className = "snippet";
  const mark = document.createElement("mark");
  mark.textContent = match;
  line.append(before, mark, after);
  return line;
}

function iconButton(name, label, onclick) {
  const made = document.createElement("button");
  made.type = "button";
  made.className = "quiet icon";
  made.setAttribute("aria-label", label);
  made.title = name[0].toUpperCase() + name.slice(1);
  made.dataset.action = name;
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
  svg.setAttribute("viewBox", "0 0 20 20");
  svg.setAttribute("aria-hidden", "true");
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  made.append(svg);
  made.addEventListener("click", onclick);
  return made;
}

function age(time) {
  const midnight = new Date().setHours(0, 0, 0, 0);
  if (time >= midnight) return "Today";
  if (time >= midnight - DAY) return "Yesterday";
  if (time >= midnight - 7 * DAY) return "Last week";
  return time >= midnight - 30 * DAY ? "Last month" : "Earlier";
}
