"""`quire run`."""

from __future__ import annotations

from typing import Annotated

import typer

from quire.frontend.cli.chat import NO_MARKDOWN, ChatSession, greet
from quire.frontend.cli.flags import AttachFlags, EngineFlags, SamplingFlags, TemplateFlags, switch, takes_flags
from quire.frontend.cli.model import open_model
from quire.frontend.cli.output import say, tolerate_encoding
from quire.frontend.cli.serve import answer_once, is_text


@takes_flags
def run(
    name: Annotated[
        str | None,
        typer.Argument(
            help="Folder, GGUF file or name (ORG/NAME) of a model. Default: the demo model. A text of several words is "
            "the message.",
            metavar="MODEL",
            show_default=False,
        ),
    ] = None,
    prompt: Annotated[
        list[str] | None, typer.Argument(help="Message to answer, instead of a conversation.", show_default=False)
    ] = None,
    no_markdown: Annotated[bool, switch(None, "--no-markdown", NO_MARKDOWN)] = False,
    *,
    engine: EngineFlags,
    attach: AttachFlags,
    template: TemplateFlags,
    sampling: SamplingFlags,
) -> None:
    """Chat with a model, which is downloaded first if need be; or answer one message, and exit.

    A model without a chat template continues texts. The conversation is that of `quire chat`.
    """
    tolerate_encoding()
    if name is not None and is_text(name):
        prompt = [name, *(prompt or [])]
        name = None
    if name is not None:
        if engine.model is not None:
            raise typer.BadParameter("the model is given twice; omit --model")
        engine = engine.with_values(model=name)
    with open_model(engine, attach, template.given) as opened:
        if not opened.has_chat_template:
            known = name or engine.model or "the demo model"
            say(
                f"quire: {known} has no chat template: it continues the texts that it gets, and answers no messages; "
                "--chat-template FILE gives it one"
            )
        if prompt:
            answer_once(opened, " ".join(prompt), sampling, as_message=opened.has_chat_template)
            return
        greet(opened, sampling)
        ChatSession(opened, sampling, no_markdown=no_markdown).run()
