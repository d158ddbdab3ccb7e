"""`quire serve`."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer

from quire.frontend.cli.flags import AttachFlags, CommonFlags, EngineFlags, SamplingFlags, switch, takes
from quire.frontend.cli.model import Model, open_model
from quire.frontend.cli.output import Answer, is_interactive, say, tolerate_encoding, write

WATCH_SECONDS = 0.25


@takes(engine=EngineFlags, attach=AttachFlags, sampling=SamplingFlags, common=CommonFlags)
def serve(
    prompt: Annotated[
        str | None, typer.Argument(help="Text to continue; the answer is streamed to stdout.", show_default=False)
    ] = None,
    as_message: Annotated[
        bool, switch(None, "--chat", "Take PROMPT as a message to answer, by the model's chat template.")
    ] = False,
    *,
    engine: EngineFlags,
    attach: AttachFlags,
    sampling: SamplingFlags,
    common: CommonFlags,
) -> None:
    """Start an engine and a frontend.

    With PROMPT: stream the answer, and end. On a terminal: an interactive session (/help tells more). Otherwise: print
    where the engine listens, so that others can attach with --address, and wait for SIGINT or SIGTERM.
    """
    del common
    tolerate_encoding()
    with open_model(engine, attach) as model:
        if prompt is not None:
            _answer(model, prompt, sampling, as_message)
        elif is_interactive():
            _converse(model, sampling)
        else:
            _wait(model)


def _answer(model: Model, prompt: str, sampling: SamplingFlags, as_message: bool) -> None:
    params = model.params(sampling)
    answer = Answer()
    if as_message:
        outputs = model.llm.chat([{"role": "user", "content": prompt}], params, output_kind="delta")
    else:
        outputs = model.llm.generate(prompt, params, output_kind="delta")
    try:
        model.runner.run(answer.stream(outputs))
    finally:
        answer.end_line()
    if sys.stderr.isatty():
        say(f"[{answer.summary}]")


def _converse(model: Model, sampling: SamplingFlags) -> None:
    from quire.frontend.cli.session import Session

    kind = "Say something" if model.has_chat_template else "Begin a text (this model continues texts)"
    say(f"quire: engine listening at {model.llm.engine_address}")
    say(f"{kind}; /help lists the commands, Ctrl-D leaves.")
    Session(model, model.params(sampling)).run()


def _wait(model: Model) -> None:
    """Wait for a signal, which ends the command, or for the end of the engine, which is an error."""
    write(f"quire: engine listening at {model.llm.engine_address}\n")
    while (error := model.llm.dead_error) is None:
        time.sleep(WATCH_SECONDS)
    raise RuntimeError(str(error))
