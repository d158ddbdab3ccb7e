"""Score texts by a reward model."""

import json
import sys

from vllm import LLM, PoolingParams

llm = LLM(model=sys.argv[1], runner="pooling", enforce_eager=True, num_pages=128)
texts = ["The fox sleeps", "The king had a daughter"]
rewards = [output.outputs.data for output in llm.reward(texts)]
logits = llm.classify(texts, pooling_params=PoolingParams(task="classify", use_activation=False))
scores = llm.reward(texts, pooling_params=PoolingParams(use_activation=True))
print(json.dumps([rewards, [output.outputs.probs for output in logits], [output.outputs.data for output in scores]]))
