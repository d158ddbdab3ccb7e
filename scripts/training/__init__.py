"""Models in torch that are trained beside the demo model."""
