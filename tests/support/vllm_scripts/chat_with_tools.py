"""Let the model call a tool, and answer with its result."""

import json
import sys

from vllm import LLM
from vllm.sampling_params import SamplingParams


def weather(city: str) -> str:
    return f"It rains in {city}."


city = {"type": "string", "maxLength": 8}
schema = {"type": "object", "properties": {"city": city}, "required": ["city"], "additionalProperties": False}
tools = [{"type": "function", "function": {"name": "weather", "description": "The weather", "parameters": schema}}]
# The demo model knows no tools. So a call is forced, as a list in JSON, which is what the script's own model writes.
form = {"tool_call_parser": "json_call", "tokenizer_mode": "auto", "config_format": "auto", "load_format": "auto"}
llm = LLM(model=sys.argv[1], num_pages=128, **form)
params = SamplingParams(max_tokens=80, temperature=0.0)
messages = [{"role": "user", "content": "How is the weather in Rome?"}]

force = {"tool_choice": "required", "parallel_tool_calls": False}
answer = llm.chat(messages, sampling_params=params, tools=tools, **force)[0].outputs[0].text.strip()
messages.append({"role": "assistant", "content": answer})
results = [weather(**call["arguments"]) for call in json.loads(answer)]
messages.append({"role": "tool", "content": "\n".join(results), "tool_call_id": "call-1"})
last = llm.chat(messages, params, tools=tools, tool_choice="none")[0]
print(json.dumps([results, last.finished]))
