"""Prompts for the text between two others, of models that were trained for it (fill-in-the-middle)."""

from __future__ import annotations

from dataclasses import dataclass

from quire.frontend.http.dialects.llama_cpp.body import InfillBody
from quire.frontend.http.dialects.llama_cpp.prompts import encode_all
from quire.frontend.http.errors import bad_request
from quire.frontend.http.service import ModelService
from quire.frontend.text.tokenizer import Tokenizer

_NAMES = {  # as vocabularies have them; the first that is there is the one
    "prefix": (
        *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<\uff5cfim\u2581begin\uff5c>"),
        *("<PRE>", "\u2581<PRE>", "<|code_prefix|>", "<|prefix|>"),
    ),
    "suffix": (
        *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<\uff5cfim\u2581hole\uff5c>"),
        *("<SUF>", "\u2581<SUF>", "<|code_suffix|>", "<|suffix|>"),
    ),
    "middle": (
        *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<\uff5cfim\u2581end\uff5c>"),
        *("<MID>", "\u2581<MID>", "<|code_middle|>", "<|middle|>"),
    ),
    "repository": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "file": ("<|file_sep|>",),
    "padding": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>"),
}
_PROJECT, _FILE, _UNNAMED = "myproject\n", "filename\n", "tmp"  # llama.cpp's
_SNIPPET = "\n\n--- snippet ---\n\n"  # before each text for models without a token for files
_MOST_RESERVED = 4  # part of the context that is kept free for an answer without a limit: a quarter
_SUFFIX_SHARE = 4


@dataclass(frozen=True, kw_only=True)
class InfillTokens:
    """The tokens that a model was trained with to fill in text; those that are None are left out of prompts."""

    prefix: int
    suffix: int
    middle: int
    repository: int | None = None
    file: int | None = None
    padding: int | None = None

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> InfillTokens:
        """Return the tokens of a vocabulary. Raises `ApiError` 400 if it has none for this."""
        found = {kind: _first(tokenizer, names) for kind, names in _NAMES.items()}
        missing = [kind for kind in ("prefix", "suffix", "middle") if found[kind] is None]
        if missing:
            raise bad_request(
                f"this model can't fill in text: its vocabulary has no token for the {', the '.join(missing)}; serve a "
                "model that was trained for it, such as Qwen2.5-Coder, or give the text before to POST /completion",
                code="unsupported",
            )
        return cls(**found)  # type: ignore[arg-type]

    @property
    def ends(self) -> list[int]:
        """The tokens with which an answer ends, besides the model's own."""
        return [token for token in (self.repository, self.file, self.padding) if token is not None]


def _first(tokenizer: Tokenizer, names: tuple[str, ...]) -> int | None:
    return next((token for name in names if (token := tokenizer.token_id(name)) is not None), None)


async def infill_prompt(service: ModelService, body: InfillBody, tokens: InfillTokens) -> list[int]:
    """Return the prompt: other texts, the prefix with the beginning of the answer, and the suffix.

    What does not fit is cut: the beginning of the other texts first, then that of the prefix and the end of the suffix,
    which keeps a quarter. Raises `ApiError` or `ValueError`.
    """
    extra, names = body.input_extra or [], _file_names(body, tokens)
    texts = [body.input_prefix, body.input_suffix, body.prompt or "", _PROJECT, _FILE, _SNIPPET]
    texts += [text for each, name in zip(extra, names, strict=True) for text in (name, each.text)]
    lead, (prefix, suffix, begun, project, file, snippet, *others) = await encode_all(service, texts, must_fit=False)
    context: list[int] = []
    if tokens.repository is not None:
        context += [tokens.repository, *project]
    for name_ids, text_ids in zip(others[::2], others[1::2], strict=True):
        context += [*(snippet if tokens.file is None else [tokens.file, *name_ids]), *text_ids]
    if tokens.file is not None:
        context += [tokens.file, *file]
    room = _room(body, service.llm.max_model_len) - len(begun) - len(lead) - 3
    if room < 0:
        raise bad_request(
            f"prompt has {len(begun)} tokens, which leave no room in the context of {service.llm.max_model_len}; "
            "shorten it, or lower n_predict",
            "prompt",
        )
    suffix = suffix[: max(room // _SUFFIX_SHARE, room - len(prefix))]
    prefix = _last(prefix, room - len(suffix))
    context = _last(context, room - len(suffix) - len(prefix))
    return [*lead, *context, tokens.prefix, *prefix, *begun, tokens.suffix, *suffix, tokens.middle]


def _file_names(body: InfillBody, tokens: InfillTokens) -> list[str]:
    if tokens.file is None:
        return ["" for _ in body.input_extra or []]
    return [f"{each.filename or _UNNAMED}\n" for each in body.input_extra or []]


def _room(body: InfillBody, max_model_len: int) -> int:
    """Return the most tokens that a prompt may have, so that its answer fits."""
    limit, most = body.num_predict, max_model_len // _MOST_RESERVED
    return max_model_len - max(1, most if limit is None else min(limit, most))


def _last(tokens: list[int], count: int) -> list[int]:
    return tokens[max(0, len(tokens) - count) :] if count > 0 else []
