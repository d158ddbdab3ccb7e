"""`quire quantize`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quire.frontend.cli.flags import Flags, option, rows_of, takes_flags
from quire.frontend.cli.output import write
from quire.frontend.kernels import follow_kernels, readable_size
from quire.frontend.progress import task_bar
from quire.protocol.engine_options import EngineOptions, HubOptions

if TYPE_CHECKING:
    from collections.abc import Iterable

_MODES = ("int4", "int8")


class SourceFlags(Flags):
    """The options of a model at the hub, and of the threads."""

    rows = rows_of(HubOptions) | rows_of(EngineOptions, ("threads",))


@takes_flags
def quantize(
    model: Annotated[
        str, typer.Argument(help="Folder of a model, or its name (ORG/NAME) at the hub.", show_default=False)
    ],
    output: Annotated[Path, typer.Argument(help="Folder to make.", show_default=False, metavar="OUTPUT")],
    quantization: Annotated[
        str | None,
        option(None, "int4 (4.6 bits a weight of the linear layers) or int8 (8.5). Default: int4.", "MODE"),
    ] = None,
    calibration: Annotated[
        Path | None,
        option(
            None, "Text of the kind that the model will read, of which int4 then keeps more. Default: none.", "FILE"
        ),
    ] = None,
    *,
    source: SourceFlags,
) -> None:
    """Save a model with quantized weights as compressed-tensors, which other engines read too.

    Embeddings, the head and the routers of experts keep their dtype. int4 weighs errors by the importance of each
    input, which a short trial run measures; with --calibration, weights but those of experts make up for the errors of
    those before them (GPTQ), for up to 16 passages of the text. Of mixtures of experts, other engines do not read int4.
    `quire serve MODEL --quantization int4` needs no saved model, and loses less: its formats are Quire's own.
    """
    from quire.frontend.hub.resolve import resolve_model
    from quire.frontend.text.passages import passages_of, read_pieces
    from quire.frontend.text.tokenizer import Tokenizer

    mode = quantization or _MODES[0]
    if not str(output).isprintable():
        raise typer.BadParameter(f"OUTPUT is {str(output)!r}; it must be a path of printable characters")
    if mode not in _MODES:
        raise typer.BadParameter(f"--quantization is {mode!r}; it must be one of {', '.join(_MODES)}")
    if calibration is not None and mode != "int4":
        raise typer.BadParameter(f"--calibration is for int4, and --quantization is {mode}")
    pieces = [] if calibration is None else read_pieces(calibration)
    own = {name: source.given[name] for name in rows_of(HubOptions) if name in source.given}
    folder = resolve_model(model, **own)
    request = {
        "model": str(folder), "output": str(output), "quantization": mode, "threads": source.threads,
        "passages": passages_of(pieces, Tokenizer(folder)) if pieces else [],
    }  # fmt: skip
    found = _follow(follow_kernels("quantize", json.dumps(request)))
    sizes = f"{readable_size(found['source_bytes'])} -> {readable_size(found['bytes'])}"
    write(f"{output}: {found['modules']} linear layers quantized to {mode}, {sizes}\n")


def _follow(lines: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Show the progress of the tasks, and return the result."""
    with task_bar() as advance:
        for line in lines:
            if "task" not in line:
                return line
            advance(line["task"], line["done"], line["total"])
    raise RuntimeError("the process that quantizes ended without a result")
