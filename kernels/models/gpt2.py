"""GPT-2, class GPT2LMHeadModel (Radford et al. 2019): LayerNorm, learned positions, biases everywhere."""

from __future__ import annotations

from quire.kernels.attention_heads import Heads
from quire.kernels.config import ModelConfig
from quire.kernels.errors import ModelError
from quire.kernels.graph.operations import Attention, Embedding, FeedForward, Graph, Linear, Logits, Norm, Residual
from quire.kernels.models.decoder import activation_of, head_of


def build(config: ModelConfig) -> Graph:
    """Return the graph of a GPT2LMHeadModel.

    Its linear layers keep their weights as [inputs, outputs]; not so those of GGUF files (`transposed_weights` false).
    """
    config.restrict("scale_attn_by_inverse_layer_idx", (False,))
    config.restrict("scale_attn_weights", (True,))
    config.restrict("add_cross_attention", (False,))
    hidden, vocab = config.size("n_embd"), config.size("vocab_size")
    inner, epsilon = config.size("n_inner", 4 * hidden), config.get("layer_norm_epsilon", 1e-5)
    num_heads = config.size("n_head")
    if hidden % num_heads:
        raise ModelError(f"config.json: n_embd ({hidden}) must be a multiple of n_head ({num_heads})")
    heads = Heads(num_heads, num_heads, hidden // num_heads)
    activation = activation_of(config, "activation_function", "gelu_new")
    transposed = config.get("transposed_weights", True)

    def norm(name: str) -> Norm:
        return Norm(f"transformer.{name}.weight", epsilon, f"transformer.{name}.bias", center=True)

    def linear(name: str, outputs: int) -> Linear:
        return Linear(f"transformer.h.{name}.weight", outputs, f"transformer.h.{name}.bias", transposed)

    residuals = []
    for i in range(config.size("n_layer")):
        attention = Attention((linear(f"{i}.attn.c_attn", 3 * hidden),), linear(f"{i}.attn.c_proj", hidden), heads)
        feed_forward = FeedForward(linear(f"{i}.mlp.c_fc", inner), linear(f"{i}.mlp.c_proj", hidden), activation)
        residuals += [Residual(attention, norm(f"h.{i}.ln_1")), Residual(feed_forward, norm(f"h.{i}.ln_2"))]
    embedding = Embedding(
        "transformer.wte.weight", vocab, hidden, positions="transformer.wpe.weight",
        num_positions=config.size("n_positions"),
    )  # fmt: skip
    return Graph(embedding, tuple(residuals), Logits(norm("ln_f"), head_of(config, embedding, tied=True)))
