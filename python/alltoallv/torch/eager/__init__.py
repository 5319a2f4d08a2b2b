"""How a call runs at once: its group, its tensors, the declaration of its collective, its handle."""
