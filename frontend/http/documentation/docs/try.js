// A form that sends a request from the page and shows the response as it arrives.

import { details, element } from "./dom.js";

export function tryForm(operation) {
  const inputs = operation.pathParameters.map((parameter) =>
    element("input", { name: parameter.name, value: parameter.example ?? "", "aria-label": parameter.name }),
  );
  const body = element("textarea", { value: operation.example, rows: operation.example.split("\n").length, spellcheck: false, "aria-label": "Body" });
  const send = element("button", { type: "submit", className: "primary" }, "Send");
  const stop = element("button", { type: "button", disabled: true }, "Stop");
  const status = element("span", { className: "muted", role: "status" });
  const answer = element("pre", { hidden: true, tabIndex: 0 });
  const form = element("form", {}, ...inputs);
  if (operation.hasBody) form.append(body);
  form.append(element("div", { className: "row" }, send, stop, status), answer);
  let abort = null;
  stop.addEventListener("click", () => abort?.abort());
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    abort = new AbortController();
    [send.disabled, stop.disabled, answer.hidden, answer.textContent] = [true, false, false, ""];
    status.textContent = "waiting";
    const began = performance.now();
    try {
      const url = operation.url(Object.fromEntries(inputs.map((input) => [input.name, input.value])));
      const reply = await fetch(url, request(operation, body.value, abort.signal));
      await show(reply, answer);
      status.textContent = `${reply.status} ${reply.statusText}, ${Math.round(performance.now() - began)} ms`;
    } catch (error) {
      status.textContent = error.name === "AbortError" ? "stopped" : String(error);
    } finally {
      [send.disabled, stop.disabled] = [false, true];
    }
  });
  return details("try", ["Try it"], form);
}

function request(operation, body, signal) {
  const headers = operation.hasBody ? { "Content-Type": "application/json" } : {};
  return { method: operation.method, headers, signal, ...(operation.hasBody ? { body } : {}) };
}

async function show(reply, answer) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    answer.append(part.value);
    answer.scrollTop = answer.scrollHeight;
  }
  if (reply.headers.get("Content-Type")?.startsWith("application/json")) {
    answer.textContent = JSON.stringify(JSON.parse(answer.textContent), null, 2);
    answer.scrollTop = 0;
  }
}
