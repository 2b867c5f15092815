"""Things that decode: the in-process engine here, servers beside it. A check gives a target its role."""
