"""A folder for PYTHONPATH: every Python that starts with it gets the emulator's operators with torch_npu."""
