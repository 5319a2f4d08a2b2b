"""A folder for PYTHONPATH: every Python that starts with it installs the emulator's operators after torch_npu."""
