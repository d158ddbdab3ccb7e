"""OpenAI's Responses API, without storage."""
