"""Endpoints for operators: health, metrics, models, tokens, and the page with its live view."""
