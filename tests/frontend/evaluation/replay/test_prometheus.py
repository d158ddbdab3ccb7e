"""Metrics pages of servers."""

from __future__ import annotations

from quire.frontend.evaluation.replay.prometheus import sample_of
from quire.frontend.evaluation.replay.record import TargetSample

VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a } b"} 3.0
vllm:num_requests_running{engine="1",model_name="a } b"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:cache_config_info{block_size="16",num_gpu_blocks="400"} 1.0
vllm:prefix_cache_queries_total{engine="0"} 1.2e+03
vllm:prefix_cache_hits_total{engine="0"} 700.0
vllm:prompt_tokens_total{engine="0"} 1100.0
vllm:generation_tokens_total{engine="0"} 55.0 1395066363000
"""

LLAMA_CPP = """\
# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total 12
llamacpp:tokens_predicted_total 34
llamacpp:requests_processing 1
llamacpp:requests_deferred 2
"""


def test_vllms_page() -> None:
    sample = TargetSample(1.0, 7, 1, 100, None, 400, 1200, 700, 55)
    assert sample_of(VLLM, 1.0) == sample


def test_llama_cpps_page() -> None:
    assert sample_of(LLAMA_CPP, 2.0) == TargetSample(2.0, 1, 2, prompt_tokens=12, output_tokens=34)


def test_other_pages_tell_nothing() -> None:
    for page in ("", "python_gc_objects_collected_total 5.0\n", "vllm:num_requests_running\nx: y\n", "<h1>a: b</h1>"):
        assert sample_of(page, 0.0) is None
