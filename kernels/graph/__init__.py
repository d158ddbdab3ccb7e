"""Graph of operations between model files and kernels, and its lowering to a plan."""
