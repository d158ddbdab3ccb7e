"""Models by their names at the Hugging Face hub: names, the cache on this machine, downloads."""
