"""The grid of domains that DeepEP's clients see."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ep_ops.group import meeting
from ep_ops.group.exchange import Exchange
from ep_ops.group.topology import divide, gpu_facts


def get_physical_domain_size(group: Any) -> tuple[int, int]:
    """Return the number of NVLink domains of ``group`` and of ranks in each. Collective.

    Ranks without a GPU are in one domain.

    Raises:
        ValueError: the domains have unequally many ranks.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    exchange = Exchange(group, device)
    with exchange.turn:
        meeting.meet(exchange, "get_physical_domain_size")
        domains = divide(exchange.all_gather_object(gpu_facts(device)), None)
    return len(domains), len(domains[0])


def get_logical_domain_size(group: Any, allow_hybrid_mode: bool = True) -> tuple[int, int]:
    """Return the grid that counts and row orders follow: 1 and the number of ranks.

    DeepEP orders rows by scale-up rank, of which there are fewer than ranks in its hybrid mode. Here rows are ordered
    by source rank, and ``allow_hybrid_mode`` changes nothing.
    """
    return 1, dist.get_world_size(group)
