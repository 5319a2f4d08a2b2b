"""What the front ends share and the extension does not do."""
