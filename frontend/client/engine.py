"""Connected engines: started or attached to, with the tokenizer of their model."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypedDict, Unpack

from quire.frontend.adapters import check_known
from quire.frontend.client.connection import Connection
from quire.frontend.client.engine_client import Connect, Delivery
from quire.frontend.client.engine_set import EngineSet, EngineStatus
from quire.frontend.client.observer import DEFAULT_OPTIONS, RequestOptions
from quire.frontend.client.remote_prefill import RemotePrefill
from quire.frontend.client.request import (
    EmbeddingRequest,
    GenerationRequest,
    PoolingParams,
    check_embedding,
    validate_pooling,
)
from quire.frontend.client.routing import Routing, Session
from quire.frontend.client.supervisor import MachinePart, ProcessTimeouts, Supervisor, stop_all
from quire.frontend.engine_args import EngineArgs
from quire.frontend.errors import EngineConnectionError, EngineDeadError, RequestError
from quire.frontend.outputs import RequestOutput
from quire.frontend.requested_adapters import RequestedAdapters
from quire.frontend.sampling import SamplingParams, SeedSource, answer_room, check_length, engine_params, validate
from quire.frontend.text.chat import harmony
from quire.frontend.text.chat.answer_format import AnswerFormat
from quire.frontend.text.chat.assistant import AssistantMessage, parse_answer
from quire.frontend.text.chat.content_format import FormatName
from quire.frontend.text.chat.message_keys import ignored_keys
from quire.frontend.text.chat.renderer import TemplateRenderer
from quire.frontend.text.chat.template_files import TemplateSource, find_template, given_template, template_sources
from quire.frontend.text.chat.tools import ToolUse, check_tools
from quire.frontend.text.pooled import PooledTexts
from quire.frontend.text.prompts import (
    Message,
    Prompt,
    PromptType,
    checked_prompt,
    encode_within,
    make_prompt,
    truncate,
)
from quire.frontend.text.tokenizer import Tokenizer, load_tokenizer
from quire.frontend.text.tokenizer_trial import check_tokenizer
from quire.protocol.address import default_address
from quire.protocol.engine_options import CONTENT_FORMATS
from quire.protocol.messages import ClientMessage, EngineCoreRequest, Ready, Role
from quire.protocol.pooling_info import PoolingInfo
from quire.protocol.routing.routers import ROUTERS, LeastLoaded, Router

logger = logging.getLogger(__name__)

_DRAIN_SECONDS = 5.0  # for requests of other clients when the owner of the engine leaves
_LONGEST_HANDSHAKE = 10.0  # seconds, with an engine that is running already


MAX_DECODED = 1 << 18
"""Token ids that are decoded at once, or as many as the context holds."""


class TemplateOptions(TypedDict, total=False):
    """Options of `chat` and `chat_prompt` for the rendering of a conversation.

    `chat_template`: replaces the model's. `add_generation_prompt`: begin the answer, the default.
    `continue_final_message`: continue the last message instead. `chat_template_kwargs`: further variables of the
    template. `add_special_tokens`: add the tokenizer's, beyond those that the template writes; there is one bos.
    `chat_template_content_format`: "string" or "openai" for the contents of messages as texts or as lists of parts,
    "auto" for what the template takes; None, the default, for the option of the same name.
    """

    chat_template: str | None
    add_generation_prompt: bool
    continue_final_message: bool
    chat_template_kwargs: Mapping[str, Any] | None
    add_special_tokens: bool
    chat_template_content_format: FormatName | None


class ConnectedEngine:
    """The common part of `LLM` and `AsyncLLM`: the engines, and the conversion of user input into requests.

    `deliver` is called on another thread, see `EngineSet`. Raises `EngineStartError`, `EngineConnectionError`. `close`
    ends the connections, and the processes of engines that were started here. `connect` makes the connections to
    engines that are running already, see `CoreClient`.
    """

    def __init__(
        self,
        args: EngineArgs,
        deliver: Callable[[Delivery], None],
        *,
        routing: Routing | None = None,
        connect: Connect = Connection,
    ) -> None:
        """`routing`: the one that the caller has made of these arguments, see `choose_router`."""
        self.args = args
        self.adapters = RequestedAdapters(args.download_dir)
        self._new_connection = connect
        self._seeds = SeedSource(args.seed)
        self._renderer = TemplateRenderer()
        self._given_template = None if args.chat_template is None else given_template(args.chat_template)
        self._template_source: TemplateSource | None = None
        self.routing = routing or Routing(choose_router(args))
        numbers = itertools.count()
        self.prefill = RemotePrefill(args.prefill_min_tokens, args.security, numbers, can_fetch=args.fetch_prefixes)
        self.engines = EngineSet(self._observed(deliver), self.routing, numbers=numbers)
        supervisors = _supervise(args) if args.starts_engines else []
        try:
            # Meanwhile the engines load their model.
            self.tokenizer = self._load_tokenizer(args.model) if supervisors else None
            self._connect(supervisors)
            for address in args.prefill_address:
                self.add_prefill_engine(address)
            if not args.starts_engines:
                self.tokenizer = self._load_tokenizer(self.engines.ready.model)
        except BaseException:
            self.close()
            stop_all(supervisors)
            raise
        ready_eos = self.engines.ready.eos_token_ids
        tokenizer_eos = [] if self.tokenizer is None else self.tokenizer.eos_token_ids
        eos = (*ready_eos, *tokenizer_eos, *self._format_stops)
        known = [token for token in eos if token < self.engines.ready.vocab_size]
        self.eos_token_ids = list(dict.fromkeys(known))

    @property
    def _format_stops(self) -> list[int]:
        """Tokens that end an answer in the format of the chat template, whatever the configuration says."""
        added = {} if self.tokenizer is None else {text: token for token, text in self.tokenizer.added_tokens.items()}
        return [added[stop] for stop in harmony.STOPS if stop in added and self.answer_format.is_harmony]

    @property
    def model(self) -> str:
        """The folder of the model, on the engine's machine."""
        return self.engines.ready.model

    def send(self, message: ClientMessage, session: Session) -> None:
        """Send a message to an engine, and what it concerns to a prefill engine; see `EngineSet.send`."""
        try:
            self.engines.send(self.prefill.pass_on(message, session.engine), session)
        except BaseException:
            if isinstance(message, EngineCoreRequest):
                self.prefill.end([message.request_id])
            raise

    def add_engine(self, address: str) -> int:
        """Let a running engine share the requests; return its number. Raises `EngineConnectionError`."""
        args = self.args
        self._check_unused(address, self.prefill.engines)
        return self._join(
            address,
            reconnect_timeout=args.reconnect_timeout,
            timeout=min(args.start_timeout, _LONGEST_HANDSHAKE),
            security=args.security,
            connect=self._new_connection,
        )

    def add_prefill_engine(self, address: str) -> int:
        """Let a running engine compute prompts for the others; return its number. Raises `EngineConnectionError`."""
        self._check_unused(address, self.engines)
        number = self.prefill.join(address, min(self.args.start_timeout, _LONGEST_HANDSHAKE))
        try:
            for engine in self.engines.statuses():
                self._check(engine.ready)
        except BaseException:
            self.prefill.engines.remove(number)
            raise
        self._fetch_from_prefill_engines()
        return number

    @staticmethod
    def _check_unused(address: str, engines: EngineSet) -> None:
        """Raise `EngineConnectionError` for the address of one of these engines."""
        if any(each.address == address for each in engines.statuses()):
            raise EngineConnectionError(
                f"the engine at {address} can either answer requests or compute prompts for others, and does one of "
                "them already; give another one"
            )

    def _fetch_from_prefill_engines(self) -> None:
        self.engines.fetch_from([each.address for each in self.prefill.engines.statuses()])

    def statuses(self) -> list[EngineStatus]:
        """Return all engines, those that compute prompts for others too, in the order in which they came."""
        prefill = [dataclasses.replace(each, is_prefill=True) for each in self.prefill.engines.statuses()]
        return sorted([*self.engines.statuses(), *prefill], key=lambda each: each.number)

    async def stats_each(self, timeout: float | None = None) -> dict[int, dict[str, Any]]:  # noqa: ASYNC109
        """Return the statistics of each engine, see `EngineSet`; of prefill engines only those that answer."""
        found = await self.engines.stats_each(timeout)
        if len(self.prefill.engines):
            with contextlib.suppress(EngineDeadError, RuntimeError, TimeoutError):
                found |= await self.prefill.engines.stats_each(timeout)
        return found

    def call(self, method: str, *args: Any, engine: int | None = None, **options: Any) -> Future[Any]:
        """Start a utility call of one engine, None for the first that answers; see `EngineSet.call`."""
        engines = self.engines if engine is None else self._part_of(engine).engines
        return engines.call(method, *args, engine=engine, **options)

    def set_draining(self, number: int, *, is_draining: bool = True) -> None:
        """Give an engine no more requests, or some again. Raises `ValueError` if it is unknown, or the last one."""
        part = self._part_of(number)
        part.engines.set_draining(number, is_draining=is_draining)
        if is_draining:
            part.routing.drain(number)
        else:
            part.routing.undrain(number)

    def remove(self, number: int) -> None:
        """Leave an engine; see `EngineSet.remove`."""
        self._part_of(number).engines.remove(number)
        self._fetch_from_prefill_engines()

    def _part_of(self, number: int) -> ConnectedEngine | RemotePrefill:
        is_prefill = any(each.number == number for each in self.prefill.engines.statuses())
        return self.prefill if is_prefill else self

    def _join(self, address: str, supervisor: Supervisor | None = None, **options: Any) -> int:
        return self.engines.join(address, supervisor, check=self._check, **options)

    def _check(self, ready: Ready) -> None:
        """Raise `EngineConnectionError` for an engine without the peer, or without the role, that is asked for."""
        self.prefill.check(ready)
        if self.routing.router.watches_prefixes and ready.role is not Role.ADMIN and not len(self.engines):
            self._leave_caches_alone()

    def _leave_caches_alone(self) -> None:
        """Use another router than one that engines do not tell of their caches, unless that was asked for."""
        if self.args.router is not None:
            raise EngineConnectionError(
                f"router={self.args.router} needs the role {Role.ADMIN} at the engines, and this client has the role "
                f"{Role.CLIENT}; attach over their ipc:// sockets or with the key admin.secret, or choose least-loaded"
            )
        self.routing.use(LeastLoaded())

    def close(self) -> None:
        """Disconnect, and stop the engines that were started here. Idempotent."""
        self.engines.close()
        self.prefill.close()
        self._renderer.close()

    def require_tokenizer(self) -> Tokenizer:
        """Return the tokenizer. Raises `RequestError` if there is none."""
        if self.tokenizer is None:
            raise RequestError("there is no tokenizer; give the folder of one with tokenizer=, or use token ids")
        return self.tokenizer

    def params(self, params: SamplingParams | None) -> SamplingParams:
        """Check parameters; None stands for vLLM's defaults. Raises `ValueError`."""
        return validate(SamplingParams() if params is None else params, vocab_size=self.engines.ready.vocab_size)

    def prompt(
        self,
        prompt: PromptType,
        *,
        truncate_prompt_tokens: int | None = None,
        add_special_tokens: bool = True,
        room: int = 1,
    ) -> Prompt:
        """Check and tokenize a prompt, and truncate it to its last tokens. Raises `RequestError`."""
        ready = self.engines.ready
        made = make_prompt(
            prompt,
            self.tokenizer,
            ready.vocab_size,
            ready.max_model_len,
            add_special_tokens=add_special_tokens,
            must_fit=truncate_prompt_tokens is None,
        )
        return truncate(made, truncate_prompt_tokens, ready.max_model_len, room)

    def request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        options: RequestOptions = DEFAULT_OPTIONS,
        arrival_time: float | None = None,
    ) -> GenerationRequest:
        """Create a request that is ready to be submitted, with checked `params`. Raises `RequestError`.

        `arrival_time` is the `time.monotonic()` at which the user asked for it; None for now.
        """
        ready = self.engines.ready
        if not self.pooling_info.generates:
            raise RequestError(f"this model generates no text; it {self.pooling_info.tasks}")
        self._check_options(options)
        check_length(params, len(prompt.token_ids), ready.max_model_len, ready.num_pages * ready.block_size)
        try:
            seed = self._seeds.next() if params.seed is None else params.seed
            each = engine_params(params, seed, self.tokenizer)
        except ValueError as error:
            raise RequestError(str(error)) from None
        arrived = time.monotonic() if arrival_time is None else arrival_time
        return GenerationRequest(
            request_id, prompt, params, each, self.tokenizer, arrival_time=arrived, options=options
        )

    @property
    def pooling_info(self) -> PoolingInfo:
        """The ways in which the model pools prompts."""
        shape = self.engines.ready.shape
        return PoolingInfo() if shape is None else shape.pooling

    @property
    def pooled_texts(self) -> PooledTexts:
        """The maker of prompts that are pooled."""
        ready = self.engines.ready
        return PooledTexts(self.pooling_info, self.tokenizer, ready.vocab_size, ready.max_model_len)

    def pooling(self, params: PoolingParams | None) -> PoolingParams:
        """Check the parameters of an embedding; None stands for the defaults. Raises `ValueError`."""
        return validate_pooling(params, self.pooling_info, self.engines.ready.hidden_size)

    def embedding(
        self,
        request_id: str,
        prompt: Prompt,
        params: PoolingParams,
        options: RequestOptions = DEFAULT_OPTIONS,
        arrival_time: float | None = None,
    ) -> EmbeddingRequest:
        """Create an embedding request that is ready to be submitted; otherwise like `request`."""
        ready = self.engines.ready
        self._check_options(options)
        check_embedding(len(prompt.token_ids), ready.max_model_len, ready.num_pages * ready.block_size)
        arrived = time.monotonic() if arrival_time is None else arrival_time
        return EmbeddingRequest(request_id, prompt, params, arrival_time=arrived, options=options)

    def _check_options(self, options: RequestOptions) -> None:
        """Raise `RequestError` for a priority that engines give their administrators only, and for an adapter that one
        does not take. The name of one that they take is kept.
        """
        ready = self.engines.ready
        if options.priority < 0 and ready.role is not Role.ADMIN:
            raise RequestError(
                f"priority={options.priority} needs the role {Role.ADMIN} at the engine, and this client has the role "
                f"{ready.role}; give 0 or more, or attach over the engine's ipc:// socket or with the key admin.secret"
            )
        if options.lora_request is not None:
            try:
                for engine in self.engines.statuses():  # any of them may get it
                    check_known(options.lora_request, engine.ready.adapters)
            except ValueError as error:
                raise RequestError(str(error)) from None
            self.adapters.note(options.lora_request)

    def list_loras(self) -> dict[str, str]:
        """Return the paths of the adapters that have names, by these: the engine's, and those of requests made here."""
        info = self.engines.ready.adapters
        return {**({} if info is None else info.folders), **self.adapters.paths}

    def chat_prompt(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        answer_format: AnswerFormat | None = None,
        must_fit: bool = False,
        **template: Unpack[TemplateOptions],
    ) -> Prompt:
        """Render a conversation as a prompt with the chat template. Raises `RequestError`, or `ChatTemplateError`.

        `answer_format`: that of the template, where it is known already. `must_fit`: the prompt will not be truncated,
        see `encode_within`.
        """
        variables, chat_template = template.get("chat_template_kwargs") or {}, template.get("chat_template")
        _check_variables(variables)
        content_format = template.get("chat_template_content_format") or self.args.chat_template_content_format
        if content_format not in CONTENT_FORMATS:
            raise RequestError(
                f"chat_template_content_format={content_format!r} is not known; it can be {', '.join(CONTENT_FORMATS)}"
            )
        tokenizer = self.require_tokenizer()
        text = self._renderer.render(
            self._template(tokenizer, chat_template),
            messages,
            add_generation_prompt=template.get("add_generation_prompt", True),
            continue_final_message=template.get("continue_final_message", False),
            tools=tools,
            describe_tools=(answer_format or self.answer_format_of(chat_template)).describes_tools,
            content_format=content_format,
            **variables,
        )
        token_ids = self.encode(text, add_special_tokens=template.get("add_special_tokens", False), must_fit=must_fit)
        return checked_prompt(Prompt(token_ids, text), self.engines.ready.vocab_size)

    def encode(self, text: str, *, add_special_tokens: bool = True, must_fit: bool = False) -> list[int]:
        """Return the token ids of a text, see `encode_within`. Raises `RequestError`."""
        return encode_within(
            text,
            self.require_tokenizer(),
            self.engines.ready.max_model_len,
            add_special_tokens=add_special_tokens,
            must_fit=must_fit,
        )

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids. Raises `RequestError`."""
        ready = self.engines.ready
        if len(token_ids) > (most := max(MAX_DECODED, ready.max_model_len)):
            raise RequestError(f"there are {len(token_ids)} token ids, and {most} can be decoded at once; give fewer")
        lowest, highest = min(token_ids, default=0), max(token_ids, default=0)
        if lowest < 0 or highest >= ready.vocab_size:
            raise RequestError(
                f"the tokens hold {lowest if lowest < 0 else highest}, which is out of range; token ids are 0 to "
                f"{ready.vocab_size - 1}"
            )
        return self.require_tokenizer().decode(token_ids, skip_special_tokens=skip_special_tokens)

    @functools.cached_property
    def chat_template(self) -> str:
        """The source of the chat template, empty without one."""
        if self.tokenizer is None:
            return ""
        if self._given_template is not None:
            return self._given_template
        return template_sources(self.tokenizer.path).get("default", "")

    @functools.cached_property
    def answer_format(self) -> AnswerFormat:
        """The format of the model's thoughts and tool calls."""
        return self._detect_format(self.chat_template)

    def answer_format_of(self, chat_template: str | None) -> AnswerFormat:
        """Return the format of answers to prompts of this template, None for the model's.

        A template that names tools but shows no format of calls that is known describes the tools itself.
        """
        if chat_template is None:
            return self.answer_format
        return dataclasses.replace(self._detect_format(chat_template), template_has_tools="tools" in chat_template)

    def _detect_format(self, template_source: str) -> AnswerFormat:
        tokenizer = self.tokenizer
        added = {} if tokenizer is None else tokenizer.added_tokens
        return AnswerFormat.detect(
            template_source,
            added_tokens=added.values(),
            special_tokens={} if tokenizer is None else {added[token]: token for token in tokenizer.special_token_ids},
            tool_parser=self.args.tool_call_parser,
            reasoning_parser=self.args.reasoning_parser,
        )

    def chat_input(
        self,
        messages: Sequence[Message],
        params: SamplingParams,
        tools: ToolUse | None,
        *,
        truncate_prompt_tokens: int | None = None,
        **template: Unpack[TemplateOptions],
    ) -> tuple[Prompt, SamplingParams]:
        """Return the prompt of a conversation, see `chat_prompt`, and the sampling parameters of its answer.

        Raises `RequestError` or `ToolError`.
        """
        answer_format = self.answer_format_of(template.get("chat_template"))
        prompt = self.chat_prompt(
            messages,
            tools=None if tools is None else tools.for_template(),
            answer_format=answer_format,
            must_fit=truncate_prompt_tokens is None,
            **template,
        )
        if ignored := ignored_keys(messages):
            logger.warning("unknown keys of messages are ignored: %s", ", ".join(ignored))
        answer = self.params(answer_format.params(params, prompt.text or "", tools))
        max_model_len = self.engines.ready.max_model_len
        return truncate(prompt, truncate_prompt_tokens, max_model_len, answer_room(answer, max_model_len)), answer

    def _template(self, tokenizer: Tokenizer, source: str | None) -> TemplateSource:
        if source is not None:
            return find_template(tokenizer.path, source=source)
        if self._template_source is None:
            self._template_source = find_template(tokenizer.path, source=self._given_template)
        return self._template_source

    def _load_tokenizer(self, model: str) -> Tokenizer | None:
        if self.args.skip_tokenizer_init:
            return None
        if self.args.tokenizer is not None:
            check_tokenizer(self.args.tokenizer)
            return Tokenizer(self.args.tokenizer)
        if not self.args.starts_engines and not Path(model).is_dir():
            return None  # the engine runs on another machine
        return load_tokenizer(model)

    def _observed(self, deliver: Callable[[Delivery], None]) -> Callable[[Delivery], None]:
        def deliver_observed(delivery: Delivery) -> None:
            self.prefill.observe(delivery)
            deliver(delivery)

        return deliver_observed

    def _connect(self, supervisors: list[Supervisor]) -> None:
        """Connect to the engines that were started here, and to those that run. Raises `EngineStartError`."""
        addresses = [supervisor.wait_ready() for supervisor in supervisors]
        for address, supervisor in zip(addresses, supervisors, strict=True):
            self._join(address, supervisor, reconnect_timeout=math.inf)
        for address in self.args.running_engines:
            self.add_engine(address)


def choose_router(args: EngineArgs) -> Router:
    """Return the router that was asked for, or the one for any engines."""
    name = args.router or "prefix-affinity"
    router = ROUTERS[name](0 if args.seed is None else args.seed)
    router.can_fetch = router.watches_prefixes and args.fetch_prefixes
    return router


def _supervise(args: EngineArgs) -> list[Supervisor]:
    """Start the engines of an `LLM` or `AsyncLLM`, on sockets in private folders."""
    check_tokenizer(args.model)
    supervisors: list[Supervisor] = []
    timeouts = ProcessTimeouts(args.start_timeout, _DRAIN_SECONDS)
    try:
        supervisors.extend(  # each is there as soon as it has begun
            Supervisor(default_address(), args.settings(), args, timeouts=timeouts, part=part)
            for part in MachinePart.each(args.data_parallel_size)
        )
    except BaseException:
        stop_all(supervisors)
        raise
    return supervisors


# Variables of the chat template that are set by other arguments.
_RESERVED = (
    "self",
    "messages",
    "add_generation_prompt",
    "continue_final_message",
    "tools",
    "describe_tools",
    "content_format",
)


def _check_variables(variables: Mapping[str, Any]) -> None:
    """Raise `RequestError` for a variable of a chat template that another argument sets."""
    for name in _RESERVED:
        if name in variables:
            advice = (
                "omit it"
                if name in ("self", "describe_tools", "content_format")
                else f"give {name} as an argument of its own, or omit it"
            )
            raise RequestError(f"chat_template_kwargs.{name} is not a variable that can be set; {advice}")


class AnswerParsing:
    """The methods of `LLM` and `AsyncLLM` that parse the answers of `chat`."""

    _engine: ConnectedEngine

    def parse(
        self,
        output: RequestOutput,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        chat_template: str | None = None,
    ) -> list[AssistantMessage]:
        """Parse each completion of a `chat` into a message with its thoughts and tool calls.

        `output` is the last or a cumulative one; the other arguments are the same as those of `chat`.
        Raises `ToolError` (a `ValueError`).
        """
        use = check_tools(tools, tool_choice, parallel_tool_calls)
        prompt, answer_format = output.prompt or "", self.answer_format_of(chat_template)
        return [parse_answer(completion.text, answer_format.parser(prompt, use)) for completion in output.outputs]

    @property
    def answer_format(self) -> AnswerFormat:
        """The format of the model's thoughts and tool calls; its `parser` reads an answer while it streams."""
        return self._engine.answer_format

    def answer_format_of(self, chat_template: str | None) -> AnswerFormat:
        """Return the same for prompts of another chat template."""
        return self._engine.answer_format_of(chat_template)
