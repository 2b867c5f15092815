"""Kernel records: each launch against its FP64 oracle on a GPU, and its speed beside the library kernel that does the same."""
