"""Every attribute of the graph of operations is carried out in every number format, or rejected by its lowering."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import emulated_gpu
import numpy as np
import pytest
import soft_tiles
from graph_reference import (
    F64,
    HIDDEN,
    INNER,
    POSITIONS,
    GraphReference,
    MemoryCheckpoint,
    attention,
    branches,
    delta_net,
    experts,
    feed_forward,
    graph,
    latent_attention,
    random_tensors,
    rotary,
    short_convolution,
    state_space,
    with_experts,
    with_per_layer_inputs,
    with_streams,
)
from kernel_calls import context_of

from quire.kernels import runner
from quire.kernels._native import SamplingConfig
from quire.kernels.activations import ClampedSwiglu, ScaledActivation, Xielu
from quire.kernels.attention_heads import Heads, LatentHeads, StateHeads
from quire.kernels.config import ModelConfig
from quire.kernels.devices.instruction_sets import available_isas
from quire.kernels.emit.context import EmitContext
from quire.kernels.emit.dots import CUDA
from quire.kernels.emit.layout import Dtypes
from quire.kernels.errors import ModelError
from quire.kernels.graph.operations import (
    Experts,
    Features,
    FeedForward,
    Graph,
    HeadNorms,
    Laurel,
    Linear,
    Norm,
    Parallel,
    PerLayerInputs,
    Residual,
)
from quire.kernels.lowering.model import lower
from quire.kernels.operands import Buffer, PlanLimits
from quire.kernels.options import LoadOptions, choose_device
from quire.kernels.rope import QueryScale
from quire.kernels.weights.quantization import choose_quantization

BF16, F32 = ("bf16", "bf16", "f32"), ("f32", "f32", "f32")
FORMATS: dict[str, tuple[tuple[str, str, str], bool, str | None, float]] = {  # dtypes, int8 KV, mode, mean error
    "float32": (F32, False, None, 5e-6),
    "bfloat16": (BF16, False, None, 0.02),
    "int8-kv": (F32, True, None, 0.03),
    "bfloat16-int8-kv": (BF16, True, None, 0.04),
    "int8": (BF16, False, "int8", 0.06),
    "int4": (BF16, False, "int4", 0.5),
}


def log_probabilities(
    model: Graph,
    form: str,
    tokens: list[int],
    *,
    threads: int = 2,
    isa: str | None = None,
    device: str = "cpu",
    chunk: int = 64,
    alone_from: int | None = None,
) -> F64:
    """Return the log probability of every token but the first, as the native runner computes it.

    Tokens from number `alone_from` on are computed one at a time.
    """
    dtypes, quantized_kv, mode, _ = FORMATS[form]
    options = LoadOptions("", num_pages=POSITIONS // 32, threads=threads, isa=isa, device=device)
    capabilities = choose_device(options).capabilities
    if isa is not None and dtypes == BF16:
        dtypes = ("bf16", "bf16", capabilities.bf16_activations)
    checkpoint = MemoryCheckpoint(random_tensors(model))
    quantization = choose_quantization(mode, checkpoint, ModelConfig({}))
    limits = PlanLimits(64, POSITIONS, 32)
    plan = lower(model, EmitContext(capabilities, Dtypes(*dtypes, quantized_kv)), limits, quantization)
    assembly = runner.assemble(plan, options)
    assembly.open_kv()
    native = assembly.native
    slot = native.sequences.open(tokens, len(tokens), sampling=SamplingConfig(temperature=0.0, prompt_logprobs=0))
    assert native.sequences.reserve(slot, len(tokens) + 1)
    values: list[float] = []
    end = len(tokens) if alone_from is None else alone_from
    chunks = [(start, min(chunk, end - start)) for start in range(0, end, chunk)]
    for start, count in chunks + [(start, 1) for start in range(end, len(tokens))]:
        result = native.step([slot], [start], [count])
        values += [entry[1][0] for entry in result.prompt_logprobs.get(0, ())]
    return np.array(values)


def random_tokens(length: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(length).integers(0, 112, length)]


def latent_graph(**attributes: Any) -> Graph:
    """Return a graph of latent attention with other attributes in its first layer."""
    return graph(replace(latent_attention(0), **attributes), latent_attention(1))


NORMS = HeadNorms("norm_q", "norm_k", 1e-6, weight_offset=1.0)
PLAIN = FeedForward(Linear("plain.up", INNER, "plain.up_b"), Linear("plain.down", HIDDEN, "plain.down_b"), "silu")
FUSED = replace(
    feed_forward(0), gate=Linear("fused", INNER, first=0, tensor_outputs=2 * INNER),
    up=Linear("fused", INNER, first=INNER, tensor_outputs=2 * INNER),
)  # fmt: skip
XIELU = Xielu("alpha_p", "alpha_n", "beta", "epsilon")
CURVED = replace(PLAIN, activation=XIELU)
LATE = replace(NORMS, after_rotation=True)
GROWING = QueryScale(beta=0.8, length=8)
JOINT = replace(NORMS, query="joint_q", key="joint_k", joint=True)
INTERLEAVED = rotary(16, interleaved=True)
SPANNED = rotary(16, theta=100.0, span=32)
VALUES = replace(NORMS, values=True)
CENTERED = Norm("centered", 1e-5, "centered_b", center=True)
GATES = Linear("gates_low", 64), Linear("gates_high", 64)
SCALED = replace(feed_forward(0), activation=ScaledActivation("silu", 0.4))
SQUARED = replace(PLAIN, activation="relu2")
SCALED_TAPS = replace(state_space(0).convolution, scales=((64, 0.5), (64, 1.5), (64, 2.0)))
BRANCHES = Residual(branches(0, feed_forward(2), feed_forward(3)), None, Norm("after_branches", 1e-5), scalar="scalar")
BASE = graph()
LAUREL = Laurel(Linear("laurel_left", 48), Linear("laurel_right", HIDDEN), Norm("laurel_norm", 1e-5), 0.6)
CUT_OFF = replace(feed_forward(0), cutoff=0.4)


def with_first(model: Graph, **changes: Any) -> Graph:
    """Return a graph whose first residual block has other attributes."""
    return replace(model, residuals=(replace(model.residuals[0], **changes), *model.residuals[1:]))


def with_short_table(model: Graph) -> Graph:
    """Return a graph whose per-layer inputs have rows for some of the tokens only."""
    inputs = model.per_layer_inputs
    assert isinstance(inputs, PerLayerInputs)
    table = replace(inputs.embedding, weight="short_table", vocab_size=80, first_for_others=True)
    return replace(model, per_layer_inputs=replace(inputs, embedding=table))


SCALED_PARALLEL = Residual(Parallel((attention(0), feed_forward(0)), (0.4, 1.6)), BASE.residuals[0].before)
PARALLEL = Residual(Parallel((attention(0), feed_forward(0))), BASE.residuals[0].before)
GRAPHS: dict[str, Graph] = {
    "base": BASE,
    "embedding-scale": graph(embedding={"scale": 3.0}),
    "learned-positions": graph(embedding={"positions": "positions", "num_positions": POSITIONS}),
    "weight-offset": graph(offset=1.0),
    "layer-norm": graph(residual={"before": CENTERED}),
    "norm-after": graph(residual={"after": "norm"}),
    "norm-only-after": graph(residual={"before": None, "after": "norm"}),
    "multiplier": graph(residual={"multiplier": 0.3}),
    "multiplier-after-norm": graph(residual={"after": "norm", "multiplier": 0.3}),
    "logits-scale": graph(logits={"scale": 0.25}),
    "logits-softcap": graph(logits={"softcap": 1.5, "scale": 0.5}),
    "attention-scale": graph(attention(0), attention(1, scale=0.5)),
    "attention-softcap": graph(attention(0), attention(1, softcap=0.5)),
    "sinks": graph(attention(0, sinks="sinks_0"), attention(1, sinks="sinks_1")),
    "window": graph(attention(0, window=7), attention(1)),
    "partial-rotary": graph(attention(0, rotary=rotary(16)), attention(1, rotary=rotary(16))),
    "rotary-by-layer": graph(attention(0, rotary=rotary(theta=100.0)), attention(1)),
    "no-rotary-in-a-layer": graph(attention(0, rotary=None), attention(1)),
    "head-norms": graph(attention(0, head_norms=NORMS), attention(1, head_norms=NORMS)),
    "joint-head-norms": graph(attention(0, head_norms=JOINT), attention(1, head_norms=JOINT)),
    "interleaved-rotary": graph(attention(0, rotary=INTERLEAVED), attention(1, rotary=INTERLEAVED)),
    "parallel": replace(BASE, residuals=(PARALLEL, *BASE.residuals[2:])),
    "parallel-after-norm": replace(BASE, residuals=(replace(PARALLEL, after=CENTERED), *BASE.residuals[2:])),
    "fused-feed-forward": replace(BASE, residuals=(BASE.residuals[0], replace(BASE.residuals[1], block=FUSED))),
    "heads-by-layer": graph(attention(0, query=8), attention(1, query=2)),
    "head-norms-after-rotation": graph(attention(0, head_norms=LATE), attention(1, head_norms=LATE)),
    "query-scale": graph(attention(0, query_scale=GROWING), attention(1, rotary=None, query_scale=GROWING)),
    "xielu": replace(BASE, residuals=(BASE.residuals[0], replace(BASE.residuals[1], block=CURVED))),
    "kv-heads-by-layer": graph(attention(0, kv=1, dim=48), attention(1)),
    "latent-in-a-layer": graph(latent_attention(0), attention(1)),
    "keys-as-values": graph(attention(0, keys_as_values=True), attention(1)),
    "value-norm": graph(attention(0, head_norms=VALUES), attention(1)),
    "kv-source": graph(attention(0), attention(1, kv_source=0)),
    "kv-source-norms": graph(
        attention(0, head_norms=NORMS, kv=1, dim=48), attention(1, kv=1, dim=48, head_norms=NORMS, kv_source=0)
    ),
    "keys-as-values-norms": graph(attention(0, head_norms=VALUES, keys_as_values=True), attention(1)),
    "rotary-span": graph(attention(0, rotary=SPANNED), attention(1, rotary=SPANNED)),
    "per-layer-inputs": with_per_layer_inputs(BASE),
    "per-layer-inputs-of-some-tokens": with_short_table(with_per_layer_inputs(BASE)),
    "laurel": with_first(BASE, laurel=LAUREL),
    "laurel-norm-after": with_first(graph(residual={"after": "norm"}), laurel=LAUREL),
    "gate-cutoff": replace(BASE, residuals=(BASE.residuals[0], replace(BASE.residuals[1], block=CUT_OFF))),
    "streams": with_streams(BASE),
    "streams-two": with_streams(BASE, 2, scaled=False),
    "branches": replace(BASE, residuals=(BASE.residuals[0], BRANCHES, *BASE.residuals[2:])),
    "plain-feed-forward": replace(BASE, residuals=(BASE.residuals[0], replace(BASE.residuals[1], block=PLAIN))),
    "scaled-activation": replace(BASE, residuals=(BASE.residuals[0], replace(BASE.residuals[1], block=SCALED))),
    "squared-relu": replace(BASE, residuals=(BASE.residuals[0], replace(BASE.residuals[1], block=SQUARED))),
    "gates": graph(attention(0, gates=GATES), attention(1)),
    "parallel-scales": replace(BASE, residuals=(SCALED_PARALLEL, *BASE.residuals[2:])),
}
GRAPHS |= {
    "short-convolution": graph(short_convolution(0), attention(1)),
    "short-convolution-bias": graph(short_convolution(0, 4, bias="taps_b", activation="silu"), attention(1)),
    "delta-net": graph(delta_net(0), attention(1)),
    "delta-net-groups": graph(delta_net(0, StateHeads(3, 6, 16, 48), group=2), attention(1)),
    "delta-net-interleaved": graph(delta_net(0, StateHeads(2, 6, 32, 16, interleaved=True)), attention(1)),
    "state-space": graph(state_space(0), attention(1)),
    "state-space-groups": graph(state_space(0, norm_groups=2, gate_first=False, least=0.1, most=1.0), attention(1)),
    "state-space-scales": graph(
        state_space(0, norm=False, gate_scale=0.6, time_scale=1.7, convolution=SCALED_TAPS), attention(1)
    ),
    "state-space-beside-attention": replace(
        BASE,
        residuals=(Residual(Parallel((state_space(0), attention(0))), BASE.residuals[0].before), *BASE.residuals[1:]),
    ),
}
SWIGLU = ClampedSwiglu(limit=1.5, gain=1.702)
ROUTER_NORM = Norm("router_norm", 1e-5)
ROUTINGS: dict[str, dict[str, Any]] = {
    "experts": {},
    "experts-many": {"count": 40, "top_k": 5, "inner": 32},
    "experts-all": {"count": 16, "top_k": 16, "normalize": True},
    "experts-normalized": {"top_k": 3, "normalize": True, "scale": 1.7},
    "experts-biases": {"bias": True, "activation": SWIGLU, "normalize": True},
    "experts-without-gates": {"gated": False, "activation": "relu2", "shared": "plain"},
    "experts-shared": {"shared": "plain"},
    "experts-latent": {"latent": 48, "shared": "plain", "gated": False, "activation": "relu2"},
    "experts-latent-biases": {"latent": 112, "count": 20, "top_k": 4, "bias": True},
    "experts-shared-gate": {"shared": "gated", "inner": 96},
    "experts-sigmoid": {"scoring": "sigmoid", "correction": "correction_6", "normalize": True, "scale": 1.3},
    "experts-corrected-softmax": {"correction": "correction_6", "normalize": True, "least_sum": 0.5},
    "experts-scales": {"top_k": 3, "normalize": True, "expert_scales": "expert_scales"},
    "experts-router-norm": {"norm": ROUTER_NORM, "output_scale": 0.4},
    "experts-groups": {"count": 12, "top_k": 3, "groups": 4, "top_groups": 2},
    "experts-groups-of-two": {
        "count": 40, "top_k": 3, "groups": 5, "top_groups": 2, "group_score": "top2", "scoring": "sigmoid",
        "correction": "correction_40", "normalize": True,
    },
}  # fmt: skip
EXPERTS = {
    name: with_experts(BASE, *(experts(layer, **attributes) for layer in range(2)))
    for name, attributes in ROUTINGS.items()
}
GRAPHS |= EXPERTS
GRAPHS["experts-latent-norm-after"] = with_experts(
    graph(residual={"after": "norm", "multiplier": 0.6}), experts(0, latent=48), experts(1, latent=32, shared="plain")
)
GRAPHS["experts-norm-after"] = with_experts(
    graph(residual={"after": "norm", "multiplier": 0.6}), experts(0, shared="plain"), experts(1, shared="gated")
)
GRAPHS |= {
    "latent-attention": graph(latent_attention(0), latent_attention(1)),
    "latent-attention-scale": graph(latent_attention(0), latent_attention(1, scale=0.25)),
    "latent-attention-compressed": graph(latent_attention(0, compressed=48), latent_attention(1, compressed=80)),
    "latent-attention-interleaved": graph(
        latent_attention(0, rope=rotary(interleaved=True)), latent_attention(1, rope=rotary(interleaved=True))
    ),
}
LATENT = graph(latent_attention(0, query=8, compressed=80), latent_attention(1, query=80))
FEW_LATENTS = graph(latent_attention(0, query=8, compressed=80), latent_attention(1, query=20))
EVERYTHING = graph(
    attention(0, query=8, rotary=rotary(16), head_norms=NORMS, softcap=4.0, sinks="sinks_0", scale=0.3),
    attention(1, rotary=None, window=300, sinks="sinks_1"),
    embedding={"scale": 3.0}, residual={"after": "norm", "multiplier": 0.7}, logits={"scale": 0.5, "softcap": 5.0},
    offset=1.0,
)  # fmt: skip


def with_latents(latent: int = 32, shared: str = "", **changes: Any) -> Graph:
    """Return a graph whose experts read latents."""
    return with_experts(BASE, replace(experts(0, latent=latent, shared=shared), **changes), experts(1))


def cut_off_experts() -> Experts:
    """Return experts whose small gates become 0."""
    block = experts(0)
    return replace(block, experts=tuple(replace(expert, cutoff=0.4) for expert in block.experts))


MIXTURES = with_experts(
    BASE,
    experts(0, count=40, top_k=5, shared="gated", bias=True, activation=SWIGLU),
    experts(1, count=12, top_k=3, groups=4, top_groups=2, shared="plain", normalize=True, latent=48),
)
STATES = graph(delta_net(0, StateHeads(2, 4, 32, 48)), state_space(1, StateHeads(2, 6, 48, 32)))
STATES = replace(STATES, residuals=(*STATES.residuals, *graph(short_convolution(0), attention(1)).residuals))
GEMMA4 = with_per_layer_inputs(
    graph(
        attention(0, query=8, kv=1, dim=48, head_norms=VALUES, keys_as_values=True, rotary=rotary(16, span=48)),
        attention(1, query=4, kv=1, dim=48, head_norms=VALUES, kv_source=0, window=300, scale=1.0),
        residual={"after": "norm"},
    )
)
GEMMA4 = replace(
    GEMMA4,
    residuals=(
        GEMMA4.residuals[0],
        replace(BRANCHES, block=branches(0, feed_forward(0), experts(0, norm=ROUTER_NORM, expert_scales="scales"))),
        *GEMMA4.residuals[2:],
    ),
)
GEMMA3N = with_first(
    with_streams(
        graph(
            attention(0, query=8, kv=1, dim=48, head_norms=VALUES, window=300),
            attention(1, query=4, kv=1, dim=48, head_norms=VALUES, kv_source=0, scale=1.0), residual={"after": "norm"},
        ),
        4,
    ),
    laurel=LAUREL,
)  # fmt: skip
GEMMA3N = with_short_table(
    replace(
        GEMMA3N,
        residuals=(GEMMA3N.residuals[0], replace(GEMMA3N.residuals[1], block=CUT_OFF), *GEMMA3N.residuals[2:]),
    )
)
OTHERS = replace(
    BASE,
    residuals=(
        replace(PARALLEL, block=Parallel((attention(0, head_norms=JOINT, rotary=INTERLEAVED), FUSED)), after=CENTERED),
        *BASE.residuals[2:],
    ),
)  # alternatives to the attributes of EVERYTHING
LATE_GRAPH = graph(attention(0, head_norms=LATE, query_scale=GROWING), attention(1, query_scale=GROWING))
CORRECTED = experts(0, correction="correction_6", normalize=True, least_sum=0.5)
MORE = replace(
    LATE_GRAPH,
    residuals=tuple(
        replace(residual, block=block)
        for residual, block in zip(
            LATE_GRAPH.residuals,
            (LATE_GRAPH.residuals[0].block, CORRECTED, LATE_GRAPH.residuals[2].block, CURVED),
            strict=True,
        )
    ),
)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", GRAPHS)
def test_every_attribute_in_every_format(name: str, form: str) -> None:
    tokens, model, allowed = random_tokens(48), GRAPHS[name], FORMATS[form][3]
    expected = GraphReference(model, random_tensors(model)).log_probabilities(tokens)
    errors = np.abs(log_probabilities(model, form, tokens) - expected)
    # A token whose rounded scores are in another order has another expert, and no small error.
    assert (np.median(errors) if name in EXPERTS and form != "float32" else errors.mean()) < allowed


@pytest.mark.parametrize("name", [name for name in GRAPHS if name != "base"])
def test_every_attribute_matters(name: str) -> None:
    """Without it the references differ by much more than float32 and bfloat16 may."""
    tokens, model = random_tokens(48), GRAPHS[name]
    results = [GraphReference(g, random_tensors(g)).log_probabilities(tokens) for g in (model, BASE)]
    if name != "weight-offset":  # its tensors are smaller by the offset
        assert np.abs(results[0] - results[1]).mean() > 0.08


def test_all_attributes_together_in_a_long_context() -> None:
    tokens = random_tokens(700)
    expected = GraphReference(EVERYTHING, random_tensors(EVERYTHING)).log_probabilities(tokens)
    np.testing.assert_allclose(log_probabilities(EVERYTHING, "float32", tokens), expected, atol=2e-4)


def test_latent_attention_in_a_long_context() -> None:
    tokens = random_tokens(700)
    expected = GraphReference(LATENT, random_tensors(LATENT)).log_probabilities(tokens)
    np.testing.assert_allclose(log_probabilities(LATENT, "float32", tokens), expected, atol=2e-4)


@pytest.mark.parametrize(
    ("model", "form"),
    [
        (EVERYTHING, "bfloat16"),
        (EVERYTHING, "int4"),
        (EVERYTHING, "int8-kv"),
        (OTHERS, "int4"),
        (MORE, "bfloat16"),
        (MORE, "int4"),
        (GEMMA4, "float32"),
        (GEMMA4, "bfloat16-int8-kv"),
        (GEMMA4, "int8"),
        (GEMMA4, "int4"),
        (GEMMA3N, "float32"),
        (GEMMA3N, "bfloat16-int8-kv"),
        (GEMMA3N, "int8"),
        (GEMMA3N, "int4"),
        (MIXTURES, "bfloat16"),
        (MIXTURES, "int8"),
        (MIXTURES, "int4"),
        (LATENT, "float32"),
        (LATENT, "bfloat16"),
        (LATENT, "int8-kv"),
        (LATENT, "int4"),
        (STATES, "float32"),
        (STATES, "bfloat16"),
        (STATES, "int8"),
        (STATES, "int4"),
    ],
    ids=["bfloat16", "int4", "int8-kv", "others", "more-bfloat16", "more-int4", "gemma4-float32", "gemma4-int8-kv",
         "gemma4-int8", "gemma4-int4", "gemma3n-float32", "gemma3n-int8-kv", "gemma3n-int8", "gemma3n-int4",
         "experts-bfloat16", "experts-int8", "experts-int4", "latent-float32",
         "latent-bfloat16", "latent-int8-kv", "latent-int4",
         "states-float32", "states-bfloat16", "states-int8", "states-int4"],
)  # fmt: skip
def test_the_bits_depend_on_neither_chunks_nor_threads_nor_instruction_set(model: Graph, form: str) -> None:
    tokens = random_tokens(560)
    expected = log_probabilities(model, form, tokens, threads=1)
    for isa in available_isas():
        assert np.array_equal(log_probabilities(model, form, tokens, isa=isa, chunk=37), expected)
    # Chunks of one token and many threads split the KV of a context longer than 512.
    assert np.array_equal(log_probabilities(model, form, tokens, threads=16, alone_from=500), expected)


@pytest.mark.parametrize("isa", ["amx", "avx512-bf16"])
@pytest.mark.parametrize(
    ("model", "form"),
    [
        (EVERYTHING, "bfloat16"),
        (EVERYTHING, "int8"),
        (LATENT, "bfloat16"),
        (LATENT, "bfloat16-int8-kv"),
        (GEMMA4, "bfloat16"),
        (GEMMA3N, "bfloat16"),
    ],
    ids=["bfloat16", "int8", "latent-bfloat16", "latent-int8-kv", "gemma4-bfloat16", "gemma3n-bfloat16"],
)
def test_units_give_the_bits_of_fma(
    model: Graph, form: str, isa: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = random_tokens(300)
    expected = log_probabilities(model, form, tokens, isa="avx2")
    if isa not in available_isas():
        soft_tiles.use(monkeypatch, tmp_path, isa)
    assert np.array_equal(log_probabilities(model, form, tokens, isa=isa), expected)


@pytest.mark.parametrize(
    ("model", "form"),
    [
        (EVERYTHING, "bfloat16"),
        (EVERYTHING, "int8"),
        (LATENT, "bfloat16-int8-kv"),
        (GEMMA4, "bfloat16"),
        (GEMMA3N, "bfloat16"),
        (GEMMA3N, "int8"),
    ],
    ids=["bfloat16", "int8", "latent-int8-kv", "gemma4-bfloat16", "gemma3n-bfloat16", "gemma3n-int8"],
)
def test_a_gpu_gives_the_bits_of_the_cpu(
    model: Graph, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulated_gpu.use(monkeypatch, tmp_path)
    tokens = random_tokens(40)
    expected = log_probabilities(model, form, tokens)
    assert np.array_equal(log_probabilities(model, form, tokens, device="cuda", alone_from=30), expected)


@pytest.mark.parametrize(
    ("model", "form"),
    [
        (EVERYTHING, "bfloat16"), (EVERYTHING, "bfloat16-int8-kv"), (GEMMA4, "bfloat16-int8-kv"),
        (FEW_LATENTS, "bfloat16"), (FEW_LATENTS, "int8-kv"),
    ],
    ids=["bfloat16", "int8-kv", "gemma4-int8-kv", "latent-bfloat16", "latent-int8-kv"],
)  # fmt: skip
def test_a_gpu_gives_the_bits_of_the_cpu_in_a_long_context(
    model: Graph, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Single tokens have their KV split over three blocks, of which a window of 300 tokens first has three, then two.

    Chunks cross the ends of blocks, and of the window.
    """
    emulated_gpu.use(monkeypatch, tmp_path)
    tokens = random_tokens(560)
    expected = log_probabilities(model, form, tokens)
    assert np.array_equal(log_probabilities(model, form, tokens, device="cuda", alone_from=552), expected)


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_quantized_experts_of_a_gpu_give_the_bits_of_the_cpu(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk of 64 tokens gives some experts more than 16 rows, which other kernels multiply than few."""
    emulated_gpu.use(monkeypatch, tmp_path)
    tokens = random_tokens(66)
    expected = log_probabilities(MIXTURES, form, tokens)
    assert np.array_equal(log_probabilities(MIXTURES, form, tokens, device="cuda", alone_from=64), expected)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (graph(attention(0), attention(1, rotary=rotary(24))), "attention of layer 1 rotates 24 of 32 elements"),
        (graph(attention(0), attention(1, rotary=rotary(48))), "attention of layer 1 rotates 48 of 32 elements"),
        (graph(attention(0), replace(attention(1), heads=Heads(8, 2, 32))), "outputs; its heads need 384"),
        (graph(replace(attention(0), heads=Heads(3, 2, 32)), attention(1)), r"num_attention_heads \(3\) must"),
        (replace(BASE, residuals=BASE.residuals[1:2]), "graph has no attention"),
        (
            graph(attention(0, head_norms=replace(JOINT, after_rotation=True)), attention(1)),
            "joint_q is a joint norm after the rotation",
        ),
        (
            replace(BASE, residuals=(BASE.residuals[0], Residual(replace(FUSED, activation=XIELU), None))),
            "fused has a gate, which xIELU does not support",
        ),
        (
            with_experts(BASE, experts(0, activation=XIELU), experts(1, activation=XIELU)),
            "belongs to an expert, which xIELU does not support",
        ),
        (with_latents(latent=40), r"0.compress has 40 outputs \(moe_latent_size\) .* a multiple of 16, and h"),
        (with_latents(shared="gated"), "0.shared_gate gates a shared expert, which 0.compress excludes"),
        (with_latents(expand=None), "must have both a layer before and one after them, or neither"),
        (with_latents(compress=None, expand=None), "the experts of 0.router have 32 outputs; they must have"),
        (graph(attention(0), attention(1, kv_source=1)), "layer 1 reads the KV of layer 1, which has none before it"),
        (graph(attention(0), attention(1, kv=4, kv_source=0)), "layer 1 has 4 KV heads of 32 elements, but reads"),
        (with_per_layer_inputs(BASE, 16), "hidden_size_per_layer_input is 16; it must be a multiple of 32"),
        (replace(with_per_layer_inputs(BASE), per_layer_inputs=None), "the model's graph has none"),
        (replace(BASE, residuals=(*BASE.residuals, replace(BRANCHES, after=None))), "must have a norm after it"),
        (graph(residual={"scalar": "scalar"}), "scalar multiplies a residual block, which must have a norm after it"),
        (with_first(BASE, before=None, laurel=LAUREL), "laurel_left belongs to a block, which must have a norm before"),
        (with_first(BASE, laurel=replace(LAUREL, left=Linear("left", 20))), "laurel_rank is 20; it must be a multiple"),
        (with_first(BASE, block=replace(PLAIN, cutoff=0.4)), "plain.up has a cutoff, which needs a gate"),
        (with_first(BASE, block=replace(FUSED, up=Linear("up", 40), cutoff=0.4)), "up has 40 outputs; with a cutoff"),
        (with_experts(BASE, cut_off_experts(), experts(1)), "the experts of 0.router have a cutoff, which only other"),
        (with_streams(BASE, 9), "altup_num_inputs is 9; it must be from 2 to 8"),
        (replace(with_streams(BASE), residuals=BASE.residuals[:2]), "2 layers are to change the streams of 1"),
        (replace(with_streams(BASE), features=Features((1,))), "can't read the hidden states of a model with streams"),
        (latent_graph(latent_heads=LatentHeads(4, 80, 32, 64, 128)), "qk_nope_head_dim is 80"),
        (latent_graph(rotary=rotary(64)), "rotates 64 elements; qk_rope_head_dim is 32"),
        (latent_graph(query=Linear("q", 500)), "q has 500 outputs; its heads need 512"),
        (latent_graph(query=Linear("q", 512, "q_b")), "must both have a bias, or neither"),
        (graph(short_convolution(0, 65), attention(1)), "64 channels and 65 taps; they must be .* from 2 to 64"),
        (graph(delta_net(0, StateHeads(1, 2, 4112, 16)), attention(1)), "key heads of 4112 elements; .* up to 4096"),
        (graph(state_space(0, StateHeads(1, 65537, 16, 16)), attention(1)), "65537 value heads .* up to 65536 value"),
    ],
)  # fmt: skip
def test_operations_without_a_kernel_are_rejected_with_an_error_that_names_them(model: Graph, message: str) -> None:
    quantization = choose_quantization(None, MemoryCheckpoint({}), ModelConfig({}))
    with pytest.raises(ModelError, match=message):
        lower(model, context_of("avx2", Dtypes(*BF16)), PlanLimits(64, 128, 32), quantization)


def test_equal_operations_share_kernels_and_weights() -> None:
    quantization = choose_quantization(None, MemoryCheckpoint({}), ModelConfig({}))
    plan = lower(BASE, context_of("avx2", Dtypes(*BF16)), PlanLimits(64, 128, 32), quantization)
    launches = [launch.kernel.name.rsplit("_", 1)[0] for launch in plan.launches]
    layer = ["norm", "linear", "split_heads", "attention", "linear_add", "norm", "linear_gate", "linear_add"]
    assert launches == ["embed", *layer, *layer, "norm", "logits"]
    assert len(plan.kernels) == len({launch.kernel for launch in plan.launches}) + 1  # the hidden states' norm


@pytest.mark.parametrize(
    ("model", "limits", "fetched"),
    [
        (BASE, PlanLimits(64, 128, 32), {"positions", "kv_slots", "entries"}),
        (BASE, PlanLimits(64, 1024, 32), {"entries", "kv_splits", "reductions"}),
        (BASE, PlanLimits(64, 128, 32, max_loras=2, max_lora_rank=8), {"row_adapters"}),
        (STATES, PlanLimits(64, 128, 32), {"state_entries", "state_writes"}),
    ],
    ids=["attention", "splits", "adapters", "states"],
)
def test_a_gpu_fetches_the_inputs_of_layers_once(model: Graph, limits: PlanLimits, fetched: set[str]) -> None:
    quantization = choose_quantization(None, MemoryCheckpoint({}), ModelConfig({}))
    first, *others = lower(model, context_of(CUDA, Dtypes(*BF16)), limits, quantization).launches
    operands = [each for launch in others if not launch.head for each in launch.operands if isinstance(each, Buffer)]
    counts = Counter(operand.name for operand in operands if operand.input)
    assert max(counts.values()) == 1
    assert not counts.keys() & fetched
    assert fetched <= {each.name for each in first.operands if isinstance(each, Buffer)}
