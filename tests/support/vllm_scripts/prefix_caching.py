"""Continue texts that begin alike, without and with the prefix cache."""

import json
import sys

from vllm import LLM, SamplingParams

prefix = "There was once a king who had three daughters, and the youngest was so beautiful that the sun itself " * 2
texts = [prefix + end for end in ("wondered", "hid behind the clouds", "came down")]
params = SamplingParams(temperature=0.0, max_tokens=8)

plain = LLM(sys.argv[1], gpu_memory_utilization=0.4, enable_prefix_caching=False, num_pages=128)
expected = [output.outputs[0].token_ids for output in plain.generate(texts, params)]
del plain

caching = LLM(sys.argv[1], gpu_memory_utilization=0.4, enable_prefix_caching=True, num_pages=128)
caching.generate(texts[0], params)  # computes what they share
outputs = caching.generate(texts, sampling_params=params)
same = [output.outputs[0].token_ids for output in outputs] == expected
print(json.dumps([same, [output.num_cached_tokens for output in outputs]]))
