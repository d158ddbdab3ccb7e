"""Calibration: measures the time of an engine's steps, to simulate engines like it."""
