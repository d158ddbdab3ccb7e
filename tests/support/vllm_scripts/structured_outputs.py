"""Constrain answers by choice, regular expression, JSON schema and grammar."""

import json
import sys

from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

schema = {
    "type": "object",
    "properties": {"animal": {"enum": ["fox", "goose"]}},
    "required": ["animal"],
    "additionalProperties": False,
}
grammar = """
root ::= "the " animal " sleeps"
animal ::= "fox" | "goose"
"""
constraints = {
    "choice": StructuredOutputsParams(choice=["Good", "Evil"]),
    "regex": StructuredOutputsParams(regex=r"[a-z]{3,6}@tales\.com"),
    "json": StructuredOutputsParams(json=schema),
    "grammar": StructuredOutputsParams(grammar=grammar),
}
llm = LLM(model=sys.argv[1], max_model_len=100, num_pages=64)
texts = {}
for name, constraint in constraints.items():
    params = SamplingParams(structured_outputs=constraint, temperature=0.0, max_tokens=80)
    texts[name] = llm.generate(prompts="A tale: ", sampling_params=params)[0].outputs[0].text
print(json.dumps(texts))
