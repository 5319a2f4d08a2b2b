"""How a call runs at once: its group, its tensors, its declaration and handle, who observes it."""
