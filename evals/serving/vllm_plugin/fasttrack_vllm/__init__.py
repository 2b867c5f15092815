"""Plug-ins for vLLM that the fast-track suite's serving lanes use."""
