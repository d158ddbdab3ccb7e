"""`LLM`: batches of prompts in, all results out."""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Self, TypeVar, Unpack, cast

import msgspec

from quire.frontend.adapters import resolved
from quire.frontend.beam_search import BeamSearchOutput, BeamSearchParams, beam_search_output
from quire.frontend.client.engine import AnswerParsing, ConnectedEngine, TemplateOptions
from quire.frontend.client.merged_stats import merged
from quire.frontend.client.observer import OpenRequest, RequestOptions
from quire.frontend.client.request import EmbeddingRequest, PoolingParams
from quire.frontend.client.request_table import RequestTable
from quire.frontend.client.streams import DeliveryInbox, apply_delivery
from quire.frontend.engine_args import (
    DRAIN_SECONDS,
    EngineArgs,
    MadeFromEngineArgs,
    reload_arguments,
    takes_engine_args,
)
from quire.frontend.errors import EngineDeadError, RequestError, at_index
from quire.frontend.lora_request import LoRARequest
from quire.frontend.metrics.reader import Metric, read_metrics
from quire.frontend.metrics.requests import RequestMeter
from quire.frontend.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
)
from quire.frontend.pair_scores import pair_of, pair_params, pair_score, reads_pairs, similarity_params
from quire.frontend.pooling_tasks import reward_params, task_of
from quire.frontend.progress import progress_bar
from quire.frontend.sampling import SamplingParams, answer_room, fitted
from quire.frontend.similarity import num_pairs, score
from quire.frontend.text.chat.tool_grammar import tool_at_fault
from quire.frontend.text.chat.tools import check_tools
from quire.frontend.text.pooled import document_prompt_name, query_prompt_name
from quire.frontend.text.prompts import Message, Prompt, PromptType, split_batch
from quire.frontend.text.tokenizer import Tokenizer
from quire.frontend.vllm.fields import takes_vllm_arguments
from quire.protocol.messages import ErrorKind

T = TypeVar("T")
R = TypeVar("R", bound=OpenRequest)
LoRARequests = LoRARequest | Sequence[LoRARequest | None] | None
ProgressBar = bool | Callable[..., object]  # vLLM takes the class of a bar; there is one bar


class LLM(AnswerParsing, MadeFromEngineArgs):
    """A model that is ready to generate, in an engine process of its own or a running one.

    `LLM("/path/of/a/checkpoint")`, or `LLM()` for the demo model; keywords are the fields of `EngineArgs`, with vLLM's
    names. With `engine_address` it attaches to a running engine. Use it in a `with`, or call `close`; otherwise the
    engine ends when the object is collected, or with the program. Calls from several threads run one after the other.

    Raises `TypeError` or `ValueError` for invalid arguments, `EngineStartError` or `EngineConnectionError` if there is
    no engine.
    """

    @takes_engine_args(EngineArgs)
    def __init__(self, model: str | None = None, **options: Any) -> None:
        self._inbox = DeliveryInbox()
        self._engine = ConnectedEngine(EngineArgs.from_options(model, options), self._inbox.put)
        self._finalizer = weakref.finalize(self, self._engine.close)
        self._table = RequestTable(self._engine.send, self._engine.eos_token_ids, routing=self._engine.routing)
        self._meter = RequestMeter(self._engine.engines.ready.max_model_len)
        self._table.add_observer(self._meter)
        self._lock = threading.Lock()
        self._request_ids = itertools.count()

    @takes_vllm_arguments
    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: ProgressBar = True,
        lora_request: LoRARequests = None,
        truncate_prompt_tokens: int | None = None,
        add_special_tokens: bool = True,
        priority: int | Sequence[int] | None = 0,
        cache_salt: str = "",
        timeout: float | None = None,
    ) -> list[RequestOutput]:
        """Generate for one prompt or many; the results are in the order of the prompts.

        `sampling_params`, `lora_request` and `priority`: one for all, or one for each prompt. `use_tqdm`: show a
        progress bar if there are several prompts and a terminal; the class of a bar, which vLLM takes, counts as True.
        `truncate_prompt_tokens`, `add_special_tokens`, `lora_request`, `priority`, `cache_salt` and `timeout` (seconds,
        for each prompt) are those of `AsyncLLM.generate`. An answer with a `max_tokens` beyond the context ends where
        that is full, with finish reason "length". If a prompt or its parameters are invalid, `RequestError` (a
        `ValueError`) names it by its index and nothing runs; if a request fails in the engine, the others are aborted
        and `RequestError` is raised too.
        """
        given = split_batch(prompts)
        params = self._params(sampling_params, len(given))
        max_model_len = self._engine.engines.ready.max_model_len

        def make(index: int) -> Prompt:
            return self._engine.prompt(
                given[index],
                truncate_prompt_tokens=truncate_prompt_tokens,
                add_special_tokens=add_special_tokens,
                room=answer_room(params[index], max_model_len),
            )

        made = [at_index(index, make, index) for index in range(len(given))]
        return self._run(made, params, use_tqdm, _options(priority, cache_salt, timeout, len(made), lora_request))

    @takes_vllm_arguments
    def beam_search(
        self,
        prompts: PromptType | Sequence[PromptType],
        params: BeamSearchParams,
        *,
        use_tqdm: ProgressBar = True,
        lora_request: LoRARequests = None,
        priority: int | Sequence[int] | None = 0,
        cache_salt: str = "",
        timeout: float | None = None,
    ) -> list[BeamSearchOutput]:
        """Search for the `beam_width` most likely continuations of one prompt or many; otherwise like `generate`."""
        outputs = self.generate(
            prompts,
            params.sampling_params(),
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            priority=priority,
            cache_salt=cache_salt,
            timeout=timeout,
        )
        return [beam_search_output(output, params) for output in outputs]

    @takes_vllm_arguments
    def embed(
        self,
        prompts: PromptType | Sequence[PromptType],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        prompt_name: str | None = None,
        use_tqdm: ProgressBar = True,
        lora_request: LoRARequests = None,
        truncate_prompt_tokens: int | None = None,
        add_special_tokens: bool = True,
        priority: int | Sequence[int] | None = 0,
        cache_salt: str = "",
        timeout: float | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Compute the embedding of one prompt or many, as long as the context; otherwise like `generate`.

        A text follows the model's instruction `prompt_name`, None for its default and "" for none.
        """
        made = self._pooled_prompts(
            prompts,
            prompt_name=prompt_name,
            truncate_prompt_tokens=truncate_prompt_tokens,
            add_special_tokens=add_special_tokens,
        )
        options = _options(priority, cache_salt, timeout, len(made), lora_request)
        return [request.output() for request in self._pool(made, pooling_params, options, use_tqdm)]

    @takes_vllm_arguments
    def classify(
        self,
        prompts: PromptType | Sequence[PromptType],
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: ProgressBar = True,
        lora_request: LoRARequests = None,
        truncate_prompt_tokens: int | None = None,
        add_special_tokens: bool = True,
        priority: int | Sequence[int] | None = 0,
        cache_salt: str = "",
        timeout: float | None = None,
    ) -> list[ClassificationRequestOutput]:
        """Score one prompt or many by the labels of a classification model; otherwise like `generate`."""
        made = self._pooled_prompts(
            prompts,
            prompt_name="",
            truncate_prompt_tokens=truncate_prompt_tokens,
            add_special_tokens=add_special_tokens,
        )
        options = _options(priority, cache_salt, timeout, len(made), lora_request)
        params = _for_task("classify", pooling_params, len(made))
        return [request.classification() for request in self._pool(made, params, options, use_tqdm)]

    @takes_vllm_arguments
    def encode(
        self,
        prompts: PromptType | Sequence[PromptType],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        pooling_task: str | None = None,
        use_tqdm: ProgressBar = True,
        lora_request: LoRARequests = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[PoolingRequestOutput]:
        """Return the vectors of one prompt or many, of `embed` or `classify` by the task; None: what the model does."""
        each = [pooling_params] if isinstance(pooling_params, PoolingParams) else pooling_params or []
        task = task_of(pooling_task, each, self._engine.pooling_info)
        name = None if task == "embed" else ""
        made = self._pooled_prompts(prompts, prompt_name=name, truncate_prompt_tokens=truncate_prompt_tokens)
        params = _for_task(task, pooling_params, len(made))
        requests = self._pool(made, params, _options(0, "", None, len(made), lora_request), use_tqdm)
        return [request.vector() for request in requests]

    @takes_vllm_arguments
    def reward(
        self,
        prompts: PromptType | Sequence[PromptType],
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: ProgressBar = True,
        lora_request: LoRARequests = None,
        truncate_prompt_tokens: int | None = None,
        add_special_tokens: bool = True,
    ) -> list[PoolingRequestOutput]:
        """Return the reward of one prompt or many, a vector of one value; for models that classify by one label.

        It is the label's logit, with `use_activation` its score. There is one for each prompt, none for its tokens.
        """
        model = self._engine.pooling_info
        texts: Any = {"truncate_prompt_tokens": truncate_prompt_tokens, "add_special_tokens": add_special_tokens}
        made = self._pooled_prompts(prompts, prompt_name="", **texts)
        each = _for_task("classify", pooling_params, len(made))
        params = [reward_params(given, model) for given in each]
        requests = self._pool(made, params, _options(0, "", None, len(made), lora_request), use_tqdm)
        return [request.vector() for request in requests]

    @takes_vllm_arguments
    def score(
        self,
        text_1: PromptType | Sequence[PromptType],
        text_2: PromptType | Sequence[PromptType],
        *,
        pooling_params: PoolingParams | None = None,
        instruction: str | None = None,
        use_tqdm: ProgressBar = True,
        lora_request: LoRARequest | None = None,
        truncate_prompt_tokens: int | None = None,
        add_special_tokens: bool = True,
        priority: int = 0,
        cache_salt: str = "",
        timeout: float | None = None,
    ) -> list[ScoringRequestOutput]:
        """Score pairs of texts: one with many, or each with the one of its index.

        A model that reads pairs, a cross-encoder or a reranker, scores each, after `instruction` if it was trained with
        one. Else the score is the similarity of the embeddings, with the model's instructions for queries and
        documents; `pooling_params` cannot turn `normalize` off where that is a cosine. The other parameters are those
        of `embed`. Raises `ValueError` for lists that do not match, and for a model that can do neither.
        """
        first, second = split_batch(text_1), split_batch(text_2)
        count = num_pairs(len(first), len(second))
        model, texts = self._engine.pooling_info, self._engine.pooled_texts
        shape: Any = {"truncate_prompt_tokens": truncate_prompt_tokens, "add_special_tokens": add_special_tokens}
        if reads_pairs(model):

            def make(index: int) -> Prompt:
                return texts.pair(*pair_of(first, second, index), instruction=instruction, **shape)

            made = [at_index(index, make, index) for index in range(count)]
            params = pair_params(pooling_params)
            requests = self._pool(made, params, _options(priority, cache_salt, timeout, count, lora_request), use_tqdm)
            return [pair_score(request.output()) for request in requests]
        params = similarity_params(model, pooling_params, instruction)
        prompts = [
            *self._pooled_prompts(first, prompt_name=query_prompt_name(model), **shape),
            *self._pooled_prompts(second, len(first), prompt_name=document_prompt_name(model), **shape),
        ]
        options = _options(priority, cache_salt, timeout, len(prompts), lora_request)
        requests = self._pool(prompts, params, options, use_tqdm)
        embedded = [request.output() for request in requests]
        left, right = embedded[: len(first)], embedded[len(first) :]
        return [score(left[index if len(left) > 1 else 0], right[index], model.similarity) for index in range(count)]

    @takes_vllm_arguments
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: ProgressBar = True,
        lora_request: LoRARequests = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        truncate_prompt_tokens: int | None = None,
        priority: int | Sequence[int] | None = 0,
        cache_salt: str = "",
        timeout: float | None = None,
        **template: Unpack[TemplateOptions],
    ) -> list[RequestOutput]:
        """Answer one conversation or many, rendered by the model's chat template; otherwise like `generate`.

        `tools`, `tool_choice`, `parallel_tool_calls` and the options of the template, the same for all, are those of
        `AsyncLLM.chat`; `parse` splits an answer into thoughts, content and tool calls. Raises `ToolError`
        (a `ValueError`) for invalid tools.
        """
        use = check_tools(tools, tool_choice, parallel_tool_calls)
        single = not messages or isinstance(messages[0], Mapping)
        conversations = cast("Sequence[Sequence[Message]]", [messages] if single else messages)
        given = self._params(sampling_params, len(conversations))

        def convert(index: int) -> tuple[Prompt, SamplingParams]:
            return self._engine.chat_input(
                conversations[index], given[index], use, truncate_prompt_tokens=truncate_prompt_tokens, **template
            )

        inputs = [at_index(index, convert, index) for index in range(len(conversations))]
        prompts, params = [prompt for prompt, _ in inputs], [params for _, params in inputs]
        options = _options(priority, cache_salt, timeout, len(prompts), lora_request)
        try:
            return self._run(prompts, params, use_tqdm, options)
        except RequestError as error:
            raise tool_at_fault(error, use) or error from None

    def get_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer. Raises `ValueError` if there is none."""
        return self._engine.require_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters that hold if a call gives none."""
        return SamplingParams()

    def get_metrics(self, prefix: str = "vllm") -> list[Metric]:
        """Return the metrics of the engine, and of the requests of this object, with vLLM's names."""
        return read_metrics(self._engine.engines.ready, self.stats(), self._meter, prefix)

    def stats(self) -> dict[str, Any]:
        """Return the state of the engine: the fields of `SchedulerStats`, and counters of its socket."""
        return merged([call.result() for call in self._engine.engines.call_each("stats").values()])

    def reload(
        self, model: str | None = None, *, drain: bool = False, drain_timeout: float = DRAIN_SECONDS, **options: Any
    ) -> None:
        """Put a new engine with other weights or settings in the place of this one; see `AsyncLLM.reload`.

        Requests of other threads and clients go on.
        """
        given = options if model is None else {"model": model, **options}
        self._engine.engines.reload(reload_arguments(given, drain=drain, drain_timeout=drain_timeout))

    def reset_prefix_cache(self) -> bool:
        """Empty the engine's prefix cache."""
        for call in self._engine.engines.call_each("reset_cache").values():
            call.result()
        return True

    def pin_prefix(self, prompt: PromptType, *, cache_salt: str = "") -> int:
        """Compute a prompt and pin its KV pages in the cache; return the number of pinned tokens, in full pages.

        They stay until `unpin_prefix`, `reset_prefix_cache`, or until a running request would be preempted for them.
        """
        token_ids = self._engine.prompt(prompt).token_ids
        prompt = {"prompt_token_ids": token_ids}
        (output,) = self.generate(prompt, SamplingParams(max_tokens=1), cache_salt=cache_salt)
        engine = output.metrics.engine
        return cast("int", self._engine.engines.call("pin_prefix", token_ids, cache_salt, engine=engine).result())

    def unpin_prefix(self, prompt: PromptType, *, cache_salt: str = "") -> bool:
        """Unpin a prompt; return True if it was pinned."""
        token_ids = self._engine.prompt(prompt).token_ids
        calls = self._engine.engines.call_each("unpin_prefix", token_ids, cache_salt).values()
        results = [call.result() for call in calls]
        return any(results)

    @property
    def engine_address(self) -> str:
        """The address of the engine, where others can attach."""
        return self._engine.engines.address

    def close(self) -> None:
        """Disconnect, and stop the engine if it was started here. Idempotent."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _params(self, given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        return _each(given, SamplingParams, self._engine.params, "sampling_params", count)

    def _pooled_prompts(
        self, prompts: PromptType | Sequence[PromptType], first_index: int = 0, **options: Any
    ) -> list[Prompt]:
        make = functools.partial(self._engine.pooled_texts.prompt, **options)
        return [at_index(index, make, prompt) for index, prompt in enumerate(split_batch(prompts), first_index)]

    def _pool(
        self,
        prompts: list[Prompt],
        params: PoolingParams | Sequence[PoolingParams] | None,
        options: list[RequestOptions],
        use_tqdm: ProgressBar,
    ) -> list[EmbeddingRequest]:
        each = _each(params, PoolingParams, self._engine.pooling, "pooling_params", len(prompts))
        return self._complete(self._engine.embedding, prompts, each, options, use_tqdm)

    def _run(
        self,
        prompts: list[Prompt],
        params: list[SamplingParams],
        use_tqdm: ProgressBar,
        options: list[RequestOptions],
    ) -> list[RequestOutput]:
        max_model_len = self._engine.engines.ready.max_model_len
        lengths = (len(prompt.token_ids) for prompt in prompts)
        params = [fitted(each, length, max_model_len) for each, length in zip(params, lengths, strict=True)]
        requests = self._complete(self._engine.request, prompts, params, options, use_tqdm)
        return [request.output() for request in requests]

    def _complete(
        self,
        make: Callable[[str, Prompt, T, RequestOptions], R],
        prompts: list[Prompt],
        params: list[T],
        options: list[RequestOptions],
        use_tqdm: ProgressBar,
    ) -> list[R]:
        """Make all requests, and wait until they finish. No request is left running, however this ends."""

        def request(index: int) -> R:
            return make(str(next(self._request_ids)), prompts[index], params[index], options[index])

        requests = [at_index(index, request, index) for index in range(len(prompts))]
        with self._lock:
            try:
                self._wait_for(requests, use_tqdm)
            except BaseException:
                self._table.drop(requests)
                raise
        return requests

    def _wait_for(self, requests: Sequence[OpenRequest], use_tqdm: ProgressBar) -> None:
        while not self._inbox.empty():
            apply_delivery(self._table, self._inbox.get())  # outputs of requests that were dropped
        for request in requests:
            self._table.submit(request)
        with progress_bar(len(requests), bool(use_tqdm)) as advance:
            while self._table:
                delivery = self._inbox.get()
                ended_or_grown = apply_delivery(self._table, delivery)
                if isinstance(delivery, EngineDeadError):
                    raise EngineDeadError(*delivery.args)
                for request in ended_or_grown:
                    if request.error is not None:
                        raise _of_prompt(request.error, requests.index(request))
                    if request.finished:
                        advance(len(request.prompt.token_ids), request.num_output_tokens)


def _each(
    params: T | Sequence[T] | None, kind: type[T], check: Callable[[T | None], T], name: str, count: int
) -> list[T]:
    """Check and return the parameters of each prompt, given as one for all or one each; `name` is the argument."""
    if params is None or isinstance(params, kind):
        return [check(params)] * count
    if not isinstance(params, Sequence):
        raise TypeError(f"{name} is a {type(params).__name__}; give a {kind.__name__}, or one for each prompt")
    if len(params) != count:
        raise ValueError(f"there are {len(params)} {name} for {count} prompts; give one, or one for each prompt")
    return [at_index(index, check, each) for index, each in enumerate(params)]


def _for_task(
    task: Literal["embed", "classify"], params: PoolingParams | Sequence[PoolingParams] | None, count: int
) -> list[PoolingParams]:
    """Return the parameters of each prompt for a task, whatever theirs is."""
    each = _each(params, PoolingParams, lambda given: given or PoolingParams(), "pooling_params", count)
    return [msgspec.structs.replace(given, task=task) for given in each]


def _options(
    priority: int | Sequence[int] | None,
    cache_salt: str,
    timeout: float | None,
    count: int,
    lora_request: LoRARequests,
) -> list[RequestOptions]:
    """Return the options of each prompt's request."""
    priorities = [priority or 0] * count if priority is None or isinstance(priority, int) else priority
    if len(priorities) != count:
        raise ValueError(
            f"there are {len(priorities)} priorities for {count} prompts; give one, or one for each prompt"
        )
    adapters = lora_request if isinstance(lora_request, Sequence) else [lora_request] * count
    if len(adapters) != count:
        raise ValueError(
            f"there are {len(adapters)} lora_request for {count} prompts; give one, or one or None for each prompt"
        )
    return [
        RequestOptions(each, cache_salt, timeout, lora_request=resolved(adapter))
        for each, adapter in zip(priorities, adapters, strict=True)
    ]


def _of_prompt(error: Exception, index: int) -> RequestError:
    """Convert the error that ended a request into one that names the prompt by its index."""
    if isinstance(error, RequestError):
        return type(error)(str(error), index, error.kind, error.code)
    return RequestError(str(error), index, ErrorKind.FAILED)
