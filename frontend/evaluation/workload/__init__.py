"""Workloads: requests with the times at which they come, read from traces of real services or made up."""
