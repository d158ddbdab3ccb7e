// Calls to the server. Errors are `ApiError`s whose message is for people.

import { recall, remember } from "./store.js";

export const TOO_LONG = "context_length_exceeded"; // code of an error

const ROOT = new URL("../", import.meta.url); // wherever the server is mounted

export class ApiError extends Error {
  /** `code`: that of OpenAI's API, if there is one. */
  constructor(message, status = 0, code = null) {
    super(message);
    Object.assign(this, { status, code });
  }
}

export function setKey(key) {
  remember("key", key);
}

/** Return the successful response of `path`. With a `body` the request is a POST. */
export async function call(path, { body, signal } = {}) {
  const headers = {};
  const key = recall("key", "");
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(new URL(path, ROOT), {
      method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal,
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server is not reachable. Is it still running?");
  }
  if (!response.ok) throw await problem(response);
  return response;
}

async function problem(response) {
  const text = await response.text().catch(() => "");
  const { message, code } = errorOf(text);
  const words = code === TOO_LONG ? tooLong(message) : explain(response.status, message, response.headers.get("Retry-After"));
  return new ApiError(words, response.status, code);
}

/** Return message and code of an error in OpenAI's shape. */
export function errorOf(text) {
  try {
    const body = JSON.parse(text);
    return { message: body.error?.message ?? body.message ?? body.detail ?? "", code: body.error?.code ?? null };
  } catch {
    return { message: "", code: null };
  }
}

/** Say what does not fit, with advice for this page in place of the server's, which names fields of its API. */
function tooLong(message) {
  const [what] = message.split(";");
  return `This is too long for the model: ${what}. Shorten the message, or lower max tokens in the settings.`;
}

function explain(status, message, wait) {
  if (status === 401) return "This server requires an API key. Enter one below and send again.";
  if (status === 403) return "This API key is not allowed to do that.";
  if (status === 429) return `The server is busy. Try again in ${wait ?? "a few"} seconds.`;
  if (status === 503) return `The server accepts no requests now. ${message}`;
  return message || `The server answered with status ${status}.`;
}
