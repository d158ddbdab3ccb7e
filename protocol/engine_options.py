"""The options of an engine: of the model and the scheduler, of the engine's process, and of its clients.

Names are vLLM's wherever vLLM has one. `num_pages` is not called `num_gpu_blocks_override`: there is no profiled number
that it would override.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from quire.protocol.kv_events import parse_kv_events_config
from quire.protocol.options import MAX_INT32, MAX_INT64, Option, Range, check_options, parse_size
from quire.protocol.speculative_config import parse_speculative_config

if TYPE_CHECKING:
    from quire.protocol.keys import Security

DTYPES = ("auto", "bfloat16", "float32")
QUANTIZATIONS = ("int8", "int4", "gptq", "awq", "compressed-tensors", "gguf", "mxfp4")
KV_CACHE_DTYPES = ("auto", "int8")
BLOCK_SIZES = (32, 64, 128)
SCHEDULING_POLICIES = ("fcfs", "priority", "lpm", "sjf")
CONTENT_FORMATS = ("auto", "string", "openai")
TOOL_CALL_PARSERS = (
    "none", "hermes", "qwen3_coder", "llama3_json", "openai", "deepseek_v3", "deepseek_v31", "mistral", "granite",
    "phi4_mini_json", "cohere2", "glm4", "glm45", "seed_oss", "minimax_m2", "olmo3", "gemma4", "lfm2", "apertus",
    "nemotron_json", "hunyuan_a13b", "generic", "json_call",
)  # fmt: skip
REASONING_PARSERS = (
    "none", "think", "qwen3", "openai_gptoss", "deepseek_r1", "deepseek_v3", "mistral", "granite", "cohere2", "olmo3",
    "seed_oss", "ernie45", "hunyuan", "apertus", "gemma4",
)  # fmt: skip
STANDBYS = ("program", "model")
ROUTER_NAMES = ("round-robin", "least-loaded", "power-of-two", "sticky", "prefix-affinity")
MAX_ENGINES = 256
MAX_LORAS = 4096
MAX_LORA_RANK = 512
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")

SECONDS = Range(0, 10**9, closed=False)  # 30 years, which every clock can count
SECONDS_OR_ZERO = Range(0, 10**9)
MILLISECONDS_OR_ZERO = Range(0, 10**9)
COUNT = Range(1, MAX_INT32)
STEP_TOKENS = 1 << 20
SIZE_OR_ZERO = Range(0, MAX_INT64)
DEFAULT_DISK_SIZE = "16GiB"


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of the model and the scheduler. Raises `ValueError` for the first value that is not allowed.

    Model:
        model: Folder of a checkpoint (config.json, *.safetensors, tokenizer.json), a GGUF file, or a name at the
            Hugging Face hub, as Qwen/Qwen3-0.6B. Default: the demo model.
        dtype: Dtype of the model; auto: bfloat16 for 16-bit and quantized checkpoints, else float32.
        quantization: Quantize float weights: int8 (8.1 to 8.7 bits a weight; perplexity at most 0.5 percent
            or so above that of bfloat16) or int4 (4.9 to 6.7 bits; at most 3 percent on small models). gptq, awq,
            compressed-tensors, gguf and mxfp4 confirm that a checkpoint is such a one. Default: as in the
            checkpoint.
        max_model_len: Context length: tokens of a prompt and its answer. Default: the model's.
        device: Computes the model, with the same bits: cpu, cuda for one of NVIDIA's GPUs, or auto for a GPU where
            there is one, else cpu. Several engines of a server that are given cuda or auto take the GPUs in turn.
        fast_matmul: Multiply bfloat16 weights on a GPU's tensor cores, which add in an order of their own: tokens and
            log probabilities are no longer those of the CPU, and may depend on the kind of GPU, but still not on
            batches or chunks. KV pages are not shared with engines without it.
        threads: Threads that compute; with a GPU, those that load weights and write token masks. Default:
            QUIRE_THREADS, or one for every usable core.
        pin_threads: Bind each thread to a CPU of its own.
        memory_limit: Memory of the engine's process, as 16GiB: weights, KV pages and all else. KV pages take what is
            left of it; near it, new requests are rejected. The memory of a GPU does not count, but kv_host_memory does.
            Default: as planned, with KV pages by their own options.
        hf_overrides: JSON object of fields that replace those of config.json, as {"architectures": ["BertModel"]}.
            Default: none.
        cache_dir: Keep compiled kernels there. Default: quire in the user's cache folder.
        weight_cache: Keep packed weights there: later starts read them instead of packing.

    KV cache:
        kv_cache_dtype: Dtype of the KV cache; auto: the model's; int8: about half the bytes of bfloat16, perplexity
            within 0.1 percent.
        block_size: Tokens of a KV page.
        kv_cache_memory_bytes: Memory for KV pages, as 4GiB or 512MiB. Default: up to 4GiB or half of the free memory;
            on a GPU by gpu_memory_utilization.
        gpu_memory_utilization: Part of a GPU's memory that the engine takes for weights, buffers, adapters and KV pages
            of no chosen size; engines of one server that compute on the same GPU share it. Default: 0.9, or that of
            what is free where other programs use the GPU.
        num_pages: KV pages, in place of kv_cache_memory_bytes. Default: as the memory allows.
        enable_prefix_caching: Keep KV pages for requests that begin with the same tokens.
        kv_host_memory: Memory of the host for KV pages of a GPU, as 16GiB: a prefix that the GPU has evicted, or lost
            with a crash or a reload, is read from there where that is faster than computing it again. 0: none.
            Default: a quarter of what is free, at most four times the GPU's KV pages; on the CPU, whose KV pages are
            there anyway, none.
        kv_disk: Keep KV pages there too, also for later starts: a prefix is read from disk where that is faster than
            computing it again. One engine of a model may use a folder at a time.
        kv_disk_bytes: Space that the pages in kv_disk may take, as 64GiB. Default: 16GiB.
        kv_peer: Fetch KV pages from the engine at ipc://PATH or tcp://HOST:PORT too, which has the same model, number
            formats and context length, and takes this engine for an administrator.
        kv_events_config: Publish what the prefix cache gains and loses, for routers: JSON object with vLLM's fields, as
            {"enable_kv_cache_events": true, "endpoint": "ipc:///tmp/events"}. Default: none.

    Scheduling:
        max_num_seqs: Sequences that run at once.
        max_num_batched_tokens: Token budget of a step; that of an encoder is its context length at least.
        scheduling_policy: Order of waiting requests: fcfs (first come, first served), priority (lowest `priority`
            first), lpm (longest cached prefix first), sjf (fewest tokens to prefill first).
        target_itl: Milliseconds that a step with prompts may take in any case. Where decoding alone takes longer than
            some half of that, prompts may make steps 1.7 times as long, or up to 4 times while many wait. 0: only that.
        long_prefill_token_threshold: Tokens of one prompt in a step, whatever its time; 0: as target_itl allows.
        max_waiting_requests: Most waiting requests; more are rejected.
        max_waiting_tokens: Most prompt tokens of waiting requests; more are rejected.
        max_waiting_requests_per_client: Most waiting requests of one client, or of one API key of an HTTP server, or
            one connection if it has no keys; more are rejected. Default: all that may wait, as long as no other client
            needs its share of them.

    Speculative decoding:
        speculative_config: Draft tokens and compute them beside the next one, which changes no token: JSON object with
            vLLM's fields, as {"method": "ngram"}. Methods: ngram (the request's own text), suffix (also earlier
            answers), draft_model (`model` is a smaller one), eagle and eagle3 (`model` is a head), mtp (the head for
            multi-token prediction in the model's own files). Default: none.

    LoRA adapters:
        enable_lora: Compute requests by LoRA adapters that they name; implied by lora_modules.
        lora_modules: Adapters that requests may name, each as NAME=FOLDER, in PEFT's format or a GGUF file.
        max_loras: Adapters that are in memory at a time. Requests of others wait for them to be read.
        max_lora_rank: Largest rank of an adapter.
        allow_runtime_lora: Let requests name adapters in any folder.

    Structured outputs:
        grammar_timeout: Seconds of CPU time that compiling the grammar of a request may take.
        preload_grammars: Prepare the tokenizer for grammars at the start. Otherwise the first request with
            structured_outputs or bad_words pauses all others meanwhile, a second with a large vocabulary. Default: yes
            for the HTTP server, else no.
    """

    model: Annotated[str, Option("MODEL")]
    dtype: Annotated[str, Option("TYPE", choices=DTYPES)] = "auto"
    quantization: Annotated[str | None, Option("MODE", choices=QUANTIZATIONS)] = None
    max_model_len: Annotated[int | None, Option("TOKENS", COUNT)] = None
    device: Annotated[str, Option("DEVICE")] = "cpu"
    fast_matmul: Annotated[bool, Option()] = False
    threads: Annotated[int | None, Option("N", Range(1, 1024))] = None
    pin_threads: Annotated[bool, Option()] = False
    memory_limit: Annotated[int | str | None, Option("SIZE")] = None
    hf_overrides: Annotated[str | None, Option("JSON")] = None
    cache_dir: Annotated[str | None, Option("FOLDER")] = None
    weight_cache: Annotated[str | None, Option("FOLDER")] = None
    kv_cache_dtype: Annotated[str, Option("TYPE", choices=KV_CACHE_DTYPES)] = "auto"
    block_size: Annotated[int, Option("TOKENS", choices=BLOCK_SIZES)] = 32
    kv_cache_memory_bytes: Annotated[int | str | None, Option("SIZE")] = None
    gpu_memory_utilization: Annotated[float | None, Option("PART", Range(0, 1, closed=False))] = None
    num_pages: Annotated[int | None, Option("N", COUNT)] = None
    enable_prefix_caching: Annotated[bool, Option()] = True
    kv_host_memory: Annotated[int | str | None, Option("SIZE", SIZE_OR_ZERO)] = None
    kv_disk: Annotated[str | None, Option("FOLDER")] = None
    kv_disk_bytes: Annotated[int | str | None, Option("SIZE")] = None
    kv_peer: Annotated[str | None, Option("ADDRESS")] = None
    kv_events_config: Annotated[str | None, Option("JSON")] = None
    max_num_seqs: Annotated[int, Option("N", Range(1, 1 << 16))] = 256
    max_num_batched_tokens: Annotated[int, Option("TOKENS", Range(1, STEP_TOKENS))] = 2048
    scheduling_policy: Annotated[str, Option("NAME", choices=SCHEDULING_POLICIES)] = "fcfs"
    target_itl: Annotated[float, Option("MS", MILLISECONDS_OR_ZERO)] = 25.0
    long_prefill_token_threshold: Annotated[int, Option("TOKENS", Range(0, STEP_TOKENS))] = 0
    max_waiting_requests: Annotated[int, Option("N", COUNT)] = 4096
    max_waiting_tokens: Annotated[int, Option("TOKENS", COUNT)] = 1 << 24
    max_waiting_requests_per_client: Annotated[int | None, Option("N", COUNT)] = None
    speculative_config: Annotated[str | None, Option("JSON")] = None
    enable_lora: Annotated[bool, Option()] = False
    lora_modules: Annotated[tuple[str, ...], Option("NAME=FOLDER")] = ()
    max_loras: Annotated[int, Option("N", Range(1, MAX_LORAS))] = 8
    max_lora_rank: Annotated[int, Option("N", Range(1, MAX_LORA_RANK))] = 64
    allow_runtime_lora: Annotated[bool, Option()] = False
    grammar_timeout: Annotated[float, Option("S", SECONDS)] = 10.0
    preload_grammars: Annotated[bool, Option()] = False

    @property
    def serves_adapters(self) -> bool:
        """True if requests may name LoRA adapters."""
        return self.enable_lora or bool(self.lora_modules)

    @property
    def adapter_folders(self) -> dict[str, str]:
        """The folder of each adapter by its name."""
        return dict(module.split("=", 1) for module in self.lora_modules)

    def __post_init__(self) -> None:
        check_options(self)
        for module in self.lora_modules:
            name, _, folder = module.partition("=")
            if not name or not folder:
                raise ValueError(f"lora_modules={module!r} is no NAME=FOLDER, as stories=/models/stories-lora")
        names = [module.partition("=")[0] for module in self.lora_modules]
        if twice := [name for name in self.adapter_folders if names.count(name) > 1]:
            raise ValueError(f"lora_modules has the name {twice[0]!r:.100} twice; give each adapter one of its own")
        if self.allow_runtime_lora and not self.serves_adapters:
            raise ValueError("allow_runtime_lora is given without enable_lora")
        if self.kv_cache_memory_bytes is not None and self.num_pages is not None:
            raise ValueError("kv_cache_memory_bytes and num_pages both size the KV cache; give one of them")
        if self.kv_disk is not None and not self.enable_prefix_caching:
            raise ValueError("kv_disk keeps pages of the prefix cache, and enable_prefix_caching=False turns that off")
        if parse_size(str(self.kv_host_memory or 0)) and not self.enable_prefix_caching:
            raise ValueError(
                "kv_host_memory keeps pages of the prefix cache, and enable_prefix_caching=False turns that off"
            )
        if self.kv_peer is not None and not self.enable_prefix_caching:
            raise ValueError("kv_peer fills the prefix cache, and enable_prefix_caching=False turns that off")
        publishes = self.kv_events_config is not None and parse_kv_events_config(self.kv_events_config).is_enabled
        if publishes and not self.enable_prefix_caching:
            raise ValueError(
                "kv_events_config tells of the prefix cache, and enable_prefix_caching=False turns that off"
            )
        if self.speculative_config is not None:
            parse_speculative_config(self.speculative_config)
        if self.kv_disk_bytes is not None and self.kv_disk is None:
            raise ValueError("kv_disk_bytes is given without kv_disk, the folder that it bounds")


@dataclass(frozen=True, kw_only=True)
class HubOptions:
    """Options of a model that is given by its name at the Hugging Face hub.

    Hugging Face hub:
        revision: Branch, tag or commit of the model. Default: main.
        download_dir: Keep downloaded models there. Default: the cache of the hub (HF_HUB_CACHE, HF_HOME).
    """

    revision: Annotated[str | None, Option("NAME")] = None
    download_dir: Annotated[str | None, Option("FOLDER")] = None


@dataclass(frozen=True, kw_only=True)
class SocketOptions:
    """Options of a socket, an engine's or a client's.

    Socket:
        curve_keys: CURVE keys for tcp://, as `quire keys` makes them.
        insecure_tcp: Allow tcp:// without keys, for anyone who reaches the port.
    """

    curve_keys: Annotated[str | None, Option("FOLDER")] = None
    insecure_tcp: Annotated[bool, Option()] = False

    @property
    def security(self) -> Security:
        """Security of a socket. Raises KeyFileError if both options are given."""
        from quire.protocol.keys import Security

        return Security(None if self.curve_keys is None else Path(self.curve_keys), self.insecure_tcp)


@dataclass(frozen=True, kw_only=True)
class EngineProcessOptions(SocketOptions, EngineOptions):
    """Options of an engine process, `python -m quire.engine_core` or `quire engine`.

    Socket:
        engine_address: Listen at ipc://PATH or tcp://HOST:PORT. Default: a socket in a fresh private folder.
        max_clients: Clients that may be attached at once; more are rejected.

    Engine process:
        seed: Seed of the seeds that requests without one are given.
        shutdown_timeout: Seconds that open requests get to end at SIGTERM; new ones are rejected, or wait for the next
            engine if there is a supervisor that was not told to end.
        heartbeat_seconds: Seconds between heartbeats.
        log_level: Least level of messages on stderr.
        die_with_parent: Be killed when this process is gone, or once clients can connect end without a word to them; 0:
            the one that started the engine. Default: no process.
        kv_memory_fd: Inherited file descriptor of a memfd to hold the KV pages, or those of kv_host_memory. The next
            engine that is given it takes over the pages of this one. Default: the pages end with the engine.
        weights_fd: Inherited file descriptor of a memfd (MFD_ALLOW_SEALING) to hold the packed weights. The first
            engine that is given it packs them; all others, also later ones, find them there. Default: each engine packs
            its own.
        crash_journal_fd: Inherited file descriptor of a memfd that tells the next engine under which requests this one
            has died: one under which engines die again and again is tried alone, and fails. Default: no memory of it.
        machine_share: Use the I-th of N equal shares of the cores, by NUMA node, and of the memory for KV pages. With
            threads, only of the memory where there are fewer cores.
        standby: Load the program only, or the model too, and go on when a line comes on stdin; end with its end.
        beat_seconds: Write a sign of life to stdout each time these seconds have passed, and talk to the supervisor on
            stdin and stdout. Default: no supervisor.
    """

    engine_address: Annotated[str | None, Option("ADDRESS")] = None
    max_clients: Annotated[int, Option("N", Range(1, 1 << 16))] = 1024
    seed: Annotated[int, Option("N", Range(0, MAX_INT64))] = 0
    shutdown_timeout: Annotated[float, Option("S", SECONDS_OR_ZERO)] = 30.0
    heartbeat_seconds: Annotated[float, Option("S", SECONDS)] = 1.0
    log_level: Annotated[str, Option("LEVEL", choices=LOG_LEVELS)] = "warning"
    die_with_parent: Annotated[int | None, Option("PID", Range(0, MAX_INT32))] = None
    kv_memory_fd: Annotated[int | None, Option("FD", Range(0, MAX_INT32))] = None
    weights_fd: Annotated[int | None, Option("FD", Range(0, MAX_INT32))] = None
    crash_journal_fd: Annotated[int | None, Option("FD", Range(0, MAX_INT32))] = None
    machine_share: Annotated[str | None, Option("I/N")] = None
    standby: Annotated[str | None, Option("WHAT", choices=STANDBYS)] = None
    beat_seconds: Annotated[float | None, Option("S", SECONDS)] = None


@dataclass(frozen=True, kw_only=True)
class SupervisionOptions:
    """Options of the supervisor of an engine, which is the process that starts it.

    Supervision:
        data_parallel_size: Start so many engines, each on its share of the cores, with its own KV cache and one copy of
            the weights for all. Requests are routed among them, see router.
        max_restarts: Start an engine that died or hung again, this many times if each dies soon; requests go on where
            they were. Deaths that a request has caused do not count. 0: end with the engine.
        step_timeout: Seconds without the end of a step, while there are requests, after which the engine counts as
            hung; 0: never. One that gives no sign of life is ended after as long, but 10 at most and 2 at least.
    """

    data_parallel_size: Annotated[int, Option("N", Range(1, MAX_ENGINES))] = 1
    max_restarts: Annotated[int, Option("N", Range(0, MAX_INT32))] = 10
    step_timeout: Annotated[float, Option("S", SECONDS_OR_ZERO)] = 300.0


@dataclass(frozen=True, kw_only=True)
class ClientOptions(SocketOptions):
    """Options of a client. Unlike an engine's they can also be set for an engine that is running already.

    A running engine:
        engine_address: Attach to the engine at ipc://PATH or tcp://HOST:PORT instead of starting one. Options of the
            model and the scheduler were set when that engine was started, and are rejected. Default: start an engine.
        engine: Let the running engine at ipc://PATH or tcp://HOST:PORT share the requests. Engines are started beside
            such ones only if data_parallel_size is 2 or more.
        router: How requests are routed among several engines: in turns, to the one with the fewest requests
            (least-loaded), to the one with fewer of two random ones (power-of-two), to the one that has answered in the
            same session (sticky), or to where an answer is likely to end first, since the engine has the beginning of
            the prompt in its prefix cache or little to do (prefix-affinity). Default: prefix-affinity where engines let
            this client see their caches, else least-loaded.
        fetch_prefixes: Let engines of prefix-affinity fetch the beginning of a prompt from one another where that takes
            less time than computing it.
        start_timeout: Seconds after which an engine that is not ready or does not answer is given up.
        reconnect_timeout: Seconds that requests wait for a running engine to come back when the connection is lost.
        prefill_address: Have prompts computed by the running engine at ipc://PATH or tcp://HOST:PORT, from which the
            one that answers fetches their KV. Several engines share the prompts. Default: none.
        prefill_min_tokens: Least tokens of a prompt that is computed there.
        tokenizer: Folder of the tokenizer. Default: the model's.
        skip_tokenizer_init: Use no tokenizer: prompts and answers are token ids.
        seed: Seed of the seeds that requests without one are given. Default: a fresh one.

    Chat:
        chat_template: File of the chat template (Jinja) of conversations, or its text. Default: the model's.
        chat_template_content_format: Form in which the chat template takes the contents of messages: texts (string), or
            lists of text parts (openai). Default: as it shows.
        tool_call_parser: Format of the model's tool calls. Default: as its chat template shows.
        reasoning_parser: Format of the model's thoughts. Default: as its chat template shows.
    """

    engine_address: Annotated[str | None, Option("ADDRESS")] = None
    engine: Annotated[tuple[str, ...], Option("ADDRESS")] = ()
    router: Annotated[str | None, Option("NAME", choices=ROUTER_NAMES)] = None
    fetch_prefixes: Annotated[bool, Option()] = True
    start_timeout: Annotated[float, Option("S", SECONDS)] = 600.0
    reconnect_timeout: Annotated[float, Option("S", SECONDS_OR_ZERO)] = 60.0
    prefill_address: Annotated[tuple[str, ...], Option("ADDRESS")] = ()
    prefill_min_tokens: Annotated[int, Option("TOKENS", COUNT)] = 512
    tokenizer: Annotated[str | None, Option("FOLDER")] = None
    skip_tokenizer_init: Annotated[bool, Option()] = False
    seed: Annotated[int | None, Option("N", Range(0, MAX_INT64))] = None
    chat_template: Annotated[str | None, Option("FILE")] = None
    chat_template_content_format: Annotated[str, Option("NAME", choices=CONTENT_FORMATS)] = "auto"
    tool_call_parser: Annotated[str | None, Option("NAME", choices=TOOL_CALL_PARSERS)] = None
    reasoning_parser: Annotated[str | None, Option("NAME", choices=REASONING_PARSERS)] = None
