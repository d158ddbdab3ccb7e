"""How a request decodes: single sequences, beam search, pooling."""
