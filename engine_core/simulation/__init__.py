"""Engines in virtual time: the scheduler, cache and request code of a real one, and a model of what its steps take."""
