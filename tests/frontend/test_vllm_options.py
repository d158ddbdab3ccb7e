"""vLLM's options: each is one of Quire's own, holds, changes nothing with a warning, or is refused in words."""

from __future__ import annotations

import argparse
import contextlib
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import typer

from quire.frontend import AsyncEngineArgs, EngineArgs, FlexibleArgumentParser, SamplingParams
from quire.frontend.cli.app import app
from quire.frontend.cli.failures import exit_status
from quire.frontend.engine_args import reload_arguments
from quire.frontend.http.args import ServerArgs
from quire.frontend.request_params import PoolingParams, StructuredOutputsParams
from quire.frontend.sampling import validate
from quire.frontend.vllm.fields import POOLING_FIELDS, PROMPT_KEYS, REQUEST_OPTIONS, SAMPLING_FIELDS
from quire.frontend.vllm.flags import own_arguments
from quire.frontend.vllm.options import ALIASES, ENGINE_OPTIONS, ForeignOption, take
from quire.protocol.engine_options import ClientOptions
from quire.protocol.options import flag_of, options_of

# Fields of the arguments of an engine and of a server in vLLM 0.32.
_ENGINE_FIELDS = """
additional_config aggregate_engine_logging all2all_backend allow_deprecated_quantization
allowed_local_media_path allowed_media_domains async_scheduling attention_backend attention_config
aux_output_config block_size code_revision collect_detailed_traces compilation_config config_format convert
cp_kv_cache_interleave_size cpu_distributed_timeout_seconds cpu_offload_gb cpu_offload_params
cudagraph_capture_sizes cudagraph_metrics custom_histogram_buckets data_parallel_address data_parallel_backend
data_parallel_external_lb data_parallel_hybrid_lb data_parallel_multi_port_external_lb data_parallel_rank
data_parallel_rpc_port data_parallel_size data_parallel_size_local data_parallel_start_rank
dbo_decode_token_threshold dbo_prefill_token_threshold dcp_comm_backend dcp_kv_cache_interleave_size
dcp_q_replicate decode_context_parallel_size default_mm_loras device_ids diffusion_config disable_cascade_attn
disable_chunked_mm_input disable_custom_all_reduce disable_hybrid_kv_cache_manager disable_log_stats
disable_nccl_for_dp_synchronization disable_sliding_window distributed_executor_backend
distributed_timeout_seconds download_dir dp_sync_interval dtype ec_manager_config ec_transfer_config
elastic_ep_max_dp_size enable_batch_sharded_sampling enable_chunked_prefill enable_cumem_allocator enable_dbo
enable_elastic_ep enable_ep_weight_filter enable_eplb enable_expert_parallel enable_fault_tolerance
enable_flashinfer_autotune enable_hc_sp enable_layerwise_nvtx_tracing enable_logging_iteration_details
enable_lora enable_mamba_cache_stochastic_rounding enable_mamba_shared_prefix_checkpoint enable_mfu_metrics
enable_mixed_moe_lora_format enable_mm_embeds enable_mm_processor_stats enable_moe_shared_loras
enable_nccl_comm_suspend enable_prefix_caching enable_prompt_embeds enable_return_routed_experts
enable_shm_tensor_arena enable_sleep_mode enable_tower_connector_lora enable_trace_replay enforce_eager
engram_config eplb_config expert_placement_strategy fail_on_environ_validation fault_tolerance_config
fully_sharded_loras gdn_prefill_backend generation_config gpu_memory_utilization hf_config_path hf_overrides
hf_token ignore_patterns interleave_mm_strings io_processor_plugin ir_op_priority jit_monitor_mode
jit_monitor_verbose kda_decode_backend kda_prefill_backend kernel_config kv_cache_dtype
kv_cache_dtype_skip_layers kv_cache_memory_bytes kv_cache_metrics kv_cache_metrics_sample kv_events_config
kv_offloading_backend kv_offloading_size kv_sharing_fast_prefill kv_transfer_config language_model_only
limit_mm_per_prompt linear_backend load_format log_config_file log_level logging_config logits_processors
logprobs_mode long_prefill_token_threshold long_prefill_token_threshold_adaptive lora_dtype lora_target_modules
mamba_backend mamba_block_size mamba_cache_dtype mamba_cache_mode mamba_cache_philox_rounds mamba_config
mamba_ssm_cache_dtype mamba_ssu_algorithm master_addr master_port max_cpu_loras max_cudagraph_capture_size
max_logprobs max_lora_cls_labels max_lora_rank max_loras max_model_len max_num_active_seqs
max_num_batched_tokens max_num_queued_reqs max_num_queued_tokens max_num_scheduled_tokens max_num_seqs
max_parallel_loading_workers media_io_kwargs mm_device_do_normalize mm_encoder_attn_backend
mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_margin mm_encoder_fp8_scale_save_path
mm_encoder_only mm_encoder_tp_mode mm_hasher_algorithm mm_ipc_gpu_memory_gb mm_processor_cache_gb
mm_processor_cache_type mm_processor_device mm_processor_kwargs mm_shm_cache_max_object_size_mb mm_tensor_ipc
model model_class_overrides model_impl model_loader_extra_config model_weights moe_backend nnodes node_rank
num_gpu_blocks_override numa_bind numa_bind_cpus numa_bind_nodes offload_backend offload_group_size
offload_num_in_group offload_params offload_prefetch_step optimization_level otlp_traces_endpoint
override_generation_config per_request_spec_decode_metrics performance_mode pipeline_parallel_size pooler_config
prefill_context_parallel_size prefill_schedule_interval prefix_cache_retention_interval prefix_caching_hash_algo
prefix_match_unit profiler_config pt_load_map_location quantization quantization_config ray_workers_use_nsight
reasoning_config reasoning_parser reasoning_parser_plugin renderer_num_workers replayssm_buffer_len
return_sampling_mask revision runner safetensors_load_strategy safetensors_prefetch_block_size
safetensors_prefetch_num_threads scheduler_cls scheduler_reserve_full_isl scheduling_policy seed
served_model_name show_hidden_metrics_for_version shutdown_timeout skip_mm_profiling skip_tokenizer_init
sleep_mode_offload_cudagraph sleep_preserve_parameter_names sparse_indexer_topk_backend spec_method spec_model
spec_tokens specialize_active_lora speculative_config stream_interval structured_outputs_config
swa_bounded_replay tensor_parallel_size tokenizer tokenizer_mode tokenizer_revision tokens_only
trust_remote_code ubatch_size use_fp64_gumbel use_replayssm use_tqdm_on_load video_pruning_method
video_pruning_rate watermark watermark_config weight_transfer_config worker_cls worker_extension_cls
"""
_SERVER_FIELDS = """
allow_credentials allowed_headers allowed_methods allowed_origins anthropic_disabled_thinking_effort api_key
chat_template cohere_format cohere_is_reasoning_model data_parallel_supervisor_port
default_chat_template_kwargs disable_access_log_for_endpoints disable_fastapi_docs disable_uvicorn_access_log
dp_supervisor_probe_failure_threshold dp_supervisor_probe_interval_s dp_supervisor_probe_timeout_s
enable_auto_tool_choice enable_flash_late_interaction enable_force_include_usage enable_log_deltas
enable_log_outputs enable_offline_docs enable_per_request_metrics enable_prompt_tokens_details
enable_request_id_headers enable_scale_out enable_server_load_tracking enable_ssl_refresh
enable_tokenizer_info_endpoint exclude_tools_when_tool_choice_none fingerprint_mode fingerprint_value grpc_port
h11_max_header_count h11_max_incomplete_event_size host log_error_stack lora_modules max_log_len middleware port
response_role return_tokens_as_token_ids root_path sse_keep_alive_interval ssl_ca_certs ssl_cert_reqs
ssl_certfile ssl_ciphers ssl_keyfile tokens_only tool_call_parser tool_parser_plugin tool_server
tool_strict_level trust_request_chat_template trust_request_mm_kwargs uds uvicorn_log_level headless
api_server_count config grpc
"""
ENGINE_FIELDS, SERVER_FIELDS = _ENGINE_FIELDS.split(), _SERVER_FIELDS.split()

OWN = {"--model": True, "--dtype": True, "--block-size": True, "--max-model-len": True, "--stop": True}
OWN |= {"--enable-prefix-caching": False, "--no-enable-prefix-caching": False, "--quantization": True}
OWN |= {"--allowed-origins": True, "--served-model-name": True, "--lora-modules": True, "--enable-lora": False}
OWN |= {"--no-enable-lora": False, "--max-loras": True, "--gpu-memory-utilization": True}
OWN |= {"--kv-host-memory": True, "--device": True}


def test_every_field_is_known() -> None:
    own = options_of(EngineArgs).keys()
    assert [name for name in ENGINE_FIELDS if name not in own and name not in ENGINE_OPTIONS] == []
    server = own | options_of(ServerArgs).keys() | options_of(ClientOptions).keys()
    assert [name for name in SERVER_FIELDS if name not in server and name not in ENGINE_OPTIONS] == []
    assert {*ALIASES.values()} <= own | ENGINE_OPTIONS.keys()


def test_a_value_holds_or_changes_nothing_or_is_refused(demo_model: Path) -> None:
    for name, row in ENGINE_OPTIONS.items():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for value in (None, "", [], {}, *row.holds):
                EngineArgs.from_options(str(demo_model), {name: value})
        if row.is_refused:
            with pytest.raises(ValueError, match=f"^{name}='something else' is not supported: .*; leave it out$"):
                take(name, "something else")
        else:
            with pytest.warns(UserWarning, match=f"^{name}='something else' has no effect: .*[^.]$"):
                take(name, "something else")


@pytest.mark.parametrize("table", [REQUEST_OPTIONS, PROMPT_KEYS, SAMPLING_FIELDS, POOLING_FIELDS])
def test_what_comes_with_a_request_is_taken_alike(table: dict[str, ForeignOption]) -> None:
    for name, row in table.items():
        if row.is_refused:
            with pytest.raises(ValueError, match=f"^{name}=12345 is not supported: "):
                take(name, 12345, table)
        else:
            with pytest.warns(UserWarning, match=f"^{name}=12345 has no effect: "):
                take(name, 12345, table)


def test_a_warning_names_the_line_of_the_user(demo_model: Path) -> None:
    with pytest.warns(UserWarning, match="^swap_space=4 has no effect") as caught:
        EngineArgs(model=str(demo_model), swap_space=4)  # type: ignore[call-arg]
    assert [Path(each.filename).name for each in caught] == ["test_vllm_options.py"]


@pytest.mark.parametrize(
    ("name", "given", "used"),
    [("dtype", "half", "bfloat16"), ("dtype", "float16", "bfloat16"), ("block_size", 16, 32), ("block_size", 256, 128)],
)
def test_the_nearest_value_is_used(demo_model: Path, name: str, given: Any, used: Any) -> None:
    with pytest.warns(UserWarning, match=f"^{name}={given!r} is not available; {used!r}, the nearest, is used"):
        args = EngineArgs.from_options(str(demo_model), {name: given})
    assert getattr(args, name) == used


def test_adapters_in_memory_are_those_of_a_step(demo_model: Path) -> None:
    given = {"max_loras": 2, "max_cpu_loras": 16}
    words = "^max_cpu_loras=16 is not available; max_loras=16, the nearest, is used"
    with pytest.warns(UserWarning, match=words) as warned:
        assert EngineArgs.from_options(str(demo_model), given).max_loras == 16
    assert len(warned) == 1
    with pytest.warns(UserWarning, match=words):
        assert reload_arguments(given, drain=False, drain_timeout=1).settings == {"max_loras": 16}
    assert EngineArgs.from_options(str(demo_model), {"max_loras": 2, "max_cpu_loras": 2}).max_loras == 2
    with pytest.raises(ValueError, match="max_cpu_loras=1 is less than max_loras=2; give 2 or more"):
        EngineArgs.from_options(str(demo_model), {"max_loras": 2, "max_cpu_loras": 1})


def test_gib_of_offloaded_kv_are_host_memory_of_a_gpu(demo_model: Path) -> None:
    given: dict[str, Any] = {"kv_offloading_size": 1.5, "kv_offloading_backend": "native"}
    assert EngineArgs.from_options(str(demo_model), {**given, "device": "cuda"}).kv_host_memory == 3 << 29
    assert reload_arguments(given, drain=False, drain_timeout=1).settings == {"kv_host_memory": 3 << 29}
    with pytest.warns(UserWarning, match=r"^kv_offloading_size=1\.5 has no effect: there is no GPU; KV pages are in"):
        assert EngineArgs.from_options(str(demo_model), given).kv_host_memory is None
    with pytest.raises(ValueError, match="kv_offloading_size and kv_host_memory both size host memory for KV pages"):
        EngineArgs.from_options(str(demo_model), {**given, "device": "cuda", "kv_host_memory": "1GiB"})
    for size in ("much", -1, 1e300, float("nan")):
        words = re.escape(f"kv_offloading_size={size!r} is not supported: KV pages of a GPU")
        with pytest.raises(ValueError, match=words):
            EngineArgs.from_options(str(demo_model), {"kv_offloading_size": size, "device": "cuda"})
    with pytest.raises(ValueError, match=r"^kv_offloading_backend='lmcache' is not supported: .* only be 'native'"):
        EngineArgs.from_options(str(demo_model), {"kv_offloading_backend": "lmcache"})


def test_engine_args_are_made_as_those_of_vllm(demo_model: Path) -> None:
    assert AsyncEngineArgs is EngineArgs
    args: Any = EngineArgs
    made = args(model=str(demo_model), tensor_parallel_size=1, seed=None, max_model_len=64, enable_lora=False)
    assert made.given() == {"model": str(demo_model), "max_model_len": 64} or made.given() == {"max_model_len": 64}
    with pytest.raises(ValueError, match="tensor_parallel_size=2 is not supported: an engine is one process"):
        args(model=str(demo_model), tensor_parallel_size=2)
    with pytest.raises(TypeError, match="max_model_length is not an argument; did you mean max_model_len"):
        args(model=str(demo_model), max_model_length=2)


def test_a_script_gets_the_options_of_its_command_line(demo_model: Path) -> None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.add_argument("--max-tokens", type=int)
    parser.set_defaults(model=str(demo_model), runner="pooling")
    line = "--max_model_len=64 --block-size 32 --no-enable_prefix_caching --max-tokens 5 -tp 1 --hf-overrides"
    args = parser.parse_args([*line.split(), '{"a": 1}'])
    assert (args.max_model_len, args.tensor_parallel_size, args.runner, args.max_tokens) == (64, 1, "pooling", 5)
    assert args.threads is None
    made = EngineArgs.from_cli_args(args)
    assert (made.max_model_len, made.enable_prefix_caching, made.hf_overrides) == (64, False, '{"a": 1}')
    with pytest.raises(SystemExit):
        parser.parse_args(["--max-model-len", "zero"])


def test_the_part_of_a_gpu_has_no_effect_without_one(demo_model: Path) -> None:
    with pytest.warns(UserWarning, match=r"^gpu_memory_utilization=0\.5 has no effect: there is no GPU; kv_cache_"):
        made = EngineArgs.from_options(str(demo_model), {"gpu_memory_utilization": 0.5, "device": "cpu"})
    assert made.gpu_memory_utilization is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for device in ("cuda", "cuda:1", "auto"):
            made = EngineArgs.from_options(str(demo_model), {"gpu_memory_utilization": 0.5, "device": device})
            assert made.settings()["gpu_memory_utilization"] == 0.5
    for part in (0, 1.5, "half"):
        with pytest.raises(ValueError, match=f"^gpu_memory_utilization={part!r} is out of range; it must be a number"):
            EngineArgs.from_options(str(demo_model), {"gpu_memory_utilization": part, "device": "cuda"})


def test_every_option_is_an_argument_of_a_script(capsys: pytest.CaptureFixture[str]) -> None:
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    args = vars(parser.parse_args([]))
    assert args == dict.fromkeys([*options_of(EngineArgs), *ENGINE_OPTIONS])
    parser.print_help()
    assert "--max-model-len" in (shown := capsys.readouterr().out)
    assert "--swap-space" not in shown


@pytest.mark.parametrize(
    ("line", "own"),
    [
        ("--max_model_len 64 x", "--max-model-len 64 x"),
        ("--max_model_len=64", "--max-model-len=64"),
        ("--no-enable_prefix_caching", "--no-enable-prefix-caching"),
        ("-q int8", "--quantization int8"),
        ("--device_memory_utilization=0.8 tales", "--gpu-memory-utilization=0.8 tales"),
        ("-tp 1 tales", "tales"),
        ("--tensor-parallel-size=1", ""),
        ("--tensor_parallel_size 1 tales", "tales"),
        ("--device cpu tales", "--device cpu tales"),
        ("--no-enable-lora tales", "--no-enable-lora tales"),
        ("--lora-modules a=b c=d tales", "--lora-modules a=b --lora-modules c=d tales"),
        ("--lora_modules a=b tales", "--lora-modules a=b tales"),
        ("--lora-modules=a=b", "--lora-modules=a=b"),
        ('--lora-modules {"name":"a","path":"/b"} tales', "--lora-modules a=/b tales"),
        ("--lora-dtype auto", ""),
        ("--kv-offloading-size 2 --device cuda m", "--device cuda m --kv-host-memory=2147483648"),
        ("--kv_offloading_size=0.5 --device=auto", "--device=auto --kv-host-memory=536870912"),
        ("--kv-offloading-backend native m", "m"),
        ("--enable-chunked-prefill tales", "tales"),
        ("--generation-config auto", ""),
        ("--stop --enforce-eager x", "--stop --enforce-eager x"),
        ("-- --enforce-eager", "-- --enforce-eager"),
        ("--unknown_flag 3", "--unknown_flag 3"),
        ('--allowed-origins ["*","b"]', "--allowed-origins * --allowed-origins b"),
        ("--stop 007", "--stop 007"),
        ("m --served-model-name a b --stop x", "m --served-model-name a --served-model-name b --stop x"),
        ("--model m --served_model_name a b", "--model m --served-model-name a --served-model-name b"),
        ("--served-model-name a m", "--served-model-name a m"),
        ("m --served-model-name=a b", "m --served-model-name=a b"),
    ],
)
def test_flags_of_vllm_become_those_of_quire(line: str, own: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert own_arguments(line.split(), OWN) == own.split()


@pytest.mark.parametrize(
    ("line", "own", "warning"),
    [
        ("--swap-space 4 tales", "tales", "swap_space=4 has no effect"),
        ("--cpu_offload_gb=9", "", "cpu_offload_gb=9 has no effect"),
        ("--enforce-eager tales", "tales", "enforce_eager=True has no effect"),
        ("--no-enable-chunked-prefill", "", "enable_chunked_prefill=False has no effect"),
        ("-O3 tales", "tales", "optimization_level=3 has no effect"),
        ("-cc.mode 3 tales", "tales", r"compilation_config={'mode': 3} has no effect"),
        (
            "--cudagraph-capture-sizes 1 2 4 --model m",
            "--model m",
            r"cudagraph_capture_sizes=\[1, 2, 4\] has no effect",
        ),
        ("--dtype half", "--dtype bfloat16", "dtype='half' is not available"),
        ("--block-size=16", "--block-size=32", "block_size=16 is not available"),
        ("--kv-offloading-size 2 m", "m", "kv_offloading_size=2 has no effect: there is no GPU"),
        (
            "--max-cpu-loras 16 tales -- a",
            "tales --max-loras=16 -- a",
            "max_cpu_loras=16 is not available; max_loras=16,",
        ),
        ("--max-loras 2 --max-cpu-loras=3", "--max-loras 2 --max-loras=3", "max_cpu_loras=3 is not available"),
    ],
)
def test_flags_without_effect_are_dropped_with_a_warning(line: str, own: str, warning: str) -> None:
    with pytest.warns(UserWarning, match=warning):
        assert own_arguments(line.split(), OWN) == own.split()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("-tp 2", "tensor_parallel_size=2 is not supported: an engine is one process on one machine"),
        ("--max-cpu-loras 4 --max-loras 8", "max_cpu_loras=4 is less than max_loras=8; give 8 or more"),
        ("--device cuda --kv-offloading-size many", "kv_offloading_size='many' is not supported: KV pages of a GPU"),
        ("--device cuda --kv-offloading-size 1 --kv-host-memory 1GiB", "both size host memory for KV pages; give one"),
        ("--kv-offloading-backend lmcache", "kv_offloading_backend='lmcache' is not supported"),
        ("--max-cpu-loras many", "max_cpu_loras='many' is not supported: max_loras says"),
        ("--lora-dtype float16", "lora_dtype='float16' is not supported: an adapter is computed in the dtype"),
        ('--lora-modules {"name":"a"}', "missing required field `path`"),
        ("--generation-config vllm/x", "generation_config='vllm/x' is not supported"),
        ("--kv-transfer-config.role=x", "kv_transfer_config={'role': 'x'} is not supported: .*kv_peer"),
        ("--load-format", "--load-format needs a value"),
        ("--config file.yaml", "config='file.yaml' is not supported: give the options as flags"),
    ],
)
def test_flags_that_cannot_be_had_are_refused_as_in_python(line: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        own_arguments(line.split(), OWN)


def test_serve_refuses_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.BadParameter, match="tensor_parallel_size=2 is not supported") as raised:
        app(["serve", "--tensor_parallel_size=2"], prog_name="quire", standalone_mode=False)
    assert exit_status(raised.value) == 2
    assert "it can only be 1; leave it out; see quire serve --help" in capsys.readouterr().err


def test_every_flag_is_known_to_serve() -> None:
    """None is an unknown option, whatever becomes of it."""
    own = {row.flag: row.type is not bool for row in {**options_of(EngineArgs), **options_of(ServerArgs)}.values()}
    for name in {*ENGINE_FIELDS, *SERVER_FIELDS} - options_of(EngineArgs).keys() - options_of(ServerArgs).keys():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with contextlib.suppress(ValueError):  # in words, as the tests above show
                assert own_arguments([f"{flag_of(name)}=x"], own) == []


def test_parameters_take_the_fields_of_vllm() -> None:
    params: Any = SamplingParams
    made = params(temperature=0.5, skip_clone=False, flat_logprobs=False, output_kind="delta")
    checked = validate(made)
    assert checked.temperature == 0.5
    assert not hasattr(checked, "output_kind")
    with pytest.raises(ValueError, match="guided_decoding='x' is not supported: give structured_outputs"):
        params(guided_decoding="x")
    with pytest.warns(UserWarning, match="skip_reading_prefix_cache=True has no effect"):
        params(skip_reading_prefix_cache=True)
    pooling: Any = PoolingParams
    with pytest.raises(ValueError, match="softmax=True is not supported: give use_activation"):
        pooling(softmax=True)
    structured: Any = StructuredOutputsParams
    with pytest.raises(ValueError, match="structural_tag='x' is not supported: give json"):
        structured(structural_tag="x")
    assert validate(params(structured_outputs=structured(choice=["a"]))).structured_outputs is not None
