"""Finds out which launcher started this rank, and has a launcher of its own."""
