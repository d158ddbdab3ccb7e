"""What the fields of bodies mean, in the words of `/openapi.json`. A name means the same in every body that has it."""

from __future__ import annotations

from collections.abc import Mapping

DESCRIPTIONS: Mapping[str, str] = {
    # What is asked
    "model": "One of the names that /v1/models lists. Left out: the model that is served.",
    "prompt": "A text, a list of texts, a list of token ids, or a list of these.",
    "messages": "The conversation so far, the oldest message first.",
    "input": "A text, a list of texts, a list of token ids, or a list of these.",
    "tokens": "Token ids.",
    "tools": "The functions that the model may call.",
    "tool_choice": "Whether it calls them: auto, none, required, or a named one.",
    "parallel_tool_calls": "Whether an answer may have more than one call.",
    "stream": "Send the answer as server-sent events while it is made.",
    "stream_options": "What a stream tells besides; only with stream=true.",
    # How long
    "max_tokens": "Most tokens of an answer. Left out: 16 for a completion, what the context can hold for a chat.",
    "max_completion_tokens": "The same as max_tokens.",
    "min_tokens": "The answer does not end before so many tokens.",
    "stop": "Texts before which the answer ends.",
    "stop_token_ids": "Tokens with which the answer ends.",
    "ignore_eos": "Go on after the model's end token.",
    "include_stop_str_in_output": "Keep the text of stop in the answer.",
    # How tokens are drawn
    "temperature": "0: always the likeliest token; higher: more varied. Left out: the model's own, or 1.",
    "top_p": "Draw among the likeliest tokens of this probability together.",
    "top_k": "Draw among this many of the likeliest tokens; 0 or -1: all.",
    "min_p": "Draw among tokens of at least so many times the likeliest's probability.",
    "presence_penalty": "Taken once from the logit of each token that the answer has.",
    "frequency_penalty": "Taken from the logit of a token for each time that the answer has it.",
    "repetition_penalty": "Above 1: tokens that were there before get less likely.",
    "logit_bias": "Added to the logits of tokens: from token id to a number from -100 to 100.",
    "allowed_token_ids": "No other tokens are drawn.",
    "bad_words": "Texts that the answer does not have.",
    "seed": "The same seed draws the same answer again. Left out or negative: a fresh one.",
    # Several answers
    "n": "So many answers.",
    "best_of": "Make so many, and return the n likeliest per token.",
    "use_beam_search": "Find the n likeliest answers by a beam search of width n, and draw nothing.",
    "length_penalty": "Of a beam search: above 0 prefers longer answers.",
    "early_stopping": "Of a beam search: end when n answers have ended.",
    # Their form
    "response_format": "The form of the answer: text, json_object, or json_schema with a schema.",
    "structured_outputs": "The form of the answer, by one of json, regex, choice and grammar.",
    "echo": "Begin the answer with the prompt.",
    "logprobs": "Tell the log probabilities: of a chat whether, of a completion with how many of the likeliest tokens.",
    "top_logprobs": "With how many of the likeliest tokens at each position; with logprobs=true.",
    "prompt_logprobs": "The same for the prompt's tokens.",
    "return_token_ids": "Tell the token ids of the prompt and of the answer.",
    "return_tokens_as_token_ids": "Write tokens in log probabilities as token_id:N.",
    "return_token_strs": "Tell the text of each token.",
    "skip_special_tokens": "Leave special tokens out of the text.",
    "spaces_between_special_tokens": "Put spaces between special tokens where they are shown.",
    "encoding_format": "Vectors as lists of numbers, or as base64 of little-endian float32.",
    "dimensions": "Keep only so many of a vector's values, the first ones.",
    "normalize": "Scale vectors to length 1, which is the default.",
    "pooling_type": "A text's vector is its last token's hidden state, or the mean of all tokens' states.",
    "include_reasoning": "Whether the answer shows the model's thoughts, as reasoning_content.",
    "reasoning_effort": "Handed to the chat template.",
    # How the prompt is made
    "chat_template": "A Jinja template to use instead of the model's.",
    "chat_template_kwargs": "Variables for the chat template.",
    "add_generation_prompt": "End the prompt with the beginning of the assistant's answer, which is the default.",
    "continue_final_message": "Continue the last message instead of answering it.",
    "documents": "Handed to the chat template.",
    "add_special_tokens": "Begin the prompt with the special tokens of the tokenizer, which is the default.",
    "truncate_prompt_tokens": "Use only so many tokens of the prompt, the last ones; -1: what the context can hold.",
    # How the request is served
    "priority": "Lower comes first where the engine's policy looks at it.",
    "cache_salt": "Cached prefixes are shared only among requests of the same salt.",
    # What shows in no answer
    "user": "Taken, and used for nothing.",
    "metadata": "Taken, and used for nothing.",
    "safety_identifier": "Taken, and used for nothing.",
    "prompt_cache_key": "Taken, and used for nothing; prefixes are found by themselves.",
    "request_id": "Taken, and used for nothing; the header X-Request-Id names a request.",
}
