"""Training runs: a folder that explains itself, checkpoints, exact resume, metrics, reports."""
