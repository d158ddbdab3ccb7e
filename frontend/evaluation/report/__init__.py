"""What a run has measured: figures, tables, JSON and pages."""
