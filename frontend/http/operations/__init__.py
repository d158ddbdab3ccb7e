"""Endpoints for operators: health, models, tokens, and the page with its live view."""
