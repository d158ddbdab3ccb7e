"""The HTTP server: OpenAI's and Anthropic's APIs in front of an `AsyncLLM`."""
