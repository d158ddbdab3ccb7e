"""Simulation of engines and fleets from a calibration: drives the process that simulates."""
