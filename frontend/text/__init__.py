"""Text and tokens: tokenizers, incremental detokenization, prompts and conversations."""
