"""Triton kernels on emulated NPUs: a backend of Triton whose last stage makes a program of NumPy.

Triton's own front end compiles a kernel to its IR (TTIR), as for a device. `ir` reads that, `program` makes a Python
program of it, whose operators are in `operators`, and `backend` is what Triton finds as its active driver.
"""
