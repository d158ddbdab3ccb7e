"""OpenAI's Responses API; nothing is stored."""
