"""The graph of operations between model files and kernels, as plain data."""
