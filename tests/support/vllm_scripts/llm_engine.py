"""Drive an engine step by step, with requests that come while others run."""

import argparse
import json

from vllm import EngineArgs, LLMEngine, RequestOutput, SamplingParams
from vllm.utils import FlexibleArgumentParser


def run(engine: LLMEngine, waiting: list[tuple[str, SamplingParams]]) -> list[RequestOutput]:
    finished, count = [], 0
    while waiting or engine.has_unfinished_requests():
        if waiting:
            prompt, params = waiting.pop(0)
            engine.add_request(str(count), prompt, params)
            count += 1
        finished += [output for output in engine.step() if output.finished]
    return finished


def main(args: argparse.Namespace) -> None:
    engine = LLMEngine.from_engine_args(EngineArgs.from_cli_args(args))
    requests = [
        ("Once upon a time", SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1)),
        ("There was a king who", SamplingParams(temperature=0.8, top_k=5, presence_penalty=0.2)),
        ("In a forest far away", SamplingParams(n=2, temperature=0.8, top_p=0.95, frequency_penalty=0.1)),
    ]
    outputs = sorted(run(engine, requests), key=lambda output: output.request_id)
    print(json.dumps([[output.request_id, [len(each.token_ids) for each in output.outputs]] for output in outputs]))


main(EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args())
