"""Text to tokens and back: tokenizers, detokenizing streams, prompts and chats."""
