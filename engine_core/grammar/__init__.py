"""Constrained requests: grammars, their compilation and token constraints."""
