"""Workloads: requests with arrival times, read from traces of real services or synthetic."""
