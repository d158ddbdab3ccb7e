// Tool calls of an answer, and the fields for their results.

/** Shows calls in `root`, one after another as they arrive. */
export class CallsView {
  #rows = []; // {name, text} elements
  #form = null;

  constructor(root) {
    this.root = root;
  }

  show(calls) {
    calls.forEach(({ function: { name, arguments: text } }, index) => {
      this.#rows[index] ??= this.#row();
      this.#rows[index].name.textContent = name;
      this.#rows[index].text.textContent = pretty(text);
    });
  }

  #row() {
    const call = document.createElement("details");
    call.className = "call";
    call.open = true;
    const summary = document.createElement("summary");
    const name = document.createElement("b");
    const text = document.createElement("pre");
    summary.append("Calls ", name);
    call.append(summary, text);
    this.root.append(call);
    return { name, text };
  }

  /** Ask for the results of calls; `send(results)` gets a text for each call. */
  ask(calls, send) {
    const form = document.createElement("form");
    form.className = "results";
    const fields = calls.map(({ function: { name } }) => {
      const label = document.createElement("label");
      const field = document.createElement("textarea");
      field.rows = 2;
      label.append(`Result of ${name}`, field);
      form.append(label);
      return field;
    });
    const submit = document.createElement("button");
    submit.textContent = "Send results";
    form.append(submit);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      send(fields.map(({ value }) => value));
    });
    this.#form = form;
    this.root.append(form);
  }

  /** Remove the fields for results. */
  close() {
    this.#form?.remove();
    this.#form = null;
  }
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // not complete yet
  }
}
