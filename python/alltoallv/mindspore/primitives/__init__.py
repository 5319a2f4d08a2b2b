"""MindSpore's communication primitives, such as ``ops.AlltoAllV``, on CPU; `install` puts them there."""
