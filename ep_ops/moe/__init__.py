"""MoECommunicator: dispatch and combine of MoE layers in one object, with replicas of experts
(docs/moe-communicator.md)."""

from ep_ops.moe.communicator import MoECommunicator
from ep_ops.moe.config import MoECommunicatorConfig, Quant
from ep_ops.moe.placement import Move, balanced, moves
from ep_ops.moe.records import DispatchHandle, DispatchOutput, Request

__all__ = [
    "DispatchHandle", "DispatchOutput", "MoECommunicator", "MoECommunicatorConfig", "Move", "Quant", "Request",
    "balanced", "moves",
]  # fmt: skip
