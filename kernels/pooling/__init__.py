"""Poolers: what becomes of a prompt's hidden states in an embedding or a classification."""
