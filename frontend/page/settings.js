// The sampling controls. The server chooses the value of an empty field.

import { recall, remember } from "./store.js";

const DEFAULTS = { logprobs: true };

export class Settings {
  #fields;

  constructor(fieldset) {
    this.#fields = [...fieldset.querySelectorAll("[name]")];
    this.#fill(recall("settings", DEFAULTS));
    fieldset.addEventListener("input", () => remember("settings", this.values));
  }

  /** Values by name: numbers, texts and booleans, without those that are empty or out of range. */
  get values() {
    const values = {};
    for (const field of this.#fields) {
      const value = read(field);
      if (value !== undefined) values[field.name] = value;
    }
    return values;
  }

  /** The first field whose value is out of range, or undefined. */
  get invalid() {
    return this.#fields.find((field) => !field.checkValidity());
  }

  reset() {
    this.#fill(DEFAULTS);
    remember("settings", DEFAULTS);
  }

  #fill(values) {
    for (const field of this.#fields) {
      if (field.type === "checkbox") field.checked = values[field.name] ?? false;
      else field.value = values[field.name] ?? "";
    }
  }
}

function read(field) {
  if (field.type === "checkbox") return field.checked;
  if (field.value === "" || !field.checkValidity()) return undefined;
  return field.type === "number" ? field.valueAsNumber : field.value;
}
