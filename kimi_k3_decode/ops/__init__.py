"""One folder an operation: contract (operands and roles), oracle (plain torch, rounding points marked), schedule, kernel, launch."""
