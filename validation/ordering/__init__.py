"""The memory-ordering audit: proves on the binary and on the launch graph that only static weights are read before a wait."""
