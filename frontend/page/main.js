// Wires up the page.

import { call, setKey } from "./api.js";
import { Chat } from "./chat.js";
import { EnginePanel } from "./engine.js";
import { Settings } from "./settings.js";
import { recall, remember } from "./store.js";
import { watchTokens } from "./tokens.js";

const $ = (id) => document.getElementById(id);

const input = $("input");
const settings = new Settings($("settings"));
const engine = new EnginePanel($("engine"), $("pulse"));
const chat = new Chat({ log: $("log"), welcome: $("welcome"), input, status: $("status") }, settings, {
  busy(isBusy) {
    $("stop").hidden = !isBusy;
    $("send").hidden = isBusy;
  },
  editing(isEditing) {
    $("editing").hidden = !isEditing;
    if (!isEditing) write("");
  },
  unauthorized: askForKey,
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
    [chat.model, chat.canChat] = [data[0].id, data[0].has_chat_template];
    $("model").textContent = data[0].id;
    $("welcome-text").textContent = welcome(chat.canChat);
  } catch (error) {
    $("welcome-text").textContent = error.message;
    if (error.status === 401) askForKey();
  }
}

function welcome(canChat) {
  const privacy = "Your messages go to this server and nowhere else.";
  return canChat ? privacy : `This model continues texts: start one. ${privacy}`;
}

// Messages

async function submit() {
  const text = input.value;
  if (!text.trim() || chat.isBusy) return;
  if (settings.invalid) {
    setSettingsOpen(true);
    settings.invalid.reportValidity();
    return;
  }
  if (chat.model === null) await loadModel();
  if (chat.model === null) return;
  const sent = chat.send(text);
  write("");
  await sent;
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
input.addEventListener("input", grow);
input.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submit();
});
$("stop").addEventListener("click", () => {
  chat.stop();
  input.focus();
});
$("cancel-edit").addEventListener("click", () => chat.cancelEdit());
$("log").addEventListener("scroll", () => chat.scrolled());
$("new").addEventListener("click", () => {
  chat.reset();
  setEngineOpen(engine.isOpen && !isNarrow());
  input.focus();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if (chat.isBusy) chat.stop();
  else chat.cancelEdit();
});
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
  disclose($("toggle-settings"), $("settings"), isOpen);
}

function isNarrow() {
  return matchMedia("(width <= 860px)").matches;
}

function setEngineOpen(isOpen) {
  disclose($("toggle-engine"), $("engine"), isOpen);
  document.body.classList.toggle("engine-open", isOpen);
  engine.setOpen(isOpen);
}

function setTint(isOn) {
  $("tint").checked = isOn;
  $("log").classList.toggle("tinted", isOn);
}

$("toggle-settings").addEventListener("click", () => setSettingsOpen($("settings").hidden));
$("reset-settings").addEventListener("click", () => settings.reset());
$("toggle-engine").addEventListener("click", () => {
  setEngineOpen($("engine").hidden);
  if (!isNarrow()) remember("engine", engine.isOpen);
});
$("tint").addEventListener("change", (event) => {
  setTint(event.target.checked);
  remember("tint", event.target.checked);
});
$("toggle-theme").addEventListener("click", () => {
  const root = document.documentElement;
  const isDark = (root.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  root.dataset.theme = isDark ? "light" : "dark";
  remember("theme", root.dataset.theme);
  engine.repaint();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => engine.repaint());

setTint(recall("tint", false));
setEngineOpen(recall("engine", true) && !isNarrow());
watchTokens($("log"), $("tooltip"));
loadModel();
if (!isNarrow()) input.focus();
