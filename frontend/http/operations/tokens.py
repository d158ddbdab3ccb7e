"""`POST /tokenize` and `POST /detokenize`: tokens of texts and conversations, and back."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from quire.frontend.errors import RequestError
from quire.frontend.http.conversation import tools_of_chat
from quire.frontend.http.errors import bad_request
from quire.frontend.http.service import Endpoints
from quire.frontend.http.shared_fields import MESSAGE, TOOL
from quire.frontend.http.transport.bodies import ITEMS, Body, Refusals
from quire.frontend.http.transport.responses import json_response


class TokenPiece(msgspec.Struct):
    """A token and its text, or the bytes of one that is no text by itself."""

    id: int
    piece: str | list[int]


class Tokens(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The tokens of a prompt. `max_model_len`: the context length; `token_strs`: the text of each token."""

    count: int
    max_model_len: int
    tokens: list[int | TokenPiece]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct):
    """The text of a list of tokens, under vLLM's name and under llama.cpp's."""

    prompt: str
    content: str


class TokenizeBody(Body, kw_only=True):
    """A text as `prompt` or `content`, or `messages` with options of the chat template.

    The names are vLLM's, and those that go with `content` llama.cpp's, where a text has no special tokens unless
    `add_special` is given.
    """

    refused: ClassVar[Refusals] = {"parse_special": ((True,), "special tokens in a text always become their ids")}

    prompt: str | None = None
    content: Annotated[str | None, Meta(description="The text, in llama.cpp's form.")] = None
    add_special: Annotated[bool | None, Meta(description="With content: add the tokenizer's special tokens.")] = None
    with_pieces: Annotated[bool | None, Meta(description="With content: return the text of each token.")] = None
    messages: Annotated[list[Annotated[dict[str, Any], MESSAGE]], ITEMS] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Annotated[list[Annotated[dict[str, Any], TOOL]], ITEMS] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(Body, kw_only=True):
    """Tokens to decode; the names are vLLM's."""

    tokens: list[int]


class TokenEndpoints(Endpoints):
    """Handlers of the endpoints about tokens."""

    async def tokenize(self, request: Request) -> Response:
        """Return the tokens of a text, or of a conversation rendered by the chat template."""
        service = self._service
        body = await service.read(request, TokenizeBody)
        if [body.prompt, body.content, body.messages].count(None) != 2:
            raise bad_request("give either prompt or messages, or content as llama.cpp has it")
        if body.content is None and (body.add_special is not None or body.with_pieces is not None):
            raise bad_request(
                "add_special and with_pieces go with content; use add_special_tokens and return_token_strs",
                "with_pieces" if body.add_special is None else "add_special",
            )
        if body.content is not None:
            service.require_tokenizer()
            tokens = await service.llm.tokenize(body.content, add_special_tokens=bool(body.add_special))
        elif body.prompt is not None:
            service.require_tokenizer()
            tokens = await service.llm.tokenize(body.prompt, add_special_tokens=body.add_special_tokens is not False)
        else:
            service.check_template(body.chat_template)
            use = await service.convert(request, lambda: tools_of_chat(request, body.messages or [], body.tools))
            prompt = await service.llm.chat_prompt(
                body.messages or [],
                chat_template=body.chat_template,
                add_generation_prompt=body.add_generation_prompt is not False,
                continue_final_message=bool(body.continue_final_message),
                tools=None if use is None else use.for_template(),
                chat_template_kwargs=body.chat_template_kwargs,
                add_special_tokens=bool(body.add_special_tokens),
            )
            tokens = prompt.token_ids
        answer = Tokens(count=len(tokens), max_model_len=service.llm.max_model_len, tokens=[*tokens])
        if body.with_pieces:
            answer.tokens = [*await service.llm.run_python(lambda: list(map(self._piece, tokens)), len(tokens))]
        if body.return_token_strs:
            text_of = service.require_tokenizer().token_text
            answer.token_strs = await service.llm.run_python(lambda: list(map(text_of, tokens)), len(tokens))
        return json_response(answer)

    async def detokenize(self, request: Request) -> Response:
        """Return the text of tokens."""
        service = self._service
        body = await service.read(request, DetokenizeBody)
        service.require_tokenizer()
        try:
            text = await service.llm.detokenize(body.tokens, skip_special_tokens=False)
        except RequestError as error:
            raise bad_request(str(error), "tokens") from None
        return json_response(Detokenized(text, text))

    def _piece(self, token_id: int) -> TokenPiece:
        tokenizer = self._service.require_tokenizer()
        piece = tokenizer.token_bytes(token_id)
        try:
            return TokenPiece(token_id, tokenizer.token_text(token_id) if piece is None else piece.decode())
        except UnicodeDecodeError:
            return TokenPiece(token_id, list(piece or b""))
