// Text files that go with a message.

const MOST_FILES = 10;
const MOST_BYTES = 512 * 1024; // of all files of a message

export class Attachments {
  #files = []; // {name, text}

  /** `list` shows the files, `note` says why one was refused. */
  constructor(list, note) {
    this.list = list;
    this.note = note;
  }

  get isEmpty() {
    return !this.#files.length;
  }

  /** Add Files, as far as they are texts and not too large. */
  async add(files) {
    const refused = [];
    for (const file of files) {
      try {
        this.#files.push(await this.#read(file));
      } catch (error) {
        refused.push(`${file.name} ${error.message}`);
      }
    }
    this.#draw(refused.join(" "));
  }

  set(files) {
    this.#files = [...files];
    this.#draw("");
  }

  /** Return the files and forget them. */
  take() {
    const files = this.#files;
    this.set([]);
    return files;
  }

  async #read(file) {
    if (this.#files.length >= MOST_FILES) throw new Error(`is one too many: a message takes ${MOST_FILES} files.`);
    const taken = this.#files.reduce((sum, { text }) => sum + text.length, 0);
    if (taken + file.size > MOST_BYTES) {
      throw new Error(`is too large: the files of a message may have ${MOST_BYTES / 1024} KB together.`);
    }
    let text;
    try {
      text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    } catch {
      text = "\0";
    }
    if (text.includes("\0")) throw new Error("is not a text file in UTF-8.");
    return { name: file.name, text };
  }

  #draw(refusal) {
    this.list.replaceChildren(...this.#files.map((file) => this.#chip(file)));
    this.list.hidden = this.isEmpty;
    this.note.textContent = refusal;
    this.note.hidden = !refusal;
  }

  #chip(file) {
    const item = document.createElement("li");
    const remove = document.createElement("button");
    remove.type = "button";
    remove.className = "link";
    remove.textContent = "×";
    remove.setAttribute("aria-label", `Remove ${file.name}`);
    remove.addEventListener("click", () => this.set(this.#files.filter((other) => other !== file)));
    item.append(`${file.name} · ${sizeOf(file.text)}`, remove);
    return item;
  }
}

/** Take files that are chosen, pasted or dropped; `drop` is shown while files are dragged over the page. */
export function watchFiles(attachments, { input, button, chooser, drop }) {
  const add = async (files) => {
    await attachments.add([...files]);
    input.focus();
  };
  button.addEventListener("click", () => chooser.click());
  chooser.addEventListener("change", async () => {
    await add(chooser.files);
    chooser.value = "";
  });
  input.addEventListener("paste", (event) => {
    if (!event.clipboardData.files.length) return;
    event.preventDefault();
    add(event.clipboardData.files);
  });
  const onDrag = (isShown, act) => (event) => {
    if (!event.dataTransfer?.types.includes("Files")) return;
    event.preventDefault();
    drop.hidden = !isShown;
    act?.(event.dataTransfer.files);
  };
  document.addEventListener("dragover", onDrag(true));
  document.addEventListener("drop", onDrag(false, add));
  document.addEventListener("dragleave", (event) => { if (!event.relatedTarget) drop.hidden = true; });
}

export function sizeOf(text) {
  const bytes = new Blob([text]).size;
  return bytes < 1024 ? `${bytes} B` : `${(bytes / 1024).toFixed(bytes < 10_240 ? 1 : 0)} KB`;
}

/** Return a message's text with its files before it, each in a fence that it does not contain. */
export function withFiles(text, files = []) {
  return [...files.map(fenced), text].filter(Boolean).join("\n\n");
}

function fenced({ name, text }) {
  const longest = Math.max(2, ...[...text.matchAll(/`{3,}/g)].map(([ticks]) => ticks.length));
  const fence = "`".repeat(longest + 1);
  return `File ${name}:\n${fence}\n${text}${text.endsWith("\n") ? "" : "\n"}${fence}`;
}
