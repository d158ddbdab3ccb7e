// Wires up the page.

import { call, setKey } from "./api.js";
import { Attachments, watchFiles } from "./attachments.js";
import { Chat } from "./chat.js";
import { Conversation } from "./conversation.js";
import { ConversationsPanel } from "./conversations.js";
import { EnginePanel } from "./engine.js";
import { Library } from "./library.js";
import { Settings } from "./settings.js";
import { watchShortcuts } from "./shortcuts.js";
import { recall, recallHere, remember, rememberHere } from "./store.js";
import { Toast } from "./toast.js";
import { watchTokens } from "./tokens.js";
import { welcome } from "./welcome.js";

const NARROW = matchMedia("(width <= 860px)");
const COMPACT = matchMedia("(width <= 1180px)");

const $ = (id) => document.getElementById(id);

const input = $("input");
const welcomeText = $("welcome-text"); // kept, since it leaves the document
const settings = new Settings($("settings"));
const engine = new EnginePanel($("engine"), $("pulse"));
const toast = new Toast($("toast"), document.querySelector(".composer"));
const files = new Attachments($("files"), $("refused"));
const library = new Library(() => panel.refresh());
const panel = new ConversationsPanel($("library"), library, toast, {
  open: openKept,
  removed(id) {
    const dropped = chat.drop(id);
    if (id === chat.conversation.id) open(new Conversation());
    return dropped;
  },
  isAnswering: (id) => chat.isAnswering(id),
  rename: renameConversation,
});
const page = { log: $("log"), welcome: $("welcome"), status: $("status"), spoken: $("spoken") };
const chat = new Chat(page, settings, {
  busy(isBusy) {
    $("stop").hidden = !isBusy;
    $("send").hidden = isBusy;
  },
  editing(message) {
    $("editing").hidden = !message;
    write(message?.content ?? "");
    files.set(message?.files ?? []);
    if (message) input.focus();
  },
  unauthorized: askForKey,
  changed: keep,
  answering: () => panel.markAll(),
  answered(conversation) {
    panel.markNew(conversation.id);
    page.status.textContent = `The answer in ${conversation.title || "another conversation"} is complete.`;
  },
});

function write(text) {
  input.value = text;
  grow();
}

/** Fit the field's height to its text. */
function grow() {
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight}px`;
}

function askForKey() {
  $("key-row").hidden = false;
  $("key").focus();
}

function disclose(toggle, panel, isOpen) {
  panel.hidden = !isOpen;
  toggle.setAttribute("aria-expanded", String(isOpen));
}

// The model

async function loadModel() {
  try {
    const { data } = await (await call("v1/models")).json();
    // Of the names of a model the first; an adapter's are models of their own.
    const isFirst = ({ root }, index) => index === data.findIndex((other) => other.root === root);
    const several = data.filter((model, index) => model.parent || isFirst(model, index));
    const shown = several.find(({ status }) => status?.value === "loaded") ?? several[0];
    $("models").replaceChildren(...several.map(({ id }) => new Option(id, id, false, id === shown.id)));
    $("models").onchange = () => showModel(several.find(({ id }) => id === $("models").value), true);
    $("model").hidden = !($("models").hidden = several.length < 2);
    showModel(shown, several.length > 1);
  } catch (error) {
    welcomeText.textContent = error.message;
    if (error.status === 401) askForKey();
  }
}

/** Talk with a model from now on, an entry of /v1/models; of one that was never loaded the server knows little. */
function showModel(model, isOneOfSeveral) {
  [chat.model, chat.canChat] = [model.id, model.has_chat_template ?? true];
  settings.showDefaults(model);
  $("model").textContent = $("engine-model").textContent = model.id;
  if (isOneOfSeveral) engine.setModel(model.id);
  welcome(page.welcome, { ...model, has_chat_template: chat.canChat }, (example) => ask(example));
}

// Conversations

async function keep(conversation) {
  if (!conversation.messages.length) return;
  if (conversation === chat.conversation) {
    panel.mark(conversation.id);
    rememberHere("conversation", conversation.id);
    setTitle();
  }
  try {
    await library.put(structuredClone(conversation.kept));
  } catch (error) {
    toast.show(`This conversation could not be kept: ${error.message}`);
  }
}

function setTitle() {
  const { title } = chat.conversation;
  document.title = title ? `${title} · Quire` : "Quire";
}

function open(conversation) {
  chat.open(conversation);
  rememberHere("conversation", conversation.messages.length ? conversation.id : null);
  panel.mark(conversation.id);
  setTitle();
}

async function openKept(id) {
  const kept = chat.find(id) ? null : await library.get(id);
  const conversation = chat.find(id) ?? (kept && new Conversation(kept));
  if (conversation) open(conversation);
  if (isCompact()) setLibraryOpen(false);
  if (isNarrow()) setEngineOpen(false);
  $("log").focus({ preventScroll: true });
}

async function renameConversation(id, title) {
  const conversation = chat.find(id);
  if (conversation) {
    Object.assign(conversation, { title, isNamed: true });
    await keep(conversation);
  } else await library.put({ ...(await library.get(id)), title, isNamed: true });
}

function startNew() {
  open(new Conversation());
  setFull(false);
  if (isCompact()) setLibraryOpen(false);
  setEngineOpen(engine.isOpen && !isNarrow());
  input.focus();
}

/** Show the conversation that this tab had before a reload. */
async function resume() {
  const id = recallHere("conversation", null);
  const kept = id && (await library.get(id));
  if (kept && !chat.conversation.messages.length) open(new Conversation(kept));
}

// Messages

async function submit() {
  const text = input.value;
  if ((!text.trim() && files.isEmpty) || !(await isReady())) return;
  const sent = chat.send(text, files.take());
  write("");
  await sent;
}

/** Send an example; what the user has begun to write stays. */
async function ask(example) {
  if (!(await isReady())) return;
  if (!isNarrow()) input.focus();
  await chat.send(example);
}

/** Return whether a message can be sent now. */
async function isReady() {
  if (chat.isBusy) return false;
  if (settings.invalid) {
    setSettingsOpen(true);
    settings.invalid.reportValidity();
    return false;
  }
  if (chat.model === null) await loadModel();
  return chat.model !== null;
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
input.addEventListener("input", grow);
input.addEventListener("keydown", (event) => {
  if (event.key === "ArrowUp" && !input.value && files.isEmpty && !chat.isBusy) {
    const last = chat.conversation.last("user");
    if (!last) return;
    event.preventDefault();
    chat.edit(last);
  }
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submit();
});
document.addEventListener("visibilitychange", () => { if (document.hidden) chat.keepAll(); });
$("stop").addEventListener("click", () => {
  chat.stop();
  input.focus();
});
$("cancel-edit").addEventListener("click", () => chat.cancelEdit());
$("log").addEventListener("scroll", () => chat.scrolled());
$("new").addEventListener("click", startNew);
$("key-row").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey();
});

async function useKey() {
  setKey($("key").value.trim());
  $("key").value = "";
  $("key-row").hidden = true;
  await loadModel();
  engine.retry();
  if ($("key-row").hidden) input.focus();
}

// Panels and switches

function setSettingsOpen(isOpen) {
  if (!isOpen && $("settings").contains(document.activeElement)) $("toggle-settings").focus();
  disclose($("toggle-settings"), $("settings"), isOpen);
}

/** Return whether the engine takes the place of the chat, for lack of room beside it. */
function isNarrow() {
  return NARROW.matches;
}

/** Return whether the conversations lie above the chat, for lack of room beside it. */
function isCompact() {
  return COMPACT.matches;
}

/** Open the panels that have room beside the chat, as the user left them or where the chat keeps its full width. */
function arrangePanels() {
  setLibraryOpen(!isCompact() && recall("library", matchMedia("(width >= 1280px)").matches));
  if (!engine.isFull) setEngineOpen(!isNarrow() && recall("engine", matchMedia("(width >= 1440px)").matches));
}

function setEngineOpen(isOpen) {
  disclose($("toggle-engine"), $("engine"), isOpen);
  document.body.classList.toggle("engine-open", isOpen);
  engine.setOpen(isOpen);
  if (isOpen && isNarrow()) setLibraryOpen(false);
}

function setFull(isFull) {
  if (isFull === engine.isFull) return;
  if (isFull) setEngineOpen(true);
  document.body.classList.toggle("engine-full", isFull);
  $("toggle-full").setAttribute("aria-pressed", String(isFull));
  $("toggle-full").textContent = isFull ? "Close full view" : "Full view";
  engine.setFull(isFull);
  if (location.hash === "#engine" && !isFull) history.replaceState(null, "", location.pathname);
  if (isFull) history.replaceState(null, "", "#engine"); // a link to this view, for a screen on a wall
}

function setLibraryOpen(isOpen) {
  disclose($("toggle-library"), $("library"), isOpen);
  document.body.classList.toggle("library-open", isOpen);
}

function toggleEngine() {
  if (engine.isFull) setFull(false);
  else setEngineOpen($("engine").hidden);
  if (!isNarrow()) remember("engine", engine.isOpen);
}

function showHelp() {
  if (!$("help").open) $("help").showModal();
}

function applySettings() {
  $("log").classList.toggle("tinted", settings.values.tint);
  $("settings-set").textContent = settings.numSet ? `${settings.numSet} of your own` : "";
}

settings.onChange = applySettings;
$("toggle-settings").addEventListener("click", () => setSettingsOpen($("settings").hidden));
$("reset-settings").addEventListener("click", () => settings.reset());
$("toggle-engine").addEventListener("click", toggleEngine);
$("toggle-full").addEventListener("click", () => setFull(!engine.isFull));
$("toggle-library").addEventListener("click", () => {
  setLibraryOpen($("library").hidden || engine.isFull);
  setFull(false);
  if (!isCompact()) remember("library", !$("library").hidden);
});
$("open-help").addEventListener("click", showHelp);
$("toggle-theme").addEventListener("click", () => {
  const root = document.documentElement;
  const isDark = (root.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  root.dataset.theme = isDark ? "light" : "dark";
  remember("theme", root.dataset.theme);
  engine.repaint();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => engine.repaint());

watchShortcuts({
  Escape() {
    if ($("help").open) return;
    if (chat.isBusy) chat.stop();
    else if (chat.cancelEdit()) return;
    else if ($("settings").contains(document.activeElement)) setSettingsOpen(false);
    else if (engine.isFull) setFull(false);
    else if (isCompact()) setLibraryOpen(false);
  },
  "Ctrl+Shift+O": startNew,
  "Ctrl+K"() {
    setFull(false);
    setLibraryOpen(true);
    $("search").focus();
  },
  "Ctrl+,"() {
    setSettingsOpen($("settings").hidden);
    if (!$("settings").hidden) $("settings").querySelector("[name]").focus();
  },
  "Ctrl+Shift+E": toggleEngine,
  "Ctrl+Shift+F": () => setFull(!engine.isFull),
  "Ctrl+/": showHelp,
});

applySettings();
arrangePanels();
for (const query of [NARROW, COMPACT]) query.addEventListener("change", arrangePanels);
if (location.hash === "#engine") setFull(true);
watchTokens($("log"), $("tooltip"));
watchFiles(files, { input, button: $("attach"), chooser: $("attach-file"), drop: $("drop") });
panel.refresh();
loadModel();
resume();
if (!isNarrow()) input.focus();
