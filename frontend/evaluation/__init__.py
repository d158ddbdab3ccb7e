"""Evaluation: workloads, their replay and simulation, benchmarks, and reports of what they measure."""
