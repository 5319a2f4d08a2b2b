"""This package holds what the front ends share and the C++ extension does not do."""
