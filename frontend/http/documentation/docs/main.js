// Shows openapi.json: every operation with its fields, a command to copy, and a form to try it.

import { details, element, words } from "./dom.js";
import { Schemas } from "./schema.js";
import { tryForm } from "./try.js";

const BASE = new URL(".", location.href); // also correct behind a proxy that the server does not know
const JSON_TYPE = "application/json";

class Operation {
  constructor(path, method, entry, api) {
    this.path = path;
    this.method = method.toUpperCase();
    this.entry = entry;
    this.id = entry.operationId;
    this.guarded = (entry.security ?? api.security ?? []).length > 0;
    this.body = entry.requestBody?.content[JSON_TYPE];
    this.hasBody = this.body !== undefined;
    this.example = this.body?.example ? JSON.stringify(this.body.example, null, 2) : this.hasBody ? "{}" : "";
    this.pathParameters = (entry.parameters ?? []).filter((parameter) => parameter.in === "path");
  }

  // Return its URL with these values in the path.
  url(values) {
    const path = this.path.replace(/{(\w+)}/g, (_, name) => encodeURIComponent(values[name] ?? ""));
    return new URL(path.slice(1), BASE).href;
  }

  get curl() {
    const url = this.url(Object.fromEntries(this.pathParameters.map(({ name, example }) => [name, example])));
    const parts = [`curl ${url}`];
    if (this.method !== "GET" && !this.hasBody) parts.push(`-X ${this.method}`);
    if (this.guarded) parts.push('-H "Authorization: Bearer $QUIRE_API_KEY"');
    if (this.hasBody) parts.push(`-H "Content-Type: ${JSON_TYPE}"`, `-d '${this.example.replaceAll("'", `'\\''`)}'`);
    return parts.join(" \\\n  ");
  }
}

function command(operation) {
  const text = element("pre", { tabIndex: 0 }, operation.curl);
  const copy = element("button", { type: "button" }, "Copy");
  copy.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(operation.curl);
      copy.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(text); // without TLS, browsers allow the clipboard on localhost only
    }
  });
  return element("div", { className: "curl" }, text, copy);
}

function requestFields(operation, schemas) {
  const made = [];
  const headers = (operation.entry.parameters ?? []).map((each) => schemas.resolve(each)).filter((each) => each.in === "header");
  if (operation.hasBody) made.push(details("fields", ["Fields"], schemas.fields(schemas.resolve(operation.body.schema))));
  if (headers.length) {
    const list = headers.map((each) => schemas.field(each.name, { description: each.description, ...each.schema }, each.required));
    made.push(details("fields", ["Headers"], element("dl", {}, ...list)));
  }
  return made;
}

function answerFields(operation, schemas) {
  const made = Object.entries(operation.entry.responses["200"].content).flatMap(([kind, content]) => {
    const data = content.schema.properties?.data;
    const answer = data ? (data.anyOf?.find((each) => each.contentSchema) ?? data).contentSchema : content.schema;
    return schemas.objects(answer).map((each) => {
      const title = [each.title ?? "object", " ", element("span", { className: "muted" }, kind)];
      return details("", title, ...words(each.description), schemas.fields(each));
    });
  });
  return made.length ? [details("fields", ["Answer"], ...made)] : [];
}

function statuses(operation, schemas) {
  const rows = Object.entries(operation.entry.responses).flatMap(([status, response]) => [
    element("dt", {}, element("code", {}, status)),
    element("dd", {}, ...words(schemas.resolve(response).description)),
  ]);
  return details("fields", ["Status codes"], element("dl", { className: "statuses" }, ...rows));
}

function section(operation, schemas) {
  const { entry, id, method, path } = operation;
  const badge = element("span", { className: `method ${method.toLowerCase()}` }, method);
  return element(
    "section",
    { id, className: "operation" },
    element("h2", {}, badge, element("span", { className: "path" }, path)),
    element("p", {}, ...words(entry.summary), "."),
    ...(entry.description ? [element("p", { className: "muted" }, ...words(entry.description))] : []),
    element("h3", {}, "Example"),
    command(operation),
    ...requestFields(operation, schemas),
    ...answerFields(operation, schemas),
    statuses(operation, schemas),
    tryForm(operation),
  );
}

function indexItem({ id, method, path }) {
  const badge = element("span", { className: `method ${method.toLowerCase()}` }, method);
  return element("li", {}, element("a", { href: `#${id}` }, badge, element("span", { className: "path" }, path)));
}

async function main() {
  const reply = await fetch(new URL("openapi.json", BASE));
  if (!reply.ok) throw new Error(`the server answered openapi.json with status ${reply.status}`);
  const api = await reply.json();
  const schemas = new Schemas(api);
  document.getElementById("version").textContent = api.info.version;
  document.getElementById("about").append(...words(api.info.description));
  for (const [path, methods] of Object.entries(api.paths)) {
    for (const [method, entry] of Object.entries(methods)) {
      const operation = new Operation(path, method, entry, api);
      document.getElementById("index").append(indexItem(operation));
      document.getElementById("operations").append(section(operation, schemas));
    }
  }
  document.getElementById(location.hash.slice(1))?.scrollIntoView();
}

main().catch((error) => {
  const problem = document.getElementById("problem");
  problem.hidden = false;
  problem.textContent = `The document is not available: ${error.message}`;
});
