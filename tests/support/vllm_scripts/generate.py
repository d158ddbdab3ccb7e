"""Continue a text, with the options of the engine on the command line."""

import json

from vllm import LLM, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
engine = parser.add_argument_group("Engine")
EngineArgs.add_cli_args(engine)
engine.set_defaults(max_model_len=512)
parser.add_argument("--max-tokens", type=int)
parser.add_argument("--temperature", type=float)
args = vars(parser.parse_args())
length, temperature = args.pop("max_tokens"), args.pop("temperature")

llm = LLM(**args)
params = llm.get_default_sampling_params()
if length is not None:
    params.max_tokens = length
if temperature is not None:
    params.temperature = temperature
[output] = llm.generate("The fox said to the goose", params)
print(json.dumps([output.prompt, output.outputs[0].token_ids, llm.stats()["pages_total"]]))
