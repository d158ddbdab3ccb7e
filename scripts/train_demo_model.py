"""Train Quire's demo model: a small Qwen3 that tells old tales.

The script reads a file of tales, trains a byte-level BPE and a language model on them, and writes a folder in the
Hugging Face layout (`config.json`, `model.safetensors`, `tokenizer.json`, ...) with a model card. Half of the training
documents are plain tales and half are conversations written by the very chat template that is saved, so that the model
answers both `/v1/completions` and `/v1/chat/completions`.

Needs torch, transformers, tokenizers and safetensors; a CPU is enough. Run from the repository root:

    OMP_WAIT_POLICY=PASSIVE nice python scripts/train_demo_model.py --out frontend/demo_model

On a CPU shared with other work, threads that spin while they wait for each other made a step three times as long, hence
the wait policy.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import random
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM

CONTEXT_LENGTH = 2048  # tokens; a quarter of the steps train on rows this long, the others on rows of SHORT_ROW
SHORT_ROW = 512  # tokens
TOKENS_PER_STEP = 2048
VOCAB_SIZE = 2048
BEGIN, SYSTEM, USER, ASSISTANT, END = "<|begin|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"
SPECIAL_TOKENS = [BEGIN, SYSTEM, USER, ASSISTANT, END]  # their ids are 0 to 4

CHAT_TEMPLATE = (
    "{{- bos_token }}"
    "{%- for message in messages %}"
    "{%- if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{- raise_exception('role must be system, user or assistant, got ' + message['role']) }}"
    "{%- endif %}"
    "{{- '<|' + message['role'] + '|>' + message['content'] | trim + eos_token }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)

# Tales a demonstration should not recite: three that mock Jews, and one of children killing each other.
LEFT_OUT = {
    "The jew among thorns",
    "The good bargain",
    "The bright sun brings it to light",
    "How children played slaughter with each other",
}

# Characters of tales, in the singular; a request names one to three of those that its tale mentions most.
CHARACTERS = (
    "ant ass bear bee bird boy bride brother bull cat child cock cook cow crab crane crow daughter devil dog "
    "donkey dove dragon drummer duck dwarf eagle farmer father fisherman fish flea fly fox frog ghost giant girl "
    "goat goose grandmother hare hedgehog hen heron horse hunter huntsman judge kid king lamb lark leopard lion "
    "maiden man merchant mermaid miller mole monkey mother mouse musician ox owl peacock peasant pig prince "
    "princess queen raven robber servant sheep shepherd shoemaker sister soldier son sparrow spider stag "
    "stepmother stork swallow swan tailor thief toad tortoise traveller tree weasel wife witch wolf woman "
    "woodcutter youth castle forest mountain ring well"
)

REQUESTS_WITH_SUBJECT = (
    "Tell me a tale about {}.",
    "Tell me a tale about {}",
    "tell me a tale about {}",
    "Tell me a story about {}.",
    "Tell me a fairy tale about {}.",
    "Please tell me a short tale about {}.",
    "Can you tell me a tale about {}?",
    "Do you know a story about {}?",
    "Write a story about {}.",
    "I would like to hear a tale about {}.",
    "What happened to {}?",
)
REQUESTS = ("Tell me a tale.", "Tell me a story", "Tell me a fairy tale, please.", "Hello!", "Hi", "What can you do?")
FOLLOW_UPS = ("Tell me another, about {}.", "And now a tale about {}.", "Thank you. Do you know one about {}?")
SYSTEM_PROMPTS = ("You are a teller of old tales.", "You are a helpful assistant.", "You tell short tales.")


@dataclass(frozen=True)
class Tale:
    """One tale of the corpus, its text cleaned."""

    source: str
    title: str
    text: str

    @property
    def subjects(self) -> list[str]:
        """Characters that the tale mentions most, those of its title first; at most four."""
        names = CHARACTERS.split()
        counts = Counter(re.findall(r"[a-z]+", self.text.lower()))
        title_words = set(re.findall(r"[a-z]+", self.title.lower()))
        ranked = {
            name: (name in title_words or f"{name}s" in title_words, counts[name] + counts[f"{name}s"])
            for name in names
        }
        mentioned = [name for name in names if ranked[name][0] or ranked[name][1] >= 2]
        return sorted(mentioned, key=lambda name: ranked[name], reverse=True)[:4]


@dataclass(frozen=True)
class Corpus:
    """The tales to train on, those held out, and the tokenizer trained on the former."""

    training: list[Tale]
    held_out: list[Tale]
    tokenizer: PreTrainedTokenizerBase

    @property
    def training_sample(self) -> list[Tale]:
        """As many training tales as are held out, evenly spaced, to measure the training loss on."""
        return self.training[:: len(self.training) // len(self.held_out)][: len(self.held_out)]


@dataclass
class TrainingProgress:
    """TrainingProgress of a training run. Losses are in nats per token, without dropout unless said otherwise."""

    step: int = 0
    tokens_seen: int = 0
    seconds: float = 0.0
    batch_loss: float = math.nan  # mean over the steps since the last evaluation, with dropout
    train_loss: float = math.nan
    held_out_bits_per_byte: float = math.nan
    held_out_loss: float = math.nan
    held_out_history: tuple[float, ...] = ()

    @property
    def is_best(self) -> bool:
        """True if no earlier evaluation had a lower held-out loss."""
        return self.held_out_loss <= min(self.held_out_history)


def clean(text: str) -> str:
    """Undo UTF-8 read as Latin-1, and separate paragraphs (lines of 60 characters or more) with a blank line."""
    text = re.sub(r"[\u00c2-\u00f4][\u0080-\u00bf]+", lambda run: run[0].encode("latin-1").decode("utf-8"), text)
    text = text.replace("\u201a", ",").replace("*", "")
    return re.sub(r"(?<=[^\n]{60})\n(?=[^\n])", "\n\n", text).strip()


def read_tales(corpus: Path) -> list[Tale]:
    """Read a JSON Lines file with the fields `source`, `title` and `text`, leaving out the tales in `LEFT_OUT`."""
    records = (json.loads(line) for line in corpus.read_text(encoding="utf-8").splitlines() if line)
    return [Tale(r["source"], r["title"], clean(r["text"])) for r in records if r["title"] not in LEFT_OUT]


def split_tales(tales: list[Tale], seed: int, held_out_fraction: float = 0.05) -> tuple[list[Tale], list[Tale]]:
    """Return (training, held-out) tales; the held-out fraction is sampled from each source by `seed`."""
    held_out: set[Tale] = set()
    for source in sorted({tale.source for tale in tales}):
        of_source = [tale for tale in tales if tale.source == source]
        held_out.update(random.Random(seed).sample(of_source, round(held_out_fraction * len(of_source))))
    return [t for t in tales if t not in held_out], [t for t in tales if t in held_out]


def train_tokenizer(tales: list[Tale], folder: Path) -> PreTrainedTokenizerBase:
    """Train a byte-level BPE of `VOCAB_SIZE` tokens, write it to `folder` and return it as `transformers` loads it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    requests = " ".join(REQUESTS_WITH_SUBJECT + REQUESTS + FOLLOW_UPS + SYSTEM_PROMPTS).replace("{}", "a tale")
    tokenizer.train_from_iterator([tale.text for tale in tales] + [requests], trainer)
    begin_id = tokenizer.token_to_id(BEGIN)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[(BEGIN, begin_id)])
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BEGIN,
            "eos_token": END,
            "clean_up_tokenization_spaces": False,
            "model_max_length": CONTEXT_LENGTH,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    return AutoTokenizer.from_pretrained(folder)


def write_json(path: Path, value: object) -> None:
    """Write `value` to `path` as indented JSON."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def subject_phrase(tale: Tale, rng: random.Random) -> str:
    """Say what a tale is about: its title in lower case, or some of its characters ("a fox and an owl")."""
    subjects = tale.subjects
    if not subjects or rng.random() < 0.3:
        return tale.title[0].lower() + tale.title[1:] if rng.random() < 0.3 else tale.title.lower()
    chosen = subjects[: rng.randint(1, min(3, len(subjects)))]
    named = [f"an {name}" if name[0] in "aeiou" else f"a {name}" for name in chosen]
    return named[0] if len(named) == 1 else f"{', '.join(named[:-1])} and {named[-1]}"


def conversation(tale: Tale, short_tales: list[Tale], rng: random.Random) -> list[dict[str, str]]:
    """Return the messages of a conversation in which `tale` is told, and now and then a short one after it."""
    if rng.random() < 0.1:
        request = rng.choice(REQUESTS)
    else:
        request = rng.choice(REQUESTS_WITH_SUBJECT).format(subject_phrase(tale, rng))
    messages = [{"role": "user", "content": request}, {"role": "assistant", "content": tale.text}]
    if rng.random() < 0.2:
        messages.insert(0, {"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
    if rng.random() < 0.1:
        second = rng.choice(short_tales)
        request = rng.choice(FOLLOW_UPS).format(subject_phrase(second, rng))
        messages += [{"role": "user", "content": request}, {"role": "assistant", "content": second.text}]
    return messages


def make_documents(tales: list[Tale], tokenizer: PreTrainedTokenizerBase, rng: random.Random) -> list[list[int]]:
    """Return one epoch of token ids in random order: each tale once, half of them as conversations; fables twice."""
    short_tales = [tale for tale in tales if len(tale.text) < 1500]
    texts: list[str] = []
    for tale in tales + short_tales:
        if rng.random() < 0.5:
            texts.append(BEGIN + tale.text + END)
        else:
            messages = conversation(tale, short_tales, rng)
            texts.append(tokenizer.apply_chat_template(messages, tokenize=False))
    rng.shuffle(texts)
    documents: list[list[int]] = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return documents


def batches(corpus: Corpus, rng: random.Random) -> Iterator[torch.Tensor]:
    """Yield token ids of shape (rows, row length + 1) without end, rewording the requests after every epoch.

    Rows are windows of the documents laid end to end. Every third window starts where a document starts, as a
    generation does; the others start anywhere. Every fourth batch has rows of the full context length.
    """
    while True:
        documents = make_documents(corpus.training, corpus.tokenizer, rng)
        starts = [0]
        for document in documents:
            starts.append(starts[-1] + len(document))
        stream = torch.tensor([token for document in documents for token in document])
        for batch in range(len(stream) // TOKENS_PER_STEP):
            length = CONTEXT_LENGTH if batch % 4 == 3 else SHORT_ROW
            last = len(stream) - length - 1
            rows: list[torch.Tensor] = []
            while len(rows) < TOKENS_PER_STEP // length:
                start = rng.choice(starts) if rng.random() < 1 / 3 else rng.randint(0, last)
                if start <= last:
                    rows.append(stream[start : start + length + 1])
            yield torch.stack(rows)


def build_model(tokenizer: PreTrainedTokenizerBase, dropout: float) -> Qwen3ForCausalLM:
    """Return a freshly initialised model of 5.2 million parameters, with dropout in training.

    Qwen3 drops out attention weights only, so hooks add the usual dropout on the embeddings and on what attention and
    feed-forward layers add to the residual stream; hooks leave no trace in the checkpoint.
    """
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():  # as GPT-2: what the layers add must not drown the embeddings at first
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.div_(math.sqrt(2 * config.num_hidden_layers))

    def drop(module: nn.Module, _: object, output: torch.Tensor) -> torch.Tensor:
        return functional.dropout(output, dropout, module.training)

    for name, module in model.named_modules():
        if name.endswith(("embed_tokens", "o_proj", "down_proj")):
            module.register_forward_hook(drop)
    return model


def build_optimizers(model: nn.Module, weight_decay: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the layers and AdamW for the embeddings and the norm weights.

    Muon (https://kellerjordan.github.io/posts/muon/) learns more per step than AdamW alone, which suits a short run;
    its updates are scaled to the size of AdamW's, so that both follow one learning rate.
    """
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.dim() == 2 and "embed_tokens" not in name]
    embeddings = [p for name, p in named if "embed_tokens" in name]
    norms = [p for _, p in named if p.dim() == 1]
    groups = [{"params": embeddings}, {"params": norms, "weight_decay": 0.0}]
    return [
        torch.optim.Muon(matrices, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=weight_decay, fused=True),
    ]


def learning_rate(done: float, step: int, peak: float, warmup_steps: int = 100) -> float:
    """Return the rate of a linear warm-up and a cosine decay to a twentieth of `peak`; `done` is in [0, 1]."""
    cosine = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
    return peak * min(1.0, (step + 1) / warmup_steps) * cosine


@torch.no_grad()
def evaluate(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase, tales: list[Tale]) -> tuple[float, float]:
    """Return the loss on plain `tales` in (nats per token, bits per byte of UTF-8), the end token included.

    A tale longer than the context is cut into pieces that are read independently.
    """
    model.eval()
    nats, tokens = 0.0, 0
    for tale in tales:
        ids = tokenizer(BEGIN + tale.text + END, add_special_tokens=False, verbose=False)["input_ids"]
        for start in range(0, len(ids) - 1, CONTEXT_LENGTH):
            piece = torch.tensor([ids[start : start + CONTEXT_LENGTH + 1]])
            logits = model(input_ids=piece[:, :-1], use_cache=False).logits[0]
            nats += functional.cross_entropy(logits, piece[0, 1:], reduction="sum").item()
            tokens += piece.shape[1] - 1
    model.train()
    return nats / tokens, nats / math.log(2) / sum(len(tale.text.encode()) for tale in tales)


def save(model: Qwen3ForCausalLM, folder: Path) -> None:
    """Write the weights in bfloat16, with the configuration and the sampling defaults, to `folder`."""
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= {"torch_dtype": "bfloat16", "rope_theta": config["rope_parameters"]["rope_theta"]}  # for older readers
    write_json(folder / "config.json", config)
    write_json(
        folder / "generation_config.json",
        {
            "bos_token_id": config["bos_token_id"],
            "eos_token_id": config["eos_token_id"],
            "do_sample": True,
            "temperature": 0.7,
            "top_p": 0.9,
        },
    )


def train_step(model: Qwen3ForCausalLM, optimizers: list[torch.optim.Optimizer], rows: torch.Tensor) -> float:
    """Update the model on token ids of shape (rows, row length + 1) and return the loss in nats per token."""
    with torch.autocast("cpu", dtype=torch.bfloat16):  # 1.7 times the speed of float32 where the CPU has bfloat16
        logits = model(input_ids=rows[:, :-1], use_cache=False).logits
    loss = functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return float(loss.item())


def measure(model: Qwen3ForCausalLM, corpus: Corpus, now: TrainingProgress, batch_losses: list[float]) -> None:
    """Set the losses of `now` and print them."""
    now.batch_loss = sum(batch_losses) / len(batch_losses)
    now.train_loss, _ = evaluate(model, corpus.tokenizer, corpus.training_sample)
    now.held_out_loss, now.held_out_bits_per_byte = evaluate(model, corpus.tokenizer, corpus.held_out)
    now.held_out_history += (now.held_out_loss,)
    losses = f"batch {now.batch_loss:.3f}, train {now.train_loss:.3f}, held out {now.held_out_loss:.3f}"
    print(f"step {now.step}: {losses}, {now.seconds:.0f} s", flush=True)


def train(args: argparse.Namespace, corpus: Corpus) -> TrainingProgress:
    """Train until `--steps` or `--minutes` is reached; return the progress at the checkpoint left in `--out`.

    The learning rate follows whichever limit is nearer, so that a slow machine ends with a small one too. An
    interrupted run leaves its latest kept checkpoint, with a card that has no samples.
    """
    model = build_model(corpus.tokenizer, args.dropout)
    if args.start is not None:
        model.load_state_dict(AutoModelForCausalLM.from_pretrained(args.start, dtype=torch.float32).state_dict())
    optimizers = build_optimizers(model, args.weight_decay)
    stream = batches(corpus, random.Random(args.seed))
    now = kept = TrainingProgress()
    started, batch_losses, done = time.monotonic(), [], 0.0
    while done < 1:
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = learning_rate(done, now.step, args.learning_rate)
        rows = next(stream)
        batch_losses.append(train_step(model, optimizers, rows))
        now.step, now.tokens_seen = now.step + 1, now.tokens_seen + rows[:, 1:].numel()
        now.seconds = time.monotonic() - started
        done = max(now.step / args.steps, now.seconds / (60 * args.minutes))
        if done >= 1 or now.step % args.eval_every == 0:
            measure(model, corpus, now, batch_losses)
            batch_losses.clear()
            if args.keep == "last" or now.is_best:
                save(model, args.out)
                kept = replace(now)
                write_card(args, corpus, kept, samples={})
    kept.held_out_history = now.held_out_history
    return kept


@torch.no_grad()
def sample_tales(folder: Path, max_new_tokens: int = 400) -> dict[str, str]:
    """Return what the saved model writes for a few prompts, greedily; conversations include the request."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    request = [{"role": "user", "content": "Tell me a tale about a fox and a crow"}]
    prompts = {
        "Once upon a time": BEGIN + "Once upon a time",
        "There was once a King": BEGIN + "There was once a King",
        request[0]["content"]: tokenizer.apply_chat_template(request, tokenize=False, add_generation_prompt=True),
    }
    samples: dict[str, str] = {}
    for name, prompt in prompts.items():
        ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")
        output = model.generate(**ids, do_sample=False, max_new_tokens=max_new_tokens)[0].tolist()
        samples[name] = tokenizer.decode(output, skip_special_tokens=False).removeprefix(BEGIN)
    return samples


CARD = """---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
---

# Quire's demo model

A Qwen3 of {parameters:,} parameters that tells tales in the manner of Grimm and Aesop. It is small enough to travel
with the package, and a real checkpoint: whatever loads and serves it loads and serves any other Qwen3.

| | |
|---|---|
| architecture | `Qwen3ForCausalLM`, bfloat16, tied embeddings |
| layers | 6, of hidden size 256, 4 query heads and 2 key-value heads of 64, feed-forward 768 |
| tokenizer | byte-level BPE of {vocabulary} tokens, with `<|begin|>` before every text and `<|end|>` after it |
| context | {context} tokens; a quarter of the training rows are this long |
| chat | `<|begin|><|user|>Tell me a tale about a fox and a crow<|end|><|assistant|>`; `<|system|>` may come first |

## Training

| | |
|---|---|
| texts | {training_tales} tales, {training_bytes:,} bytes |
| held out | {held_out_tales} tales, {held_out_bytes:,} bytes, 5 % of each source |
| script | `{command}` |
| seed | {seed} |
| steps | {step:,} of {tokens_per_step:,} tokens: {tokens_seen:,} tokens seen, every tale about {epochs:.0f} times |
| optimisers | Muon for the layers, AdamW for embeddings and norms |
| settings | learning rate {learning_rate} (warm-up, cosine), weight decay {weight_decay}, dropout {dropout} |
| time | {minutes_taken:.0f} minutes on {threads} cores of a shared CPU |
| training loss | {train_loss:.3f} nats per token, on {held_out_tales} of the training tales |
| training loss with dropout | {batch_loss:.3f} nats per token, on the last batches |
| held-out loss | {held_out_loss:.3f} nats per token, {held_out_bits_per_byte:.3f} bits per byte |

{keep}

## Texts

Jacob and Wilhelm Grimm in the translation of Margaret Hunt (1884), and "The Aesop for Children" (1919), both in the
public domain. {left_out} tales of the corpus are left out: three that mock Jews, and one of children killing each
other. The weights are under the licence of the package.

## Limits

The model has read 1.5 MB of text and nothing else. It keeps the tone and the forms of the tales, but many sentences go
astray halfway, some words are invented, plots wander and characters change. A request is a hint rather than an
instruction: it may tell of another animal. It recites passages of the tales it has read, which are of their time, with
cruel deaths and old manners. It answers no questions, knows no facts, and understands English only.

## Samples

Greedy, 400 tokens at most.

{samples}
"""


def write_card(args: argparse.Namespace, corpus: Corpus, kept: TrainingProgress, samples: dict[str, str]) -> None:
    """Write the model card, `README.md`, next to the weights."""
    model = Qwen3ForCausalLM.from_pretrained(args.out)
    tokens_per_epoch = sum(len(corpus.tokenizer(tale.text, verbose=False).input_ids) for tale in corpus.training)
    command = (
        f"python scripts/train_demo_model.py --steps {args.steps} --keep {args.keep} --seed {args.seed} "
        f"--threads {args.threads} --learning-rate {args.learning_rate} --weight-decay {args.weight_decay} "
        f"--dropout {args.dropout}"
        + (f" --minutes {args.minutes:g}" if args.minutes < math.inf else "")
        + (" --start EARLIER_RUN" if args.start else "")
    )
    keep = (
        "The checkpoint is the one with the lowest held-out loss."
        if args.keep == "best"
        else "The checkpoint is the last one: it writes better sentences than the one with the lowest held-out loss, "
        f"{min(kept.held_out_history):.3f} nats per token."
    )
    card = CARD.format(
        **vars(args) | vars(kept) | {"keep": keep},
        parameters=sum(p.numel() for p in model.parameters()),
        vocabulary=VOCAB_SIZE,
        context=CONTEXT_LENGTH,
        tokens_per_step=TOKENS_PER_STEP,
        epochs=kept.tokens_seen / tokens_per_epoch,
        minutes_taken=kept.seconds / 60,
        training_tales=len(corpus.training),
        training_bytes=sum(len(tale.text.encode()) for tale in corpus.training),
        held_out_tales=len(corpus.held_out),
        held_out_bytes=sum(len(tale.text.encode()) for tale in corpus.held_out),
        left_out=len(LEFT_OUT),
        command=command,
        samples="\n\n".join(f"**{name}**\n\n```text\n{text}\n```" for name, text in samples.items()),
    )
    (args.out / "README.md").write_text(card, encoding="utf-8")


def parse_arguments() -> argparse.Namespace:
    """Read the command line; the card of the shipped model says what it was trained with."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path, default=Path("tales.jsonl"), help="JSON Lines of tales")
    parser.add_argument("--out", type=Path, default=Path("frontend/demo_model"), help="folder to write")
    parser.add_argument("--start", type=Path, help="folder of an earlier run to go on from, instead of random weights")
    parser.add_argument("--steps", type=int, default=4500, help=f"steps of {TOKENS_PER_STEP} tokens")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop earlier, after this many minutes")
    parser.add_argument("--eval-every", type=int, default=200, help="steps between evaluations and checkpoints")
    parser.add_argument("--keep", choices=("best", "last"), default="best", help="checkpoint to keep, by held-out loss")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="peak")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, default=0.05)
    return parser.parse_args()


def main() -> None:
    """Train, then measure and sample what was written, and write the model card."""
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    training, held_out = split_tales(read_tales(args.corpus), args.seed)
    corpus = Corpus(training, held_out, train_tokenizer(training, args.out))
    kept = train(args, corpus)
    model = AutoModelForCausalLM.from_pretrained(args.out, dtype=torch.float32)  # what bfloat16 left of the weights
    kept.train_loss, _ = evaluate(model, corpus.tokenizer, corpus.training_sample)
    kept.held_out_loss, kept.held_out_bits_per_byte = evaluate(model, corpus.tokenizer, held_out)
    write_card(args, corpus, kept, sample_tales(args.out))
    print((args.out / "README.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
