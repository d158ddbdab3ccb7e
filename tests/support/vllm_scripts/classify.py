"""Score texts by the labels of a classification model, with an argparse command line."""

import json

from vllm import LLM, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
parser.set_defaults(runner="pooling", enforce_eager=True, trust_remote_code=True)
llm = LLM(**vars(parser.parse_args()))
outputs = llm.classify(["The fox sleeps", "The king had a daughter"])
print(json.dumps([output.outputs.probs for output in outputs]))
