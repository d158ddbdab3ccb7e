"""Stream the new part of an answer as it comes, and the same answer whole."""

import asyncio
import json
import sys

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM


async def texts(engine: AsyncLLM, kind: RequestOutputKind) -> list[str]:
    params = SamplingParams(max_tokens=30, temperature=0.8, top_p=0.95, seed=42, ignore_eos=True, output_kind=kind)
    found = []
    async for output in engine.generate(request_id=f"tale-{kind}", prompt="Once upon a time", sampling_params=params):
        found += [completion.text for completion in output.outputs]
        if output.finished:
            break
    return found


async def main() -> None:
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=sys.argv[1], enforce_eager=True, num_pages=128))
    try:
        kinds = (RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY)
        print(json.dumps([await texts(engine, kind) for kind in kinds]))
    finally:
        engine.shutdown()


asyncio.run(main())
