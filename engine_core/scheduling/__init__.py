"""The scheduler: admission, the waiting queue, prefill budget, policies and prefix sharing."""
