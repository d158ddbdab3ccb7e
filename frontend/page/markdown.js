// Markdown as blocks of safe HTML. What models write is untrusted: none of its own markup survives, and nothing in it
// loads by itself, so images are links.

import MarkdownIt from "./vendor/markdown-it/markdown-it.esm.min.mjs";
import "./vendor/dompurify/purify.min.js"; // sets globalThis.DOMPurify
import { addMath } from "./formulas.js";

const SCHEMES = /^(?:https?|mailto):/i;
const TAGS = `a blockquote br code del em h1 h2 h3 h4 h5 h6 hr li ol p pre s span strong table tbody td th thead tr ul
  div`.split(/\s+/);
const MOST_ITEMS = 30; // of a list that is rendered as a whole
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
 * Return the top-level blocks of a text: {line, html}, or {line, code, language} for code, with the number of their
 * first lines. `env` keeps link definitions from call to call; its `isWhole` tells that the text will not grow.
 */
export function blocksOf(text, env) {
  const tokens = markdown.parse(text, env);
  const blocks = [];
  let from = 0;
  let depth = 0;
  tokens.forEach((token, index) => {
    depth += token.nesting;
    if (depth > 0) return;
    for (const part of parts(tokens.slice(from, index + 1))) blocks.push(block(part, env));
    from = index + 1;
  });
  return blocks;
}

/** Return a list of many items as several lists, so that one that grows is not rendered again as a whole. */
function parts(tokens) {
  const [open] = tokens;
  if (open.type !== "bullet_list_open" && open.type !== "ordered_list_open") return [tokens];
  const starts = tokens.flatMap(({ type, level }, index) => (type === "list_item_open" && level === 1 ? [index] : []));
  const cuts = starts.filter((_, number) => number > 0 && number % MOST_ITEMS === 0);
  return [1, ...cuts].map((start, number) => {
    const items = tokens.slice(start, cuts[number] ?? -1);
    return number === 0 ? [open, ...items, tokens.at(-1)] : [continued(open, items[0]), ...items, tokens.at(-1)];
  });
}

function continued(open, { map, info }) {
  const token = Object.assign(Object.create(Object.getPrototypeOf(open)), open);
  token.map = map;
  token.attrs = [["class", "joined"], ...(open.type === "ordered_list_open" ? [["start", info]] : [])];
  return token;
}

function block(tokens, env) {
  const [{ type, map, content, info }] = tokens;
  if (type === "fence") return { line: map[0], code: content, language: info.trim().split(/\s/)[0] };
  return { line: map[0], html: markdown.renderer.render(tokens, markdown.options, env) };
}
