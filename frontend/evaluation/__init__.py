"""Workloads, their replay and simulation, and reports of what was measured."""
