// What an empty conversation shows: what the model can do, and examples to click.

import { button } from "./messages.js";

const DEMO_FOLDER = /[\\/]quire[\\/]frontend[\\/]demo_model$/;
const PRIVACY = "Your messages go to this server and nowhere else.";
const KINDS = {
  demo: {
    text: "This is the small demo model. It tells tales in the manner of Grimm and Aesop, which often go astray; it knows no facts " +
      "and answers no questions. To serve another, run “quire serve MODEL”.",
    examples: ["Tell me a tale about a fox and a crow", "Tell me a tale about a King and a frog"],
  },
  chat: {
    text: "",
    examples: ["Explain how a bicycle stays upright", "Write a short poem about rain", "Give me three ideas for a quick dinner"],
  },
  continue: {
    text: "This model has no chat template and continues texts: start one.",
    examples: ["Once upon a time", "The three most important inventions are"],
  },
};

/** Show the welcome of a model, an entry of /v1/models; `ask(text)` is called with an example that is clicked. */
export function welcome(root, { root: folder, has_chat_template: canChat }, ask) {
  const kind = DEMO_FOLDER.test(folder) ? "demo" : canChat ? "chat" : "continue";
  const { text, examples } = KINDS[kind];
  root.querySelector("#welcome-text").textContent = [text, PRIVACY].filter(Boolean).join(" ");
  root.querySelector("#examples").replaceChildren(...examples.map((example) => {
    const made = button(example, () => ask(example));
    made.className = "example";
    return made;
  }));
}
