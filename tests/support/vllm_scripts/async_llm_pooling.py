"""Pool prompts on an event loop."""

import asyncio
import json
import sys

from vllm import PoolingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM


async def main() -> None:
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=sys.argv[1], runner="pooling", num_pages=128))
    found = []
    for number, text in enumerate(["The fox sleeps", "The king had a daughter"]):
        async for output in llm.encode(text, PoolingParams(task="embed"), f"request-{number}"):
            assert output.finished
            found.append([output.request_id, output.outputs.data])
    alone = (await llm.embed("The fox sleeps")).outputs.embedding
    llm.shutdown()
    print(json.dumps([found, alone]))


asyncio.run(main())
