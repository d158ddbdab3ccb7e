"""The HTTP server: the APIs of OpenAI and Anthropic in front of an `AsyncLLM`."""
