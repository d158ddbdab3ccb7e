"""Ask for what Quire does not have."""

import json
import sys
from collections.abc import Callable

from vllm import LLM, PoolingParams, SamplingParams
from vllm.inputs import TextPrompt
from vllm.lora.request import LoRARequest

llm = LLM(model=sys.argv[1], num_pages=128)
image = TextPrompt(prompt="What is this?", multi_modal_data={"image": [0] * 1000})
asks: dict[str, Callable[[], object]] = {
    "lora_request": lambda: llm.generate("Hello", lora_request=LoRARequest("tales", 1, "/adapters/tales")),
    "lora_request of a chat": lambda: llm.chat([{"role": "user", "content": "Hi"}], None, True, "tales"),
    "multi_modal_data": lambda: llm.generate(image),
    "prompt_embeds": lambda: llm.generate({"prompt_embeds": [[0.0]]}),
    "logits_processors": lambda: SamplingParams(logits_processors=[len]),
    "reward": lambda: llm.reward("Hello"),
    "token_embed": lambda: llm.encode("Hello", pooling_task="token_embed"),
    "token_classify": lambda: llm.encode("Hello", PoolingParams(task="token_classify")),
    "tensor_parallel_size": lambda: LLM(model=sys.argv[1], tensor_parallel_size=2),
}
said = {}
for name, ask in asks.items():
    try:
        ask()
    except ValueError as error:
        said[name] = str(error)
nothing = TextPrompt(prompt="Once upon a time", multi_modal_data=None)
[output] = llm.generate(nothing, SamplingParams(max_tokens=2, extra_args=None), lora_request=None, priority=None)
print(json.dumps([said, output.finished]))
