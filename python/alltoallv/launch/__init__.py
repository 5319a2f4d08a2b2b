"""How ranks start: which launcher started this one, and a launcher of our own."""
