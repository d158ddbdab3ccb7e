"""Read the metrics of an engine."""

import json
import sys

from vllm import LLM, SamplingParams
from vllm.v1.metrics.reader import Counter, Gauge, Histogram, Vector

llm = LLM(model=sys.argv[1], disable_log_stats=False, num_pages=128)
llm.generate(
    ["Once upon a time", "There was a king who"], SamplingParams(temperature=0.8, max_tokens=8, ignore_eos=True)
)
found: dict[str, dict[str, object]] = {"gauges": {}, "counters": {}, "histograms": {}, "vectors": {}}
for metric in llm.get_metrics():
    if isinstance(metric, Gauge):
        found["gauges"][metric.name] = metric.value
    elif isinstance(metric, Counter):
        found["counters"][metric.name] = metric.value
    elif isinstance(metric, Vector):
        found["vectors"][metric.name] = metric.values
    elif isinstance(metric, Histogram):
        found["histograms"][metric.name] = [metric.sum, metric.count, metric.buckets["+Inf"]]
print(json.dumps(found))
