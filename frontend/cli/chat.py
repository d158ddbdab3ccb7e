"""`quire chat`."""

from __future__ import annotations

from typing import Annotated

import typer

from quire.frontend.cli.flags import AttachFlags, CommonFlags, EngineFlags, SamplingFlags, takes_flags
from quire.frontend.cli.model import open_model
from quire.frontend.cli.output import is_interactive, say, tolerate_encoding


@takes_flags
def chat(
    system: Annotated[
        str | None, typer.Option(help="System message of the conversation.", metavar="TEXT", show_default=False)
    ] = None,
    *,
    engine: EngineFlags,
    attach: AttachFlags,
    sampling: SamplingFlags,
    common: CommonFlags,
) -> None:
    """Have a conversation with a model that has a chat template.

    Commands: /reset, /system TEXT, /retry, /help, /exit. Ctrl-C during an answer stops it; at the prompt, Ctrl-C or
    Ctrl-D leaves. Without a terminal, every line of stdin is a message.
    """
    del common
    from quire.frontend.cli.session import Session
    from quire.frontend.text.chat.template import load_chat_template

    tolerate_encoding()
    with open_model(engine, attach) as model:
        if model.folder is not None:
            load_chat_template(model.folder)  # raises if there is none, and says what to do
        if is_interactive():
            say("Say something; /help lists the commands, Ctrl-D leaves.")
        Session(model, model.params(sampling), system).run()
