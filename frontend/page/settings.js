// The system prompt, the sampling controls and the tools. The server chooses the value of an empty field.

import { recall, remember } from "./store.js";

const OFF = { top_k: "Off", min_p: "Off" }; // what their default of 0 means

export class Settings {
  #fields;

  constructor(fieldset) {
    this.fieldset = fieldset;
    this.#fields = [...fieldset.querySelectorAll("[name]")];
    this.#fill(recall("sampling", {}));
    fieldset.addEventListener("input", () => this.#changed());
  }

  /** Values by name: numbers, texts, booleans and tools, without those that are empty or out of range. */
  get values() {
    const values = {};
    for (const field of this.#fields) {
      const value = read(field);
      if (value !== undefined) values[field.name] = value;
    }
    values.logprobs ||= values.tint;
    return values;
  }

  /** The first field whose value is out of range, or undefined. */
  get invalid() {
    return this.#fields.find((field) => !field.checkValidity());
  }

  /** The number of values that differ from the server's. */
  get numSet() {
    return this.#fields.filter(({ type, checked, value }) => (type === "checkbox" ? checked : value.trim())).length;
  }

  /** Show what the server does where a field is empty: the values of an entry of /v1/models. */
  showDefaults({ sampling_defaults: defaults, max_model_len: length }) {
    for (const field of this.#fields) {
      const value = defaults?.[field.name];
      if (value !== undefined) field.placeholder = value === 0 && OFF[field.name] ? OFF[field.name] : String(value);
    }
    const tokens = this.#fields.find(({ name }) => name === "max_tokens");
    if (length) tokens.placeholder = `Up to ${length}`;
  }

  reset() {
    this.#fill({});
    this.#changed();
  }

  #changed() {
    for (const field of this.#fields) if (field.name === "tools") field.setCustomValidity(toolsProblem(field.value));
    const texts = this.#fields.map((field) => [field.name, field.type === "checkbox" ? field.checked : field.value]);
    remember("sampling", Object.fromEntries(texts.filter(([, value]) => value)));
    this.onChange?.();
  }

  #fill(values) {
    for (const field of this.#fields) {
      if (field.type === "checkbox") field.checked = values[field.name] ?? false;
      else field.value = values[field.name] ?? "";
      if (field.name === "tools") field.setCustomValidity(toolsProblem(field.value));
    }
  }
}

function read(field) {
  if (field.type === "checkbox") return field.checked;
  if (!field.value.trim() || !field.checkValidity()) return undefined;
  if (field.name === "tools") return JSON.parse(field.value);
  return field.type === "number" ? field.valueAsNumber : field.value;
}

function toolsProblem(text) {
  if (!text.trim()) return "";
  try {
    const tools = JSON.parse(text);
    return Array.isArray(tools) && tools.length ? "" : "Give a list of tools: [{\"type\": \"function\", \"function\": {…}}]";
  } catch (error) {
    return `This is not JSON: ${error.message}`;
  }
}
