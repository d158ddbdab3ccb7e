"""The process of a `TemplateRenderer`: renders conversations one after the other until its input ends.

The kernel enforces the limits, so that they hold whatever a template does: SIGPROF ends the process when a rendering
has used its CPU time, and an allocation beyond its memory fails.
"""

from __future__ import annotations

import os
import signal
import sys
from multiprocessing.connection import Connection

import msgspec

from quire.frontend.errors import ChatTemplateError
from quire.frontend.text.chat.render_protocol import MAX_CHARS, RENDER_BYTES, RENDER_SECONDS, RenderReply, RenderRequest
from quire.frontend.text.chat.template import ChatTemplate
from quire.protocol.parent_death import end_with_parent
from quire.protocol.process_limits import limit_process

_NICE = 10  # streams go first


def main() -> None:
    """Answer requests from the socket that is standard input; the argument is the process id of the parent."""
    end_with_parent(int(sys.argv[1]))
    os.nice(_NICE)
    limit_process(memory=RENDER_BYTES)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    connection: Connection[bytes, bytes] = Connection(0)
    try:
        connection.send_bytes(b"")  # it has begun
        while True:
            frame = connection.recv_bytes()
            signal.setitimer(signal.ITIMER_PROF, RENDER_SECONDS)
            reply = msgspec.msgpack.encode(_reply(frame))
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.send_bytes(reply)
    except (EOFError, ConnectionError):  # the owner has closed the renderer, or is gone
        return


def _reply(frame: bytes) -> RenderReply:
    try:
        request = msgspec.msgpack.decode(frame, type=RenderRequest)
        template = ChatTemplate(request.template.source, request.template.variables, request.template.file)
        text = template.render(request.messages, **request.options)
    except ChatTemplateError as error:
        return RenderReply(None, str(error))
    if len(text) > MAX_CHARS:
        return RenderReply(
            None,
            f"the model's chat template writes {len(text)} characters for these messages, and a prompt may have "
            f"{MAX_CHARS}; send shorter messages",
        )
    return RenderReply(text)


if __name__ == "__main__":
    main()
