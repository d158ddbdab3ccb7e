"""Speculative decoding: tokens that are drafted, and computed beside the one that is due."""
