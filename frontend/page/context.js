// Where a conversation that is longer than the model's context can go on: without its oldest turns.

import { TOO_LONG, call } from "./api.js";

const ROOM = 0.25; // of the context, for an answer without a limit of its own

/**
 * Return the index of the message with which the next request may begin, with as few turns left out as possible, or null
 * if the last one alone is too long. `requestFrom(start)` returns path and body of the request that begins there.
 */
export async function fittingStart(starts, requestFrom) {
  const last = starts.at(-1);
  let [low, high] = [0, starts.length]; // of the first that fits, which is found in log2 of their number of requests
  while (low < high) {
    const middle = Math.floor((low + high) / 2);
    if (await fits(requestFrom(starts[middle]), ROOM)) high = middle;
    else low = middle + 1;
  }
  if (low < starts.length) return starts[low];
  return last !== undefined && (await fits(requestFrom(last), 0)) ? last : null;
}

/** Return whether the context holds a request and its answer, which has `room` of the context unless it has a limit. */
async function fits({ body: { model, messages, prompt, tools, max_tokens: limit } }, room) {
  const body = messages ? { model, messages, tools, add_generation_prompt: true } : { model, prompt };
  try {
    const { count, max_model_len: length } = await (await call("tokenize", { body })).json();
    return count + (limit ?? Math.max(1, Math.ceil(room * length))) <= length;
  } catch (error) {
    if (error.code === TOO_LONG) return false;
    throw error;
  }
}
