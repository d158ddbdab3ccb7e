"""The engine arguments of vLLM that Quire does not have: each is rejected with an error that names it, none ignored."""

from __future__ import annotations

import difflib

_WHY: dict[str, str] = {
    "device": "the engine runs on CPUs; kv_cache_memory_bytes sizes the KV cache",
    "parallel": "an engine is one process; use threads=",
    "kv": "kv_cache_memory_bytes or num_pages size the KV cache, block_size its pages",
    "lora": "adapters are not supported",
    "hub": "none of a model's code is run, its files are one revision, and HF_TOKEN has the token",
    "multimodal": "only text is supported",
    "always": "it cannot be changed",
    "logs": "statistics are read with stats()",
    "tasks": "a model does the tasks that its checkpoint is for, and a decoder also embeds",
    "other": "it is not supported",
}

# Arguments that Quire does not have, by the reason, of which only None asks for nothing.
_NONE = {
    "multimodal": "allowed_media_domains limit_mm_per_prompt mm_processor_kwargs",
    "parallel": "distributed_executor_backend",
    "hub": "tokenizer_revision code_revision hf_token hf_config_path",
    "kv": "num_gpu_blocks_override kv_transfer_config",
    "other": (
        "scheduler_cls guided_decoding_backend structured_outputs_config "
        "pooler_config override_generation_config logits_processors served_model_name"
    ),
    "lora": "max_loras max_lora_rank",
    "device": "compilation_config",
}
# Others: the values that ask for nothing, which pass, and why others are rejected.
_VLLM: dict[str, tuple[tuple[object, ...], str]] = {
    "tokenizer_mode": (("auto",), "other"),
    "trust_remote_code": ((False,), "hub"),
    "allowed_local_media_path": (("",), "multimodal"),
    "tensor_parallel_size": ((1,), "parallel"),
    "pipeline_parallel_size": ((1,), "parallel"),
    "data_parallel_size": ((1,), "parallel"),
    "enable_expert_parallel": ((False,), "parallel"),
    "disable_custom_all_reduce": ((True, False), "parallel"),
    "load_format": (("auto", "safetensors"), "other"),
    "config_format": (("auto", "hf"), "other"),
    "gpu_memory_utilization": ((), "device"),
    "swap_space": ((0,), "kv"),
    "cpu_offload_gb": ((0,), "device"),
    "enforce_eager": ((True, False, None), "device"),
    "device": (("cpu", "auto", None), "device"),
    "calculate_kv_scales": ((False,), "kv"),
    "disable_sliding_window": ((False,), "always"),
    "enable_chunked_prefill": ((True, None), "always"),
    "disable_chunked_mm_input": ((False,), "multimodal"),
    "max_num_partial_prefills": ((), "always"),
    "async_scheduling": ((False, None), "always"),
    "enable_lora": ((False,), "lora"),
    "task": ((None, "auto", "generate", "embed", "classify", "score"), "tasks"),
    "runner": ((None, "auto", "generate", "pooling"), "tasks"),
    "convert": ((None, "auto", "none", "embed"), "tasks"),
    "generation_config": (("vllm",), "other"),
    "max_logprobs": ((20,), "always"),
    "logprobs_mode": (("raw_logprobs",), "other"),
    "model_impl": (("auto",), "other"),
    "worker_cls": (("auto",), "parallel"),
    "enable_sleep_mode": ((False,), "device"),
    "disable_log_stats": ((True,), "logs"),
    "disable_log_requests": ((True,), "logs"),
    "enable_log_requests": ((False,), "logs"),
    **{name: ((None,), kind) for kind, names in _NONE.items() for name in names.split()},
}


def reject(name: str, value: object, known: set[str]) -> None:
    """Raise for an argument that Quire does not have, unless it is one of vLLM's with a value that asks for nothing."""
    if name not in _VLLM:
        close = difflib.get_close_matches(name, known)
        hint = f"did you mean {' or '.join(close)}?" if close else f"known are {', '.join(sorted(known))}"
        raise TypeError(f"{name} is not an argument; {hint}")
    passing, kind = _VLLM[name]
    if not any(value is allowed or value == allowed for allowed in passing):
        allowed = f"; it can only be {' or '.join(map(repr, passing))}" if passing else ""
        raise ValueError(f"{name}={value!r} is not supported: {_WHY[kind]}{allowed}; leave it out")
