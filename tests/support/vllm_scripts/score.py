"""Score a question with several answers."""

import json
import sys

from vllm import LLM

llm = LLM(model=sys.argv[1], runner="pooling", enforce_eager=True, num_pages=128)
outputs = llm.score("Who slept in the forest?", ["The fox slept.", "The king had a daughter."])
print(json.dumps([output.outputs.score for output in outputs]))
