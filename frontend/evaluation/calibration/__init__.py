"""Measures how long the steps of an engine take, for those who simulate engines like it."""
