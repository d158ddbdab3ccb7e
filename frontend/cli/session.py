"""An interactive session: a conversation, or texts to continue for a model without a chat template."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from quire.frontend.cli.failures import fail
from quire.frontend.cli.model import Model
from quire.frontend.cli.output import Answer, is_interactive, say

if TYPE_CHECKING:
    from quire.frontend.outputs import RequestOutput
    from quire.protocol.messages import SamplingParams

HELP = """\
/help           this
/reset          begin a new conversation (the system message stays)
/system TEXT    set the system message and begin anew; without TEXT, remove it
/retry          answer the last message again
/exit           leave, as do Ctrl-D and Ctrl-C
Ctrl-C during an answer stops it. A line that ends with \\ goes on in the next."""


class Session:
    """Reads messages from stdin and streams the answers until the user leaves."""

    def __init__(self, model: Model, params: SamplingParams, system: str | None = None) -> None:
        self._model = model
        self._params = params
        self._system = system
        self._messages: list[dict[str, str]] = []
        self._prompt = "> " if is_interactive() else ""

    def run(self) -> None:
        """Answer until the end of the input or /exit. Ctrl-C at the prompt raises KeyboardInterrupt."""
        if self._prompt:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 - gives `input` editing and history
        while (line := self._read()) is not None and line not in ("/exit", "/quit"):
            if line.startswith("/"):
                self._command(line)
            elif line:
                self._say(line)

    def _read(self) -> str | None:
        """Return the next message, or None at the end of the input."""
        lines: list[str] = []
        try:
            while True:
                lines.append(input("... " if lines and self._prompt else self._prompt))
                if not lines[-1].endswith("\\"):
                    return "\n".join(line.removesuffix("\\") for line in lines).strip()
        except EOFError:
            if self._prompt:
                say("")
            return None

    def _command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        commands: dict[str, Callable[[], None]] = {
            "/help": lambda: say(HELP),
            "/reset": self._messages.clear,
            "/system": lambda: self._set_system(rest.strip()),
            "/retry": self._retry,
        }
        if name in commands:
            commands[name]()
        else:
            say(f"{name} is not a command; there are {', '.join(commands)} and /exit")

    def _set_system(self, text: str) -> None:
        self._system = text or None
        self._messages.clear()

    def _retry(self) -> None:
        if not self._messages:
            say("there is no message to answer again")
            return
        while self._messages[-1]["role"] != "user":
            self._messages.pop()
        self._say(self._messages.pop()["content"])

    def _say(self, text: str) -> None:
        """Answer one message; one that fails leaves the conversation as it was."""
        answer = Answer()
        turn = {"role": "user", "content": text}
        try:
            self._model.runner.run(answer.stream(self._outputs(turn)))
        except KeyboardInterrupt:
            answer.end_line()
            say("[stopped]")
        except ValueError as error:
            fail(f"{error} (/reset begins a new conversation)" if self._messages else str(error))
            return
        else:
            answer.end_line()
            if self._prompt:
                say(f"[{answer.summary}]")
        self._messages += [turn, {"role": "assistant", "content": answer.text}]

    def _outputs(self, turn: dict[str, str]) -> AsyncIterator[RequestOutput]:
        llm = self._model.llm
        if not self._model.has_chat_template:
            return llm.generate(turn["content"], self._params, output_kind="delta")
        system = [{"role": "system", "content": self._system}] if self._system else []
        return llm.chat([*system, *self._messages, turn], self._params, output_kind="delta")
