"""vLLM's options that Quire does not have, for Python and the command line.

A value that says what Quire does anyway passes. One that changes no result here is taken with a warning, and any other
is rejected with an error that says why; none is ignored in silence.
"""

from __future__ import annotations

import difflib
import reprlib
import sys
import warnings
from collections.abc import Mapping, Set
from typing import Any, NamedTuple


class ForeignOption(NamedTuple):
    """An option of vLLM. `holds`: values that say what Quire does anyway. `is_refused`: others are an error.

    As a flag it has one value, or none if it `is_switch`, or several if it `is_list`.
    """

    why: str
    is_refused: bool
    holds: tuple[object, ...] = ()
    is_switch: bool = False
    is_list: bool = False


# Options whose values change no result here, by the reason; `?` marks a switch, `*` a flag with several values.
_WITHOUT_EFFECT = {
    "there is no GPU": (
        "enforce_eager? compilation_config cudagraph_capture_sizes* max_cudagraph_capture_size "
        "max_seq_len_to_capture optimization_level performance_mode attention_backend attention_config "
        "kernel_config ir_op_priority moe_backend linear_backend sparse_indexer_topk_backend "
        "enable_flashinfer_autotune? disable_cascade_attn? enable_cumem_allocator? gdn_prefill_backend "
        "kda_prefill_backend kda_decode_backend dcp_comm_backend dcp_q_replicate? use_v2_block_manager? device_ids* "
        "disable_custom_all_reduce? all2all_backend ray_workers_use_nsight?"
    ),
    "weights and KV pages are in the CPU's memory; kv_cache_memory_bytes sizes the KV cache": (
        "swap_space cpu_offload_gb cpu_offload_params* offload_backend offload_group_size offload_num_in_group "
        "offload_prefetch_step offload_params* preemption_mode"
    ),
    "an engine is one process on one machine; threads says how many CPUs compute": (
        "distributed_executor_backend max_parallel_loading_workers worker_use_ray? master_addr master_port "
        "distributed_timeout_seconds cpu_distributed_timeout_seconds dcp_kv_cache_interleave_size "
        "cp_kv_cache_interleave_size data_parallel_rank data_parallel_start_rank data_parallel_size_local "
        "data_parallel_address data_parallel_rpc_port data_parallel_hybrid_lb? data_parallel_external_lb? "
        "data_parallel_multi_port_external_lb? data_parallel_backend data_parallel_supervisor_port enable_hc_sp? "
        "enable_expert_parallel? enable_batch_sharded_sampling? enable_ep_weight_filter? enable_elastic_ep? "
        "elastic_ep_max_dp_size enable_dbo? ubatch_size dbo_decode_token_threshold dp_sync_interval "
        "dbo_prefill_token_threshold disable_nccl_for_dp_synchronization? eplb_config enable_eplb? "
        "expert_placement_strategy enable_nccl_comm_suspend? enable_shm_tensor_arena? "
        "dp_supervisor_probe_interval_s dp_supervisor_probe_timeout_s dp_supervisor_probe_failure_threshold "
        "renderer_num_workers disable_frontend_multiprocessing?"
    ),
    "threads are placed on the CPUs by themselves; pin_threads binds each": (
        "numa_bind? numa_bind_nodes* numa_bind_cpus*"
    ),
    "Quire fills its steps by max_num_batched_tokens and target_itl, which changes no answer": (
        "enable_chunked_prefill? async_scheduling? max_num_partial_prefills max_long_partial_prefills "
        "long_prefill_token_threshold_adaptive? scheduler_reserve_full_isl? prefill_schedule_interval watermark "
        "stream_interval num_scheduler_steps multi_step_stream_outputs? scheduler_delay_factor num_lookahead_slots "
        "disable_async_output_proc? kv_sharing_fast_prefill? swa_bounded_replay?"
    ),
    "Quire lays out and finds KV pages its own way, which changes no answer": (
        "prefix_caching_hash_algo prefix_cache_retention_interval prefix_match_unit "
        "disable_hybrid_kv_cache_manager? mamba_cache_dtype mamba_ssm_cache_dtype mamba_block_size mamba_cache_mode "
        "mamba_backend mamba_ssu_algorithm mamba_config mamba_cache_philox_rounds "
        "enable_mamba_cache_stochastic_rounding? enable_mamba_shared_prefix_checkpoint? replayssm_buffer_len "
        "use_replayssm?"
    ),
    "none of a model's code is run, and none is needed for the architectures that Quire has": (
        "trust_remote_code? code_revision"
    ),
    "weights are mapped from safetensors or GGUF files": (
        "safetensors_load_strategy safetensors_prefetch_num_threads safetensors_prefetch_block_size "
        "ignore_patterns* pt_load_map_location use_tqdm_on_load? allow_deprecated_quantization?"
    ),
    "only text is supported": (
        "allowed_local_media_path allowed_media_domains* language_model_only? limit_mm_per_prompt enable_mm_embeds? "
        "interleave_mm_strings? media_io_kwargs mm_processor_kwargs mm_processor_cache_gb mm_processor_cache_type "
        "mm_hasher_algorithm mm_shm_cache_max_object_size_mb mm_encoder_only? mm_encoder_tp_mode "
        "mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path "
        "mm_encoder_fp8_scale_save_margin skip_mm_profiling? video_pruning_rate video_pruning_method mm_tensor_ipc "
        "mm_processor_device mm_ipc_gpu_memory_gb mm_device_do_normalize? disable_chunked_mm_input? "
        "ec_manager_config enable_mm_processor_stats? disable_mm_preprocessor_cache? trust_request_mm_kwargs?"
    ),
    "adapters are not divided among devices": "fully_sharded_loras?",
    "an adapter's files say what it changes, and one that cannot be computed is an error": (
        "default_mm_loras enable_tower_connector_lora? specialize_active_lora? "
        "enable_mixed_moe_lora_format? enable_moe_shared_loras? max_lora_cls_labels lora_extra_vocab_size"
    ),
    "llguidance enforces all constraints": "guided_decoding_backend",
    "stats(), get_metrics() and /metrics have the figures": (
        "disable_log_stats? aggregate_engine_logging? show_hidden_metrics_for_version collect_detailed_traces* "
        "per_request_spec_decode_metrics kv_cache_metrics? kv_cache_metrics_sample custom_histogram_buckets "
        "cudagraph_metrics? enable_layerwise_nvtx_tracing? enable_mfu_metrics? enable_server_load_tracking? "
        "enable_per_request_metrics?"
    ),
    "the log is set by log_level and log_format of quire serve": (
        "enable_log_requests? disable_log_requests? enable_logging_iteration_details? enable_log_outputs? "
        "enable_log_deltas? max_log_len logging_config log_level log_config_file uvicorn_log_level "
        "disable_uvicorn_access_log? disable_access_log_for_endpoints log_error_stack? jit_monitor_mode "
        "jit_monitor_verbose?"
    ),
    "quire trace records the steps of an engine": "profiler_config",
    "an engine that dies is started again, see max_restarts": "enable_fault_tolerance? fault_tolerance_config",
    "Quire has no such setting, and answers do not depend on it": (
        "fail_on_environ_validation? sleep_mode_offload_cudagraph? sleep_preserve_parameter_names* "
        "served_model_name* sse_keep_alive_interval fingerprint_mode fingerprint_value cohere_is_reasoning_model? "
        "cohere_format enable_flash_late_interaction? enable_offline_docs? h11_max_incomplete_event_size "
        "h11_max_header_count enable_prompt_tokens_details? enable_request_id_headers? enable_reasoning?"
    ),
}  # fmt: skip

# Options of which other values than the ones below are refused, by the reason.
_REFUSED = {
    "an engine is one process on one machine; threads says how many CPUs compute": (
        "tensor_parallel_size pipeline_parallel_size prefill_context_parallel_size "
        "decode_context_parallel_size nnodes node_rank headless? api_server_count"
    ),
    "an engine that sleeps would free the memory of a GPU; close it": "enable_sleep_mode?",
    "max_loras says how many adapters are in memory, and takes whole numbers": "max_cpu_loras",
    "an adapter is computed in the dtype of its model": "lora_dtype",
    "an adapter changes the layers that its files name": "lora_target_modules*",
    "give lora_modules": "qlora_adapter_name_or_path",
    "prompts are text or token ids": "enable_prompt_embeds? io_processor_plugin tokens_only?",
    "a model does the tasks that its checkpoint is for, and a decoder also embeds": "runner convert task",
    "a request's pooling_params say how its prompt is pooled, else the checkpoint does": (
        "pooler_config override_pooler_config"
    ),
    "num_pages or kv_cache_memory_bytes size the KV cache": "num_gpu_blocks_override",
    "max_num_seqs bounds the running requests": "max_num_active_seqs",
    "max_waiting_requests bounds the waiting requests": "max_num_queued_reqs",
    "max_waiting_tokens bounds the tokens of waiting requests": "max_num_queued_tokens",
    "max_num_batched_tokens is the token budget of a step": "max_num_scheduled_tokens",
    "give speculative_config with method, model and num_speculative_tokens": "spec_method spec_model spec_tokens",
    "give hf_overrides": "rope_scaling rope_theta hf_config_path model_class_overrides",
    "KV pages of a GPU go to host memory by Quire itself, as many GiB as kv_offloading_size says": (
        "kv_offloading_size kv_offloading_backend"
    ),
    "an engine fetches KV pages from another with kv_peer, or prefill_address": (
        "kv_transfer_config ec_transfer_config"
    ),
    "quantization names the mode, and a checkpoint brings its own configuration": (
        "quantization_config kv_cache_dtype_skip_layers* calculate_kv_scales?"
    ),
    "a checkpoint is read in the format of Hugging Face, safetensors or GGUF": (
        "load_format config_format tokenizer_mode model_weights model_loader_extra_config"
    ),
    "all files are of one revision": "tokenizer_revision",
    "the variable HF_TOKEN has the token": "hf_token",
    "the architecture is compiled by Quire itself, which runs no other code": (
        "model_impl worker_cls worker_extension_cls scheduler_cls logits_processors* additional_config middleware "
        "reasoning_parser_plugin tool_parser_plugin"
    ),
    "log probabilities are the model's own, of up to 20 tokens": "max_logprobs logprobs_mode",
    "LLM and AsyncLLM take vLLM's defaults of SamplingParams, and quire serve the model's": "generation_config",
    "give SamplingParams, or the flags of quire serve, as temperature": "override_generation_config",
    "llguidance enforces all constraints, and StructuredOutputsParams has their options": "structured_outputs_config",
    "weights are replaced with reload": "weight_transfer_config",
    "requests may say it with chat_template_kwargs": "default_chat_template_kwargs",
    "quire serve has it, and its Python classes do not": "otlp_traces_endpoint shutdown_timeout",
    "give the options as flags": "config",
    "the server speaks HTTP/1.1 as frontend/http/README.md describes": (
        "grpc? grpc_port enable_scale_out? enable_force_include_usage? return_tokens_as_token_ids? response_role "
        "exclude_tools_when_tool_choice_none? tool_strict_level tool_server "
        "enable_tokenizer_info_endpoint? disable_fastapi_docs? anthropic_disabled_thinking_effort "
        "allow_credentials? allowed_methods allowed_headers ssl_ca_certs ssl_cert_reqs ssl_ciphers "
        "enable_ssl_refresh? enable_auto_tool_choice?"
    ),
    "Quire has nothing of the kind": (
        "enable_return_routed_experts? return_sampling_mask? enable_trace_replay? use_fp64_gumbel? "
        "disable_sliding_window? aux_output_config reasoning_config watermark_config diffusion_config engram_config "
        "enable_prompt_adapter? prompt_adapters*"
    ),
}  # fmt: skip

# Values that say what Quire does anyway; of a switch that is not here, False.
_HOLDS: dict[str, tuple[object, ...]] = {
    "tensor_parallel_size": (1,),
    "pipeline_parallel_size": (1,),
    "prefill_context_parallel_size": (1,),
    "decode_context_parallel_size": (1,),
    "nnodes": (1,),
    "node_rank": (0,),
    "api_server_count": (1,),
    "swap_space": (0,),
    "cpu_offload_gb": (0,),
    "kv_offloading_backend": ("native",),
    "distributed_executor_backend": ("uni",),
    "enable_chunked_prefill": (True,),
    "use_tqdm_on_load": (True,),
    "enable_auto_tool_choice": (True, False),
    "enable_reasoning": (True, False),
    "enable_prompt_tokens_details": (True, False),
    "enable_request_id_headers": (True, False),
    "enable_offline_docs": (True, False),
    "disable_log_stats": (True, False),
    "load_format": ("auto", "hf", "safetensors"),
    "config_format": ("auto", "hf"),
    "tokenizer_mode": ("auto", "hf"),
    "model_impl": ("auto", "vllm"),
    "worker_cls": ("auto",),
    "hf_token": (True,),
    "runner": ("auto", "generate", "pooling"),
    "convert": ("auto", "none", "embed"),
    "task": ("auto", "generate", "embed", "embedding", "classify", "score"),
    "max_logprobs": (20,),
    "logprobs_mode": ("raw_logprobs",),
    "lora_dtype": ("auto",),
    "generation_config": ("vllm",),
    "response_role": ("assistant",),
    "anthropic_disabled_thinking_effort": ("auto",),
    "tool_strict_level": ("auto",),
    "allowed_methods": (["*"],),
    "allowed_headers": (["*"],),
    "ssl_cert_reqs": (0,),
}


def _rows(groups: Mapping[str, str], *, is_refused: bool) -> dict[str, ForeignOption]:
    rows = {}
    for why, names in groups.items():
        for marked in names.split():
            name, is_switch = marked.rstrip("?*"), marked.endswith("?")
            holds = _HOLDS.get(name, (False,) if is_switch else ())
            rows[name] = ForeignOption(why, is_refused, holds, is_switch, marked.endswith("*"))
    return rows


ENGINE_OPTIONS = _rows(_WITHOUT_EFFECT, is_refused=False) | _rows(_REFUSED, is_refused=True)
"""Arguments of an engine, and flags of a server."""

ALIASES = {
    "-tp": "tensor_parallel_size", "-pp": "pipeline_parallel_size", "-dp": "data_parallel_size",
    "-pcp": "prefill_context_parallel_size", "-dcp": "decode_context_parallel_size", "-n": "nnodes",
    "-r": "node_rank", "-dpn": "data_parallel_rank", "-dpr": "data_parallel_start_rank",
    "-dpl": "data_parallel_size_local", "-dpa": "data_parallel_address", "-dpp": "data_parallel_rpc_port",
    "-dpb": "data_parallel_backend", "-dph": "data_parallel_hybrid_lb", "-dpe": "data_parallel_external_lb",
    "-dpm": "data_parallel_multi_port_external_lb", "-ep": "enable_expert_parallel", "-dc": "diffusion_config",
    "-cc": "compilation_config", "-ac": "attention_config", "-asc": "api_server_count", "-O": "optimization_level",
    "--device-memory-utilization": "gpu_memory_utilization", "-q": "quantization", "-sc": "speculative_config",
}  # fmt: skip
"""Further flags of options, the last two of Quire's own."""

# The nearest values that Quire has for others of vLLM, of options of its own.
_NEAREST: dict[str, dict[object, object]] = {
    "dtype": {"half": "bfloat16", "float16": "bfloat16", "float": "float32"},
    "block_size": {1: 32, 8: 32, 16: 32, 256: 128},
}


_MOST_GIB = 1 << 33  # in 63 bits

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 80  # an image or a tensor may be given


def take(name: str, value: object, table: Mapping[str, ForeignOption] = ENGINE_OPTIONS) -> None:
    """Take a value of a foreign option. Warns if it has no effect; raises `ValueError` if it cannot be had."""
    row = table[name]
    if value is None or (hasattr(value, "__len__") and not len(value)) or value in row.holds:
        return
    shown = _REPR.repr(value)
    if not row.is_refused:
        warn(f"{name}={shown} has no effect: {row.why}")
        return
    allowed = f"; it can only be {' or '.join(map(repr, row.holds))}" if row.holds else ""
    raise ValueError(f"{name}={shown} is not supported: {row.why}{allowed}; leave it out")


def nearest(name: str, value: Any) -> Any:
    """Return the value that Quire has for one of vLLM of the same option, with a warning if it is another one."""
    if name == "dtype" and type(value).__module__ == "torch":
        value = str(value).removeprefix("torch.")
    choices = _NEAREST.get(name, {})
    found = next((choices[each] for each in choices if type(each) is type(value) and each == value), value)
    if found is not value:
        warn(f"{name}={value!r} is not available; {found!r}, the nearest, is used")
    return found


def nearest_text(name: str, text: str) -> str:
    """Return the text of the value that Quire has for one of vLLM, see `nearest`."""
    if name not in _NEAREST:
        return text
    return str(nearest(name, int(text) if text.isdecimal() else text))


def with_max_loras(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return options with the nearest `max_loras` in the place of vLLM's `max_cpu_loras`, and a warning if it is new.

    Every adapter in memory may take part in a step here, so that one number is both. Raises `ValueError` for a
    `max_cpu_loras` below `max_loras`, as vLLM does.
    """
    most, given = options.get("max_cpu_loras"), options.get("max_loras")
    if type(most) is not int:
        return options
    if type(given) is int and most < given:
        raise ValueError(f"max_cpu_loras={most} is less than max_loras={given}; give {given} or more, or leave it out")
    if most != given:
        warn(f"max_cpu_loras={most} is not available; max_loras={most}, the nearest, is used")
    return {**{name: value for name, value in options.items() if name != "max_cpu_loras"}, "max_loras": most}


def with_kv_host_memory(options: Mapping[str, Any], device: object) -> Mapping[str, Any]:
    """Return options with `kv_host_memory` in the place of vLLM's `kv_offloading_size`, which is a number of GiB.

    Without a GPU, by the `device`, there is neither, and a warning. Raises `ValueError` if both are given.
    """
    size = options.get("kv_offloading_size")
    if isinstance(size, bool) or not isinstance(size, int | float) or not 0 <= size < _MOST_GIB:
        return options
    others = {name: value for name, value in options.items() if name != "kv_offloading_size"}
    if device in (None, "cpu"):
        warn(
            f"kv_offloading_size={size!r} has no effect: there is no GPU; KV pages are in the CPU's memory, and "
            "kv_cache_memory_bytes sizes the KV cache"
        )
        return others
    if others.get("kv_host_memory") is not None:
        raise ValueError("kv_offloading_size and kv_host_memory both size host memory for KV pages; give one of them")
    return {**others, "kv_host_memory": int(size * (1 << 30))}


def _with_gpu_memory(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return options without the part of a GPU's memory, and a warning, if there is no GPU."""
    part = options.get("gpu_memory_utilization")
    if part is None or options.get("device") not in (None, "cpu"):
        return options
    warn(
        f"gpu_memory_utilization={_REPR.repr(part)} has no effect: there is no GPU; kv_cache_memory_bytes sizes the KV "
        "cache, and memory_limit the whole engine"
    )
    return {name: value for name, value in options.items() if name != "gpu_memory_utilization"}


def own_options(options: Mapping[str, Any], own: Set[str]) -> dict[str, Any]:
    """Return the options that are Quire's own, by the names in `own`, without those that are None; take the others.

    Raises `TypeError` for a name that neither Quire nor vLLM knows, `ValueError` for what cannot be had.
    """
    if "max_loras" in own:
        options = with_max_loras(options)
    if "gpu_memory_utilization" in own:
        options = _with_gpu_memory(options)
    if "kv_host_memory" in own:
        options = with_kv_host_memory(options, options.get("device"))
    for name, value in options.items():
        if name not in own:
            _check_known(name, own)
            take(name, value)
    given = {name: value for name, value in options.items() if name in own and value is not None}
    return {name: nearest(name, value) for name, value in given.items()}


def _check_known(name: str, own: Set[str]) -> None:
    if name in ENGINE_OPTIONS:
        return
    close = difflib.get_close_matches(name, own)
    hint = f"did you mean {' or '.join(close)}?" if close else f"known are {', '.join(sorted(own))}"
    raise TypeError(f"{name} is not an argument; {hint}")


def warn(message: str) -> None:
    """Warn of the line outside Quire that has led here."""
    frame, level = sys._getframe(1), 2  # noqa: SLF001 - Python 3.12 has skip_file_prefixes
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("quire."):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
