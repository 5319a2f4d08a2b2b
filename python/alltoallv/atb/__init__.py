"""Provides operators in ATB's shape: parameters, and operations that are made from them."""
