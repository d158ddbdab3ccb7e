"""Adapters: low-rank changes of a model's linear layers, which each request may choose."""
