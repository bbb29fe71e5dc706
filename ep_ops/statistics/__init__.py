"""Statistics of a communicator: counts in device memory, and how late ranks began their last operations.

:meth:`ep_ops.Communicator.statistics` and :meth:`ep_ops.Communicator.lateness` return these records.
"""

from .lateness import Lateness
from .plot import plot_begun, plot_waits
from .record import Statistics, prometheus

__all__ = ["Lateness", "Statistics", "plot_begun", "plot_waits", "prometheus"]
