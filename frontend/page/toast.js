// A short notice above the message field, with an action to take back what was done.

const SHOWN_MS = 10_000;

export class Toast {
  #timer = 0;

  /** `composer`: the element with the message field, which the notice never covers. */
  constructor(root, composer) {
    this.root = root;
    new ResizeObserver(() => root.style.setProperty("--composer", `${composer.offsetHeight}px`)).observe(composer);
    root.addEventListener("mouseenter", () => clearTimeout(this.#timer));
    root.addEventListener("mouseleave", () => this.#hideLater());
  }

  /** Show a text; `action` is the label of a button that calls `act()`. */
  show(text, action, act) {
    const line = document.createElement("span");
    line.textContent = text;
    this.root.replaceChildren(line);
    if (action) {
      const made = document.createElement("button");
      made.type = "button";
      made.className = "link";
      made.textContent = action;
      made.addEventListener("click", () => { this.hide(); act(); });
      this.root.append(made);
    }
    this.root.hidden = false;
    this.#hideLater();
  }

  hide() {
    clearTimeout(this.#timer);
    this.root.hidden = true;
  }

  #hideLater() {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.hide(), SHOWN_MS);
  }
}
