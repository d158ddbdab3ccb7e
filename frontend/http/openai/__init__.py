"""OpenAI's APIs: Chat Completions, Completions, Responses, Embeddings."""
