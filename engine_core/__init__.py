"""The engine process: requests, scheduler, KV cache, `step()`, executor and the IO thread."""
