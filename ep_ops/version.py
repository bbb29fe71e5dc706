"""The version, which ranks compare when they make a communicator."""

__version__ = "0.1.0"
