"""`quire chat`, a conversation or texts to continue for a model without a chat template; and `quire complete`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Annotated

import typer

from quire.frontend.cli.failures import fail
from quire.frontend.cli.flags import AttachFlags, EngineFlags, SamplingFlags, TemplateFlags, switch, takes_flags
from quire.frontend.cli.model import Model, open_model
from quire.frontend.cli.output import PrintedAnswer, is_interactive, say, tolerate_encoding, write, write_raw
from quire.frontend.cli.typed_messages import message_history, read_message
from quire.frontend.errors import CONTEXT_LENGTH_EXCEEDED

if TYPE_CHECKING:
    from quire.frontend.cli.markdown import MarkdownStream
    from quire.frontend.outputs import RequestOutput
    from quire.protocol.options import Option


HELP = """\
/help, /?         show this help
/reset, /clear    start a new conversation (the system message stays)
/system TEXT      set the system message and start over; without TEXT, remove it; also as /set system TEXT
/show NAME        show info, parameters, system or template; without NAME, the first three
/set NAME VALUE   set a sampling parameter, such as temperature; without VALUE, back to the default; without NAME, show
/set markdown false   write answers as they are; true renders their Markdown
/retry, /regen    regenerate the last answer
/exit, /bye       exit, as do Ctrl-D and Ctrl-C
Ctrl-C during an answer stops it. A line that ends with \\ continues on the next; what stands between \"\"\" and
\"\"\" is one message of many lines."""
NO_MARKDOWN = "Write answers as they are. Default: render Markdown at a terminal, unless NO_COLOR is set."
_ENDS = ("/bye", "/exit", "/quit")


@takes_flags
def chat(
    system: Annotated[
        str | None, typer.Option(help="System message of the conversation.", metavar="TEXT", show_default=False)
    ] = None,
    no_markdown: Annotated[bool, switch(None, "--no-markdown", NO_MARKDOWN)] = False,
    *,
    engine: EngineFlags,
    attach: AttachFlags,
    template: TemplateFlags,
    sampling: SamplingFlags,
) -> None:
    """Chat with a model that has a chat template.

    Commands: /reset, /system TEXT, /set NAME VALUE, /retry, /help, /exit. Ctrl-C during an answer stops it; at the
    prompt, Ctrl-C or Ctrl-D exits. Without a terminal, every line of stdin is a message.
    """
    from quire.frontend.text.chat.template_files import find_template

    tolerate_encoding()
    with open_model(engine, attach, template.given) as model:
        if model.folder is not None and not model.has_chat_template:
            find_template(model.folder)  # raises an error with advice if there is none
        greet(model, sampling)
        ChatSession(model, sampling, system, no_markdown=no_markdown).run()


def greet(model: Model, sampling: SamplingFlags) -> None:
    """Tell a person at a terminal what to do, and how answers are sampled."""
    if is_interactive():
        defaults = model.sampling_line(sampling)
        say(f"Type a message; /help lists the commands, Ctrl-D exits. Sampling defaults: {defaults}.")


class ChatSession:
    """A loop that reads messages from stdin and streams the answers until the user exits."""

    def __init__(
        self, model: Model, sampling: SamplingFlags, system: str | None = None, *, no_markdown: bool = False
    ) -> None:
        self._model = model
        self._sampling = sampling
        self._params = model.params(sampling)
        self._system = system
        self._messages: list[dict[str, str]] = []
        self._prompt = "> " if is_interactive() else ""
        self._renders = not no_markdown and model.has_chat_template

    def run(self) -> None:
        """Answer until the end of the input or /exit. Ctrl-C at the prompt raises KeyboardInterrupt."""
        with message_history() if self._prompt else contextlib.nullcontext():
            while (line := read_message(self._prompt)) is not None and line not in _ENDS:
                if line.startswith("/"):
                    self._command(line)
                elif line:
                    self._say(line)
        if line is None and self._prompt:
            say("")

    def _command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        commands: dict[str, Callable[[], None]] = {
            "/help": lambda: say(HELP),
            "/?": lambda: say(HELP),
            "/reset": self._messages.clear,
            "/clear": self._messages.clear,
            "/system": lambda: self._set_system(rest.strip()),
            "/set": lambda: self._set(*rest.split(maxsplit=1)),
            "/show": lambda: self._show(rest.strip()),
            "/retry": self._retry,
            "/regen": self._retry,
        }
        if name in commands:
            commands[name]()
        else:
            say(f"{name} is not a command; commands are {', '.join(commands)} and /exit")

    def _set_system(self, text: str) -> None:
        self._system = text or None
        self._messages.clear()

    def _set(self, name: str = "", text: str | None = None) -> None:
        """Set a sampling parameter or what else has a name, or show the parameters that were given."""
        if name == "parameter":  # Ollama's form
            self._set(*(text or "").split(maxsplit=1))
            return
        if name == "system":
            self._set_system(text or "")
            return
        rows, given = SamplingFlags.rows, dict(self._sampling.given)
        name = name.replace("-", "_")
        if name == "markdown":
            self._set_markdown("true" if text is None else text)
            return
        if not name:
            say(self._given)
            return
        if name not in rows or rows[name].is_list:
            names = ", ".join([*(each for each, row in rows.items() if not row.is_list), "markdown", "system"])
            fail(f"{name} is not a parameter; give one of: {names}")
            return
        given.pop(name, None)
        try:
            if text is not None:
                given[name] = parameter(rows[name], text)
            self._params = self._model.params(SamplingFlags(**given))
        except ValueError as error:
            fail(str(error))
        else:
            self._sampling = SamplingFlags(**given)

    @property
    def _given(self) -> str:
        given = self._sampling.given
        return ", ".join(f"{each}={value}" for each, value in given.items()) or self._own_parameters

    @property
    def _own_parameters(self) -> str:
        return f"the model's own: {self._model.sampling_line(self._sampling)}"

    def _show(self, name: str) -> None:
        """Show a part of what shapes the answers, or the short ones of them."""
        from quire.frontend.hub.names import name_of

        llm = self._model.llm
        parts: dict[str, Callable[[], str]] = {
            "info": lambda: f"model {name_of(llm.model)}, context of {llm.max_model_len} tokens",
            "parameters": lambda: self._given,
            "system": lambda: self._system or "there is no system message; /system TEXT sets one",
            "template": lambda: self._model.chat_template or "the model has no chat template",
        }
        if name and name not in parts:
            fail(f"{name} is not known; give one of: {', '.join(parts)}")
            return
        for each in [name] if name else list(parts)[:3]:
            say(parts[each]() if name else f"{each + ':':12}{parts[each]()}")

    def _set_markdown(self, text: str) -> None:
        if text in ("true", "false"):
            self._renders = text == "true"
        else:
            fail(f"markdown={text!r} is not known; give true or false")

    def _retry(self) -> None:
        if not self._messages:
            say("there is no answer to regenerate")
            return
        while self._messages[-1]["role"] != "user":
            self._messages.pop()
        self._say(self._messages.pop()["content"])

    def _say(self, text: str) -> None:
        """Answer one message; if that fails, the conversation stays unchanged."""
        answer = PrintedAnswer(markdown=_markdown() if self._renders else None)
        turn = {"role": "user", "content": text}
        try:
            self._model.runner.run(answer.stream(self._outputs(turn)))
        except KeyboardInterrupt:
            answer.end_line()
            say("[stopped]")
        except ValueError as error:
            if getattr(error, "code", None) == CONTEXT_LENGTH_EXCEEDED and self._leaves_out_turns(turn):
                self._say(text)
            else:
                fail(f"{error} (/reset starts a new conversation)" if self._messages else str(error))
            return
        else:
            answer.end()
            if self._prompt:
                say(f"[{answer.summary}]")
        self._messages += [turn, {"role": "assistant", "content": answer.text}]

    def _leaves_out_turns(self, turn: dict[str, str]) -> bool:
        """Offer to leave out the oldest turns when all exceed the context; return True if some have been."""
        from quire.frontend.text.chat.history import room_for_answer, without_oldest_turns

        llm = self._model.llm
        context = llm.max_model_len

        async def num_tokens(messages: list[dict[str, str]]) -> int:
            return len((await llm.chat_prompt(messages)).token_ids)

        most = context - (self._params.max_tokens or room_for_answer(None, context))
        history = [*self._instructions, *self._messages, turn]
        kept = self._model.runner.run(without_oldest_turns(history, num_tokens, most))
        left_out = len(history) - len(kept)
        if left_out == 0:
            return False
        what = f"the oldest {left_out} of {len(self._messages)} messages, which exceed the context of {context} tokens"
        if self._prompt and not self._agrees(f"Leave out {what}? [Y/n] "):
            return False
        self._messages = self._messages[left_out:]
        say(f"[left out {what}]")
        return True

    @staticmethod
    def _agrees(question: str) -> bool:
        try:
            return input(question).strip().lower() in ("", "y", "yes")
        except EOFError:
            return False

    @property
    def _instructions(self) -> list[dict[str, str]]:
        return [{"role": "system", "content": self._system}] if self._system else []

    def _outputs(self, turn: dict[str, str]) -> AsyncIterator[RequestOutput]:
        llm = self._model.llm
        if not self._model.has_chat_template:
            return llm.generate(turn["content"], self._params, output_kind="delta")
        return llm.chat([*self._instructions, *self._messages, turn], self._params, output_kind="delta")


def _markdown() -> MarkdownStream | None:
    """Return what renders an answer, None where stdout takes plain text only."""
    if not sys.stdout.isatty():
        return None
    from quire.frontend.cli.markdown import MarkdownStream, can_render

    return MarkdownStream(write_raw) if can_render() else None


def parameter(row: Option, text: str) -> object:
    """Return the value of a parameter that a user has typed. Raises `ValueError`."""
    if row.type is bool:
        if text not in ("true", "false"):
            raise ValueError(f"{row.name}={text!r} is not known; give true or false")
        return text == "true"
    try:
        value = row.type(text)
    except ValueError:
        kind = "a whole number" if row.type is int else "a number"
        raise ValueError(f"{row.name}={text!r} is not {kind}") from None
    row.check(value)
    return value


@takes_flags
def complete(
    prompt: Annotated[
        str | None, typer.Argument(help="Text to continue; - or nothing reads it from stdin.", show_default=False)
    ] = None,
    echo: Annotated[bool, switch(None, "--echo", "Write the prompt before its continuation.")] = False,
    *,
    engine: EngineFlags,
    attach: AttachFlags,
    sampling: SamplingFlags,
) -> None:
    """Continue one text, streamed to stdout."""
    tolerate_encoding()
    text = _read() if prompt in (None, "-") else prompt or ""
    with open_model(engine, attach) as model:
        answer = PrintedAnswer()
        write(text if echo else "")
        try:
            model.runner.run(answer.stream(model.llm.generate(text, model.params(sampling), output_kind="delta")))
        except BaseException:
            answer.end_line()
            raise
        answer.end()
    if sys.stderr.isatty():
        say(f"[{answer.summary}]")


def _read() -> str:
    """Read the prompt from stdin, less the line break that ends the last line."""
    if sys.stdin is None or sys.stdin.isatty():
        raise typer.BadParameter("there is no prompt; give one as an argument, or pipe one in")
    return sys.stdin.read().removesuffix("\n")
