"""poprun: several instances of a program on this machine, each with its share of the replicas."""
