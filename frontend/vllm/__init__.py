"""Compatibility with scripts and command lines for vLLM: its names, options, request fields and flags."""
