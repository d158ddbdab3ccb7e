// Text made of tokens, each with its probability and the likeliest alternatives.

const details = new WeakMap(); // span -> entry

/**
 * Append text whose tokens are `entries` to `parent`, which has an element for each line, so that a long text stays fast.
 * Model output is always inserted as text, never as markup.
 */
export function appendTokens(parent, text, entries) {
  let rest = text;
  entries.forEach((entry, index) => {
    // Part of a character has no text of its own; the character goes to the token that completes it.
    const isLast = index === entries.length - 1;
    const piece = isLast ? rest : rest.startsWith(entry.token) ? entry.token : "";
    rest = rest.slice(piece.length);
    if (piece) lineOf(parent).append(...tokenNodes(piece, entry));
  });
  if (!entries.length && text) lineOf(parent).append(text);
}

function lineOf(parent) {
  const last = parent.lastElementChild;
  if (last && !last.lastChild.textContent.endsWith("\n")) return last;
  const line = document.createElement("div");
  parent.append(line);
  return line;
}

/** Return a token's nodes; leading space stays outside of the span, or it would show at the ends of lines. */
function tokenNodes(text, entry) {
  const word = text.trimStart() || text;
  return [text.slice(0, text.length - word.length), tokenSpan(word, entry)];
}

function tokenSpan(text, entry) {
  const span = document.createElement("span");
  span.className = "token";
  span.textContent = text;
  span.tabIndex = -1;
  const p = Math.exp(entry.logprob);
  span.dataset.p = p.toFixed(4);
  span.style.setProperty("--doubt", ((1 - p) ** 2).toFixed(3));
  details.set(span, entry);
  return span;
}

/** Show the probabilities of the token under the pointer or in focus; arrow keys move between tokens. */
export function watchTokens(log, tooltip) {
  const over = (event) => event.target.closest?.(".token");
  const hide = () => { tooltip.hidden = true; };
  const shown = (event) => { const span = over(event); if (span) show(tooltip, span); else hide(); };
  log.addEventListener("pointerover", shown);
  log.addEventListener("pointerleave", hide);
  log.addEventListener("focusin", shown);
  log.addEventListener("focusout", hide);
  log.addEventListener("scroll", hide);
  log.addEventListener("keydown", (event) => {
    if (event.key === "Escape") hide();
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    const to = step(event.target, event.key === "ArrowRight");
    if (!to) return;
    event.preventDefault();
    to.focus();
  });
}

function step(from, forward) {
  if (from.classList.contains("tokens")) return forward ? from.querySelector(".token") : null;
  if (!from.classList.contains("token")) return null;
  const sibling = forward ? from.nextElementSibling : from.previousElementSibling;
  if (sibling) return sibling;
  let line = from.parentElement;
  do line = forward ? line.nextElementSibling : line.previousElementSibling;
  while (line && !line.firstElementChild);
  return (forward ? line?.firstElementChild : line?.lastElementChild) ?? null;
}

function show(tooltip, span) {
  const entry = details.get(span);
  if (!entry) return;
  const top = entry.top.some(({ token }) => token === entry.token) ? entry.top : [entry, ...entry.top];
  tooltip.replaceChildren(...top.map((other) => row(other, other.token === entry.token)));
  tooltip.hidden = false;
  place(tooltip, span.getClientRects()[0] ?? span.getBoundingClientRect());
}

function row({ token, logprob }, chosen) {
  const line = document.createElement("div");
  line.className = chosen ? "row chosen" : "row";
  const p = Math.exp(logprob);
  line.style.setProperty("--share", `${(p * 100).toFixed(1)}%`);
  const label = document.createElement("span");
  label.className = "label";
  label.textContent = visible(token);
  const value = document.createElement("span");
  value.textContent = p >= 0.0005 ? `${(p * 100).toFixed(1)} %` : "< 0.1 %";
  line.append(label, value);
  return line;
}

/** Return a token with visible spaces and line breaks. */
function visible(token) {
  return token.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "(nothing)";
}

function place(tooltip, anchor) {
  const box = tooltip.getBoundingClientRect();
  const above = anchor.top - box.height - 8;
  tooltip.style.top = `${above > 4 ? above : anchor.bottom + 8}px`;
  tooltip.style.left = `${Math.max(8, Math.min(anchor.left, innerWidth - box.width - 8))}px`;
}
