"""Float checkpoints saved with quantized weights."""
