"""Answer one conversation and a batch of them, with the model's chat template and with another."""

import json
import sys

from vllm import LLM, SamplingParams
from vllm.outputs import RequestOutput


def text_of(output: RequestOutput) -> str:
    return str(output.outputs[0].text)


llm = LLM(sys.argv[1], num_pages=128)
params = SamplingParams(temperature=0.0, max_tokens=12)
talk = [
    {"role": "system", "content": "You tell tales."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Good day to you."},
    {"role": "user", "content": "Tell me of the fox."},
]
[alone] = llm.chat(talk, params, False)
batch = llm.chat([talk] * 3, params, use_tqdm=True)
template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
[other] = llm.chat(talk, params, use_tqdm=False, chat_template=template)
print(json.dumps([text_of(alone), [text_of(each) for each in batch], other.prompt]))
