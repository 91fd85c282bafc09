"""Plan, run and check Mixture-of-Experts training: memory, communication and compute, jointly."""

__version__ = "0.1.0"
