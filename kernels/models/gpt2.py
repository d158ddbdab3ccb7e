"""GPT-2, class GPT2LMHeadModel (Radford et al. 2019): LayerNorm, learned positions, biases everywhere."""

from __future__ import annotations

from quire.kernels.config import ModelConfig
from quire.kernels.emit.kv import Heads
from quire.kernels.errors import ModelError
from quire.kernels.models.decoder import activation_of
from quire.kernels.operands import Activations, Linear
from quire.kernels.plan import PlanBuilder


def build(p: PlanBuilder, config: ModelConfig) -> None:
    """The plan of a GPT2LMHeadModel. Its linear layers keep their weights as [inputs, outputs]."""
    config.refuse("scale_attn_by_inverse_layer_idx", (False,))
    config.refuse("scale_attn_weights", (True,))
    config.refuse("add_cross_attention", (False,))
    hidden, vocab = config.size("n_embd"), config.size("vocab_size")
    inner, epsilon = config.size("n_inner", 4 * hidden), config.get("layer_norm_epsilon", 1e-5)
    num_heads = config.size("n_head")
    if hidden % num_heads:
        raise ModelError(f"config.json: n_embd ({hidden}) must be a multiple of n_head ({num_heads})")
    heads = Heads(num_heads, num_heads, hidden // num_heads)
    activation = activation_of(config, "activation_function", "gelu_new")
    positions = ("transformer.wpe.weight", config.size("n_positions"))
    tied = config.get("tie_word_embeddings", True)
    head = Linear((("transformer.wte.weight" if tied else "lm_head.weight", "", vocab),), head=True)
    state = p.embed("transformer.wte.weight", vocab, hidden, head, positions)

    def norm(name: str, feeds: Linear) -> Activations:
        at = f"transformer.{name}"
        return p.norm(state, hidden, f"{at}.weight", epsilon, feeds, bias=f"{at}.bias", mean=True)

    def linear(name: str, outputs: int) -> Linear:
        at = f"transformer.{name}"
        return Linear(((f"{at}.weight", f"{at}.bias", outputs),), transposed=True)

    for i in range(config.size("n_layer")):
        projections, widening = linear(f"h.{i}.attn.c_attn", 3 * hidden), linear(f"h.{i}.mlp.c_fc", inner)
        qkv = p.linear(norm(f"h.{i}.ln_1", projections), projections, "qkv")
        p.add_linear(state, p.attention(qkv, i, heads), linear(f"h.{i}.attn.c_proj", hidden))
        inside = p.activated(norm(f"h.{i}.ln_2", widening), widening, activation)
        p.add_linear(state, inside, linear(f"h.{i}.mlp.c_proj", hidden))
    p.logits(norm("ln_f", head), head)
