"""Compute embeddings, by both methods."""

import json
import sys

from vllm import LLM
from vllm.pooling_params import PoolingParams

llm = LLM(model=sys.argv[1], runner="pooling", enforce_eager=True, num_pages=128)
texts = ["The fox sleeps", "The king had a daughter"]
embedded = [output.outputs.embedding for output in llm.embed(texts)]
encoded = [output.outputs.data for output in llm.encode(texts, PoolingParams(), pooling_task="embed")]
print(json.dumps([embedded, encoded]))
