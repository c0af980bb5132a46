"""How close injected KV comes to full prefill of exactly the same tokens."""
