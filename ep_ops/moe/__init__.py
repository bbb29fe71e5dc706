"""MoECommunicator: dispatch and combine of MoE layers in one object, with replicas of experts and statistics
(docs/moe-communicator.md)."""

from ep_ops.moe.communicator import MoECommunicator
from ep_ops.moe.config import MoECommunicatorConfig, Quant
from ep_ops.moe.placement import Move, balanced, moves
from ep_ops.moe.plot import plot_begun, plot_waits
from ep_ops.moe.records import DispatchHandle, DispatchOutput, Request
from ep_ops.moe.statistics import Stats

__all__ = [
    "DispatchHandle", "DispatchOutput", "MoECommunicator", "MoECommunicatorConfig", "Move", "Quant", "Request", "Stats",
    "balanced", "moves", "plot_begun", "plot_waits",
]  # fmt: skip
