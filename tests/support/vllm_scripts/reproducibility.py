"""Sample the same texts again with the same seed of the engine."""

import json
import os
import sys

from vllm import LLM, SamplingParams

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
llm = LLM(model=sys.argv[1], seed=42, num_pages=128)
outputs = llm.generate(["Once upon a time", "There was a king who"], SamplingParams(temperature=0.8, top_p=0.95))
print(json.dumps([output.outputs[0].text for output in outputs]))
