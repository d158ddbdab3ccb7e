"""The computation of the completions of one body, as an answer or as a stream."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.requests import Request

from quire.frontend.client.observer import TraceContext
from quire.frontend.http.dialects.llama_cpp.body import GenerationBody
from quire.frontend.http.dialects.llama_cpp.cutoff import Cutoff
from quire.frontend.http.dialects.llama_cpp.sampling import FIELD_NAMES
from quire.frontend.http.dialects.llama_cpp.writer import Completion, CompletionWriter, chosen
from quire.frontend.http.errors import errors_renamed, grammar_errors_at
from quire.frontend.http.generation import Outputs, check_deadline, check_lengths, grown, merged
from quire.frontend.http.openai.logprobs import TokenWriter
from quire.frontend.http.service import ModelService
from quire.frontend.http.transport.responses import encoded, new_id
from quire.frontend.http.transport.sse import event
from quire.frontend.outputs import RequestOutput
from quire.frontend.sampling import fitted
from quire.frontend.text.offsets import TextOffsets
from quire.frontend.text.prompts import Prompt
from quire.frontend.turns import in_turns
from quire.protocol.messages import SamplingParams


class LlamaTask:
    """Runs `prompts` and writes their completions; `is_one`: the answer is not a list."""

    def __init__(
        self,
        service: ModelService,
        body: GenerationBody,
        request: Request,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        is_one: bool,
    ) -> None:
        self._service = service
        self._body = body
        self._prompts = prompts
        self._params = params
        self._is_one = is_one and params.n == 1
        self._terms = service.terms(request)
        self._trace = TraceContext("text_completion", request.headers, new_id("cmpl"))
        tokens = TokenWriter(service.tokenizer, as_ids=False)
        self._writers = [
            CompletionWriter(
                index,
                tokens,
                Cutoff(body.n_indent, body.t_max_predict_ms),
                body.n_probs or 0,
                TextOffsets(service.tokenizer, prompts[index // params.n].token_ids),
                leaves_out=body.num_predict == 0,
            )
            for index in range(len(prompts) * params.n)
        ]
        self._settings = body.settings(params, service.name, service.llm.max_model_len, stream=bool(body.stream))

    async def whole(self) -> Any:
        """Return the answer, or the list of all."""
        async with aclosing(self._deltas()) as deltas:
            last = {index: output async for index, output, _ in deltas}
        shown, fields = bool(self._body.return_tokens), self._body.response_fields
        answers = []
        async for index, writer in in_turns(enumerate(self._writers)):
            text = await self._text(index, last)
            answer = writer.whole(last[index], text, self._settings, with_tokens=shown)
            answers.append(encoded(chosen(answer, fields)))
        return answers[0] if self._is_one else answers

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the encoded events; the last of each completion has `stop`."""
        encode = msgspec.json.Encoder().encode
        async with aclosing(self._deltas()) as deltas:
            async for index, output, piece in deltas:
                if piece is not None:
                    yield event(encode(piece))
                writer = self._writers[index]
                if writer.has_ended:
                    text = await self._text(index, {index: output})
                    last = writer.whole(output, text, self._settings, is_last_event=True)
                    yield event(encode(chosen(last, self._body.response_fields)))

    def explain(self, error: Exception) -> bytes:
        """Return the event that ends a failed stream."""
        return event(msgspec.json.encode(self._service.api_error(error).body))

    async def _deltas(self) -> AsyncGenerator[tuple[int, RequestOutput, Completion | None], None]:
        """Yield for each increment the completion's index, the output, and what it adds; end when all have ended."""
        with_timings = bool(self._body.timings_per_token)
        ended: defaultdict[int, set[int]] = defaultdict(set)
        has_begun, field = False, "grammar" if self._body.grammar else "json_schema"
        with errors_renamed(FIELD_NAMES):
            async with grammar_errors_at(field), aclosing(merged(self._streams())) as outputs:
                async for prompt_index, output in outputs:
                    if not has_begun:
                        check_deadline(output)
                        has_begun = True
                    async for completion in in_turns(grown(output, ended[prompt_index])):
                        index = prompt_index * self._params.n + completion.index
                        writer = self._writers[index]
                        if writer.has_ended:  # was cut off
                            continue
                        yield index, output, writer.take(output, completion, with_timings=with_timings)
                    if all(writer.has_ended for writer in self._writers):
                        break  # closes the streams, which ends the requests of those that were cut off

    def _streams(self) -> list[Outputs]:
        any_length = msgspec.structs.replace(self._params, max_tokens=None)
        check_lengths(self._prompts, any_length, self._service.llm.max_model_len, "prompt")
        return [
            self._service.llm.generate(
                prompt,
                fitted(self._params, len(prompt.token_ids), self._service.llm.max_model_len),
                output_kind="delta",
                **self._terms,
                trace=self._trace,
            )
            for prompt in self._prompts
        ]

    async def _text(self, index: int, outputs: Mapping[int, RequestOutput]) -> str | None:
        """Return the prompt of a completion as text, None for all but the first of a prompt, which would repeat it."""
        if index % self._params.n:
            return None
        output = outputs[index]
        return await self._service.llm.run_long(lambda: self._service.prompt_text(output), output.prompt_token_ids)
