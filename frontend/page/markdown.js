// Markdown as blocks of safe HTML. What models write is untrusted: none of its own markup survives, and nothing in it
// loads by itself, so images are links.

import MarkdownIt from "./vendor/markdown-it/markdown-it.esm.min.mjs";
import "./vendor/dompurify/purify.min.js"; // sets globalThis.DOMPurify
import { addMath } from "./formulas.js";

const SCHEMES = /^(?:https?|mailto):/i;
const TAGS = `a blockquote br code del em h1 h2 h3 h4 h5 h6 hr li ol p pre s span strong table tbody td th thead tr ul
  div`.split(/\s+/);
// What is longer is rendered as several blocks, so that one that grows is not rendered again as a whole, and that the
// browser need not lay out what is out of sight.
const MOST_ITEMS = 30; // of a list, and rows of a table
const LEAST_ROWS = 10; // of a table that is cut
const MOST_CHARACTERS = 2000; // of the items of a list, or of a paragraph
const MATH_CHARACTERS = 100; // that a formula counts as, besides its own
const ATTRIBUTES = ["href", "title", "class", "start"];

const markdown = new MarkdownIt({ html: false, linkify: true, breaks: true, maxNesting: 40 });
markdown.linkify.set({ fuzzyLink: false, fuzzyEmail: false, fuzzyIP: false });
markdown.disable("code"); // models indent by accident more often than they mean code by it
markdown.validateLink = (url) => SCHEMES.test(url.trim());
markdown.use(addMath);
markdown.renderer.rules.image = (tokens, index) => {
  const { escapeHtml } = markdown.utils;
  const { content } = tokens[index];
  return `<a href="${escapeHtml(tokens[index].attrGet("src"))}">${escapeHtml(content ? `Image: ${content}` : "Image")}</a>`;
};
// The content security policy forbids style attributes.
markdown.core.ruler.push("alignment", ({ tokens }) => {
  for (const token of tokens) {
    const style = token.type === "th_open" || token.type === "td_open" ? token.attrGet("style") : null;
    if (style) token.attrs = [["class", style.replace("text-align:", "")]];
  }
});

// Task lists of GitHub: an item that begins with [ ] or [x] has a box in place of its bullet.
markdown.core.ruler.after("inline", "tasks", ({ tokens }) => {
  tokens.forEach((item, index) => {
    const inline = tokens[index + 2];
    if (item.type !== "list_item_open" || tokens[index + 1].type !== "paragraph_open") return;
    const [first] = inline.children;
    const box = first?.type === "text" && /^\[[ xX]\](?=\s)/.exec(first.content)?.[0];
    if (!box) return;
    item.attrJoin("class", "task");
    first.content = `${box === "[ ]" ? "☐" : "☑"}${first.content.slice(box.length)}`;
  });
});

const { DOMPurify } = globalThis;
DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.nodeName !== "A") return;
  node.setAttribute("target", "_blank");
  node.setAttribute("rel", "noopener noreferrer");
});

/** Return a fragment of HTML without anything that could run or load. */
export function sanitized(html) {
  return DOMPurify.sanitize(html, {
    RETURN_DOM_FRAGMENT: true, ALLOWED_TAGS: TAGS, ALLOWED_ATTR: ATTRIBUTES, ALLOW_DATA_ATTR: false, ALLOW_ARIA_ATTR: false,
    ALLOWED_URI_REGEXP: SCHEMES, ADD_URI_SAFE_ATTR: ["start"],
  });
}

/**
 * Return the top-level blocks of a text: {line, html, isStart}, or {line, code, language, isStart} for code, with the
 * number of their first lines; `isStart` if the text from there on has the same blocks. `env` keeps link definitions from
 * call to call; its `isWhole` tells that the text will not grow.
 */
export function blocksOf(text, env) {
  const tokens = markdown.parse(text, env);
  const blocks = [];
  let from = 0;
  let depth = 0;
  tokens.forEach((token, index) => {
    depth += token.nesting;
    if (depth > 0) return;
    const whole = tokens.slice(from, index + 1);
    parts(whole).forEach((part, number) => {
      blocks.push({ ...block(part, env), isStart: number === 0 || /^(?:bullet|ordered)_list_open$/.test(whole[0].type) });
    });
    from = index + 1;
  });
  return blocks;
}

/** Return the tokens of a block as those of several, if it is long. */
function parts(tokens) {
  switch (tokens[0].type) {
    case "bullet_list_open":
    case "ordered_list_open": return listParts(tokens);
    case "table_open": return tableParts(tokens);
    case "paragraph_open": return paragraphParts(tokens);
    default: return [tokens];
  }
}

function listParts(tokens) {
  const [open] = tokens;
  const starts = tokens.flatMap(({ type, level }, index) => (type === "list_item_open" && level === 1 ? [index] : []));
  const cuts = cutsOf(tokens, starts, 1);
  return [1, ...cuts].map((start, number) => {
    const items = tokens.slice(start, cuts[number] ?? -1);
    return number === 0 ? [open, ...items, tokens.at(-1)] : [continued(open, items[0]), ...items, tokens.at(-1)];
  });
}

/** Return at which of the items that begin at `starts` to cut, so that a part has `least` items or is short enough. */
function cutsOf(tokens, starts, least) {
  const cuts = [];
  let [number, sum] = [0, 0];
  starts.forEach((start, index) => {
    const size = tokens.slice(start, starts[index + 1]).reduce((total, token) => total + weight(token), 0);
    if (number === MOST_ITEMS || (number >= least && sum + size > MOST_CHARACTERS)) {
      cuts.push(start);
      [number, sum] = [0, 0];
    }
    number += 1;
    sum += size;
  });
  return cuts;
}

function weight({ content, children, type }) {
  const formulas = children ? children.filter((child) => child.type === "math").length : type === "math" ? 1 : 0;
  return content.length + formulas * MATH_CHARACTERS;
}

function continued(open, { map, info }) {
  return copied(open, { map, attrs: [["class", "joined"], ...(open.type === "ordered_list_open" ? [["start", info]] : [])] });
}

function copied(token, changes) {
  return Object.assign(Object.create(Object.getPrototypeOf(token)), token, changes);
}

/** Cut a long table between rows; its columns then have equal widths, so that they stay in line. */
function tableParts(tokens) {
  const rows = tokens.flatMap(({ type }, index) => (type === "tr_open" ? [index] : [])).slice(1);
  const cuts = cutsOf(tokens, rows, LEAST_ROWS);
  if (!cuts.length) return [tokens];
  const [open, body] = [tokens[0], tokens.findIndex(({ type }) => type === "tbody_open")];
  const first = [copied(open, { attrs: [["class", "split"]] }), ...tokens.slice(1, cuts[0]), ...tokens.slice(-2)];
  return [first, ...cuts.map((start, number) => [
    copied(open, { map: tokens[start].map, attrs: [["class", "split joined"]] }), tokens[body],
    ...tokens.slice(start, cuts[number + 1] ?? -2), ...tokens.slice(-2),
  ])];
}

/** Cut a long paragraph where nothing is open, at the end of a line or of a word. */
function paragraphParts(tokens) {
  const [open, inline, close] = tokens;
  if (weight(inline) <= 2 * MOST_CHARACTERS) return [tokens];
  const pieces = [[]];
  let [depth, sum] = [0, 0];
  for (const child of inline.children.flatMap(shortTexts)) {
    if (depth === 0 && sum >= MOST_CHARACTERS && (/break$/.test(child.type) || child.info === "cut" || /^\s/.test(child.content))) {
      pieces.push([]);
      sum = 0;
    }
    depth += child.nesting;
    if (/break$/.test(child.type) && !pieces.at(-1).length) continue; // the block is a line of its own anyway
    pieces.at(-1).push(child);
    sum += weight(child) + 1;
  }
  return pieces.filter(({ length }) => length).map((children, number) => [
    number ? copied(open, { attrs: [["class", "joined"]] }) : open, copied(inline, { children }), close,
  ]);
}

/** Return a text as several that are not too long, which begin with a space if there is one. */
function shortTexts(token) {
  if (token.type !== "text" || token.content.length <= MOST_CHARACTERS) return [token];
  const texts = token.content.match(/[^]{1,1900}(?:\S{0,100}(?=\s)|$)|[^]{1,2000}/g);
  return texts.map((content, index) => copied(token, { content, info: index ? "cut" : "" }));
}

function block(tokens, env) {
  const [{ type, map, content, info }] = tokens;
  if (type === "fence") return { line: map[0], code: content, language: info.trim().split(/\s/)[0] };
  return { line: map[0], html: markdown.renderer.render(tokens, markdown.options, env) };
}
