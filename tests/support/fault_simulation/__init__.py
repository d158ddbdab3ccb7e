"""The whole of Quire in one thread: clients, supervisor and engines on a virtual clock and network, with faults.

A seed decides everything, so a seed that fails does so again. `run` in `simulation.py` is the way in.
"""
