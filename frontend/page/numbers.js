// Numbers formatted for people.

const WHOLE = new Intl.NumberFormat("en");

export function whole(number) {
  return WHOLE.format(number);
}

/** Return "1 token", "1,200 tokens". */
export function count(number, noun, plural = `${noun}s`) {
  return `${whole(number)} ${number === 1 ? noun : plural}`;
}

/** Return about three digits: "0", "0.42", "8.5", "420", "12,300". */
export function short(number) {
  if (number === 0) return "0";
  if (number >= 100) return whole(Math.round(number));
  return number >= 10 ? number.toFixed(1) : number.toFixed(2);
}

export function milliseconds(seconds) {
  return short(seconds * 1000);
}

/** Return "41 ms", "1.2 s", "57.2 s". */
export function duration(ms) {
  return ms < 999.5 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`;
}
