"""Defines how quantized collectives encode, and the state that error feedback keeps."""
