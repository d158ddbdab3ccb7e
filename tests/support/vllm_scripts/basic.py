"""Continue some texts."""

import json
import sys

from vllm import LLM, SamplingParams

texts = ["Once upon a time", "There was a king who", "In a forest far away"]
llm = LLM(model=sys.argv[1], tensor_parallel_size=1, enforce_eager=True, gpu_memory_utilization=0.5, num_pages=128)
outputs = llm.generate(texts, SamplingParams(temperature=0.8, top_p=0.95))
print(json.dumps([[output.prompt, output.outputs[0].text, output.finished] for output in outputs]))
