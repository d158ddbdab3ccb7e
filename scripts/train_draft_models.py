"""Train draft models for the demo model: EAGLE-3 heads (one with ConFu's lookahead token), an EAGLE head, a decoder.

Each learns the distribution of the model's next token (and the EAGLE head its hidden states) on the tales of the corpus
and on answers that the model gives; heads learn it for what they draft by themselves, too. The folders that are written
have the layout of published ones:

    python scripts/train_draft_models.py --corpus tales.jsonl --out drafts
    .venv/bin/quire serve --speculative-config '{"method": "eagle3", "model": "drafts/eagle3"}'

Needs torch, transformers and safetensors; on two cores it takes about ten minutes for each.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn import functional
from train_demo_model import Corpus, batches, learning_rate, read_tales, split_tales
from training.draft_heads import Eagle3Head, EagleHead, Head, HeadShape, unrolled
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from quire.frontend import LLM, SamplingParams

ROW = 512  # tokens
ROWS = 4  # in a step
ROUNDS = 4  # that heads are trained for
OUTPUTS = 1024  # tokens that the EAGLE-3 head can draft: those that are sampled most
KEPT = (1, 3, 5)  # layers whose inputs it reads
PEAK_RATE = 2e-3
HEADS = ("eagle3", "confu", "eagle")
CLASSES = {"eagle3": "LlamaForCausalLMEagle3", "eagle": "EagleLlamaForCausalLM"}
LONGEST_STEP = 5  # tokens that a step computes, for which there is one lookahead token
NO_LOOKAHEAD = 0.1  # share of the steps that have none


@dataclass(frozen=True)
class Teacher:
    """The model to draft for, in torch."""

    model: Any

    @classmethod
    def load(cls, folder: Path) -> Teacher:
        """Load it in f32."""
        return cls(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())

    @torch.no_grad()
    def read(self, tokens: torch.Tensor, kept: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return hidden states before the layers `kept`, side by side, those after the final norm, and the logits."""
        found: dict[int, torch.Tensor] = {}
        hooks = self._keep(kept, found)
        final = self.model.model(tokens, use_cache=False).last_hidden_state
        for hook in hooks:
            hook.remove()
        return torch.cat([found[number] for number in kept], -1), final, self.model.lm_head(final)

    def lookahead(
        self, tokens: torch.Tensor, embedding: torch.Tensor, at: torch.Tensor, kept: tuple[int, ...]
    ) -> torch.Tensor:
        """Return the hidden states before the layers `kept` of an embedding that comes after each of the tokens `at`.

        Each sees the tokens before it, and none of the others.
        """
        with torch.no_grad():
            cache = self.model.model(tokens, use_cache=True).past_key_values
        rows, (batch, length) = len(at), tokens.shape
        seen = torch.arange(length) <= at[:, None]
        mask = torch.cat([seen, torch.eye(rows, dtype=torch.bool)], 1).expand(batch, 1, rows, length + rows)
        given = embedding.expand(batch, rows, -1)
        found: dict[int, torch.Tensor] = {}
        hooks = self._keep(kept, found)
        self.model.model(
            inputs_embeds=given, position_ids=(at + 1).expand(batch, rows), past_key_values=cache,
            attention_mask=torch.zeros(mask.shape).masked_fill(~mask, -math.inf),
        )  # fmt: skip
        for hook in hooks:
            hook.remove()
        return torch.cat([found[number] for number in kept], -1)

    def _keep(self, kept: tuple[int, ...], found: dict[int, torch.Tensor]) -> list[Any]:
        """Let hidden states before layers be put into `found`; return what ends that."""
        layers = [*self.model.model.layers, self.model.model.norm]
        return [
            layers[number].register_forward_pre_hook(lambda _, given, number=number: found.update({number: given[0]}))
            for number in kept
        ]

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of tokens."""
        embedded: torch.Tensor = self.model.model.embed_tokens(tokens).detach()
        return embedded

    @property
    def shape(self) -> HeadShape:
        """Sizes of a head for it."""
        config = self.model.config
        return HeadShape(
            config.hidden_size, 2 * config.hidden_size, config.num_attention_heads, config.num_key_value_heads,
            config.head_dim, config.vocab_size, min(OUTPUTS, config.vocab_size), epsilon=config.rms_norm_eps,
        )  # fmt: skip


def answers(folder: Path, corpus: Corpus, count: int, seed: int) -> list[list[int]]:
    """Return texts that begin as tales do and that the model goes on with, half of them greedily."""
    rng, llm = random.Random(seed), LLM(str(folder), seed=seed)
    prompts, params = [], []
    for number in range(count):
        text = rng.choice(corpus.training).text
        prompts.append(text[: rng.randint(20, 400)])
        params.append(SamplingParams(temperature=0.0 if number % 2 else 0.8, max_tokens=ROW, seed=number))
    outputs = llm.generate(prompts, params, use_tqdm=False)
    llm.close()
    return [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs]


def rows_of(corpus: Corpus, answers: list[list[int]], seed: int) -> Iterator[torch.Tensor]:
    """Yield tokens [ROWS, ROW + 1] without end, in turn of the corpus and of answers, which are laid end to end."""
    rng = random.Random(seed)
    stream = torch.tensor([token for answer in answers for token in answer])
    for rows in batches(corpus, rng):
        if rows.shape[1] == ROW + 1:
            yield rows
            starts = [rng.randint(0, len(stream) - ROW - 1) for _ in range(ROWS)]
            yield torch.stack([stream[start : start + ROW + 1] for start in starts])


def loss_of_head(head: Head, teacher: Teacher, tokens: torch.Tensor) -> torch.Tensor:
    """Return the loss of all rounds: that of round r counts 0.8^r."""
    features, final, logits = teacher.read(tokens, KEPT)
    if isinstance(head, Eagle3Head) and head.contemplate is not None:
        features = torch.cat([features, lookahead_features(head.contemplate.weight, teacher, tokens, KEPT)], -1)
    return loss_of_rounds(head, teacher.embed(tokens[:, 1:]), features, final, logits)


def lookahead_features(
    embedding: torch.Tensor, teacher: Teacher, tokens: torch.Tensor, kept: tuple[int, ...]
) -> torch.Tensor:
    """Return the features of the lookahead tokens of steps of random lengths: one follows the first token of a step.

    Prompts have none, and neither have some steps.
    """
    length, prompt = tokens.shape[1], random.choice((0, random.randrange(tokens.shape[1] // 2)))
    starts = [prompt]
    while starts[-1] < length:
        starts.append(starts[-1] + random.randint(1, LONGEST_STEP))
    at = torch.tensor(starts[:-1])
    found = teacher.lookahead(tokens, embedding, at, kept)
    found = found * (torch.rand(1, len(at), 1) > NO_LOOKAHEAD)
    lengths = torch.tensor([min(end, length) - start for start, end in itertools.pairwise(starts)])
    return torch.cat([torch.zeros(len(tokens), prompt, found.shape[-1]), found.repeat_interleave(lengths, 1)], 1)


def loss_of_rounds(
    head: Head, embedded: torch.Tensor, features: torch.Tensor, final: torch.Tensor, logits: torch.Tensor
) -> torch.Tensor:
    """Return the loss for what a teacher has read, `embedded` being its embeddings of all tokens but the first."""
    wanted = torch.softmax(logits, -1)
    is_eagle3 = isinstance(head, Eagle3Head)
    if isinstance(head, Eagle3Head):
        wanted = wanted[..., head.d2t + torch.arange(len(head.d2t))]
    found = unrolled(head, embedded, (features if is_eagle3 else final)[:, :-1], ROUNDS)
    loss = torch.zeros(())
    for number, hidden in enumerate(found):
        logprobs = torch.log_softmax(head.logits(hidden), -1)
        part = -(wanted[:, 1 + number :] * logprobs).sum(-1).mean()
        if not is_eagle3:
            part = part + functional.smooth_l1_loss(hidden, final[:, 1 + number :])
        loss = loss + 0.8**number * part
    return loss


def loss_of_model(model: Qwen3ForCausalLM, teacher: Teacher, tokens: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of a smaller model's next token with the teacher's."""
    wanted = torch.softmax(teacher.read(tokens, KEPT)[2], -1)
    logprobs = torch.log_softmax(model(tokens, use_cache=False).logits, -1)
    return -(wanted * logprobs).sum(-1).mean()


def train(
    module: torch.nn.Module,
    loss_of: Callable[[torch.Tensor], torch.Tensor],
    rows: Iterator[torch.Tensor],
    minutes: float,
) -> None:
    """Train for so many minutes with AdamW."""
    optimizer = torch.optim.AdamW(module.parameters(), betas=(0.9, 0.98), weight_decay=0.05)
    begun, step, recent = time.monotonic(), 0, 0.0
    while (done := (time.monotonic() - begun) / (60 * minutes)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(done, step, PEAK_RATE)
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(next(rows))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        recent += 0.05 * (loss.item() - recent) if step else loss.item()
        step += 1
        if step % 25 == 0:
            print(f"step {step}, {100 * done:.0f} %, loss {recent:.3f}", flush=True)


def frequent_tokens(answers: list[list[int]], vocab_size: int, count: int) -> torch.Tensor:
    """Return the `count` tokens that occur most, in order of their numbers."""
    counts = torch.bincount(torch.tensor([token for answer in answers for token in answer]), minlength=vocab_size)
    return counts.argsort(descending=True, stable=True)[:count].sort().values


def new_head(method: str, teacher: Teacher, answers: list[list[int]]) -> Head:
    """Return a head with the weights that training begins with."""
    shape = teacher.shape
    unembed = teacher.model.lm_head.weight.detach()
    if method == "eagle":
        return EagleHead(shape, unembed)
    tokens = frequent_tokens(answers, shape.vocab_size, shape.outputs)
    head = Eagle3Head(shape, len(KEPT), tokens, lookahead=method == "confu")
    head.lm_head.weight.data = unembed[tokens].clone()
    if head.contemplate is not None:
        head.contemplate.weight.data = teacher.embed(tokens[:16]).mean(0, keepdim=True)
    return head


def new_model(teacher: Teacher) -> Qwen3ForCausalLM:
    """Return a model of two layers, half as wide as the teacher, to train."""
    config = teacher.model.config.to_dict() | {
        "hidden_size": teacher.shape.hidden_size // 2, "intermediate_size": teacher.shape.hidden_size,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "layer_types": None,
    }  # fmt: skip
    return Qwen3ForCausalLM(Qwen3Config(**config))


def save_head(head: Head, shape: HeadShape, folder: Path, context: int) -> None:
    """Write a head as published ones are; its embedding is that of its model."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {
        name: (tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor).contiguous()
        for name, tensor in head.state_dict().items()
    }
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": [CLASSES[head.method]], "model_type": "llama", "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size, "num_hidden_layers": 1, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim, "vocab_size": shape.vocab_size,
        "rms_norm_eps": shape.epsilon, "rope_theta": shape.rope_theta, "max_position_embeddings": context,
        "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    }  # fmt: skip
    if head.method == "eagle3":
        config |= {"draft_vocab_size": shape.outputs}
        config |= {"eagle_config": {"eagle_aux_hidden_state_layer_ids": list(KEPT), "use_aux_hidden_state": True}}
    if isinstance(head, Eagle3Head) and head.contemplate is not None:
        config |= {"contemplates": True}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def save_model(model: Qwen3ForCausalLM, teacher: Path, folder: Path) -> None:
    """Write a smaller model, with the tokenizer of its teacher."""
    model.to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_bytes((teacher / name).read_bytes())


def parse_arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("frontend/demo_model"), help="model to draft for")
    parser.add_argument("--corpus", type=Path, required=True, help="JSON lines with source, title and text of tales")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--methods", nargs="+", choices=(*HEADS, "draft_model"), default=(*HEADS, "draft_model"))
    parser.add_argument("--minutes", type=float, default=8.0, help="to train each for")
    parser.add_argument("--answers", type=int, default=1200, help="of the model, to train on")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """Train each method's model and write it."""
    arguments = parse_arguments()
    torch.manual_seed(arguments.seed)
    random.seed(arguments.seed)
    training, held_out = split_tales(read_tales(arguments.corpus), arguments.seed)
    corpus = Corpus(training, held_out, AutoTokenizer.from_pretrained(arguments.model))
    found = answers(arguments.model, corpus, arguments.answers, arguments.seed)
    print(f"{len(found)} answers, {sum(map(len, found))} tokens", flush=True)
    teacher = Teacher.load(arguments.model)
    for method in arguments.methods:
        print(f"training {method}", flush=True)
        folder, rows = arguments.out / method, rows_of(corpus, found, arguments.seed)
        if method == "draft_model":
            model = new_model(teacher)
            train(model, functools.partial(loss_of_model, model, teacher), rows, arguments.minutes)
            save_model(model, arguments.model, folder)
        else:
            head = new_head(method, teacher, found)
            train(head, functools.partial(loss_of_head, head, teacher), rows, arguments.minutes)
            save_head(head, teacher.shape, folder, teacher.model.config.max_position_embeddings)


if __name__ == "__main__":
    main()
