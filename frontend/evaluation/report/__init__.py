"""Reports of runs: figures, tables, JSON files and pages."""
