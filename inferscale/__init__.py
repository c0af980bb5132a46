"""InferScale: memories as KV, placed straight into the engine's cache."""

__version__ = "0.1.0"
