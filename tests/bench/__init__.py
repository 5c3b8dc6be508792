"""What agentfly costs on this machine, as ratios of one run: ``python -m tests.bench``."""
