// Copying texts.

const DONE_MS = 1600;

/** Return a button that copies `text()` and says so for a moment. */
export function copyButton(text, label) {
  const made = document.createElement("button");
  made.type = "button";
  made.className = "link copy";
  made.textContent = "Copy";
  if (label) made.setAttribute("aria-label", label);
  made.addEventListener("click", async () => {
    made.textContent = (await copy(text())) ? "Copied" : "Not allowed";
    setTimeout(() => { made.textContent = "Copy"; }, DONE_MS);
  });
  return made;
}

/** Copy a text; return whether it worked. */
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copyBySelection(text); // plain HTTP from another machine has no clipboard
  }
}

function copyBySelection(text) {
  const field = document.createElement("textarea");
  field.className = "visually-hidden";
  field.value = text;
  const { activeElement } = document;
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  activeElement?.focus();
  return done;
}
