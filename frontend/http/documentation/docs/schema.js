// Views of JSON schemas: one line per field, with inner objects on demand.

import { details, element, words } from "./dom.js";

export class Schemas {
  constructor(api) {
    this.components = api.components;
  }

  resolve(thing) {
    if (!thing?.$ref) return thing;
    const [, , kind, name] = thing.$ref.split("/");
    return this.components[kind][name];
  }

  // Return a short description of a schema: "integer or null", "list of ChatChoice".
  type(schema) {
    if (schema.$ref) return schema.$ref.split("/").pop();
    if (schema.enum) return schema.enum.map((each) => JSON.stringify(each)).join(" or ");
    if ("const" in schema) return JSON.stringify(schema.const);
    const inner = schema.anyOf ?? (schema.properties ? null : schema.oneOf);
    if (inner && !schema.title) return [...new Set(inner.map((each) => this.type(each)))].join(" or ");
    if (schema.type === "array") return `list of ${schema.items ? this.type(schema.items) : "anything"}`;
    if (schema.title) return schema.title;
    if (Array.isArray(schema.type)) return schema.type.join(" or ");
    if (schema.type === "object" && schema.additionalProperties?.type) {
      return `object of ${this.type(schema.additionalProperties)}`;
    }
    return schema.type ?? "anything";
  }

  // Return the range of a number.
  range(schema) {
    const numbers = [schema, ...(schema.anyOf ?? [])];
    const limit = (key) => numbers.map((each) => each[key]).find((value) => value !== undefined);
    const parts = [];
    if (limit("minimum") !== undefined) parts.push(`at least ${limit("minimum")}`);
    if (limit("exclusiveMinimum") !== undefined) parts.push(`above ${limit("exclusiveMinimum")}`);
    if (limit("maximum") !== undefined) parts.push(`at most ${limit("maximum")}`);
    if (limit("exclusiveMaximum") !== undefined) parts.push(`below ${limit("exclusiveMaximum")}`);
    return parts.join(", ");
  }

  // Return the objects with fields of their own within a schema.
  objects(schema) {
    const whole = this.resolve(schema);
    const parts = [...(whole.anyOf ?? []), ...(whole.items ? [whole.items] : [])];
    return [...(whole.properties ? [whole] : []), ...parts.flatMap((part) => this.objects(part))];
  }

  fields(schema) {
    const required = new Set(schema.required ?? []);
    const known = Object.entries(schema.properties).filter(([, field]) => !field["x-refused"]);
    known.sort(([one], [other]) => required.has(other) - required.has(one)); // otherwise in their order
    const refused = Object.entries(schema.properties).filter(([, field]) => field["x-refused"]);
    const list = element("dl", {}, ...known.map(([name, field]) => this.field(name, field, required.has(name))));
    if (!refused.length) return list;
    const unsupported = refused.map(([name, field]) => this.field(name, field, false));
    return element("div", {}, list, details("", [`${refused.length} fields that are not supported`], element("dl", {}, ...unsupported)));
  }

  field(name, schema, required) {
    const range = this.range(schema);
    const kind = this.type(schema);
    const type = required ? kind : kind.replace(/ or null$/, ""); // null is the same as leaving the field out
    const line = element("dt", {}, element("code", {}, name), " ");
    line.append(element("span", { className: "type" }, type + (range ? `, ${range}` : "")));
    if (required) line.append(" ", element("span", { className: "required" }, "required"));
    const made = element("div", { className: "field" }, line);
    if (schema.description) made.append(element("dd", {}, ...words(schema.description)));
    for (const inner of this.objects(schema)) made.append(this.later(inner));
    return made;
  }

  // Return an inner object that is filled when it is opened, since schemas can be recursive.
  later(schema) {
    const made = details("", [schema.title ?? "fields"]);
    made.addEventListener("toggle", () => made.append(this.fields(schema)), { once: true });
    return made;
  }
}
