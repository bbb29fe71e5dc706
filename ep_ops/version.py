"""The version, the only place that states it. Ranks compare it when they create a communicator."""

__version__ = "0.1.0"
