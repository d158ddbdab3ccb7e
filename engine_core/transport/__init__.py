"""The engine's socket: its IO thread, clients, and the queues between it and the step loop."""
