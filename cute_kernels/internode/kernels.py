"""The kernels of several NVLink domains, by the kernels of one domain whose place they take."""

from typing import Any

from ..latency.combine import LatencyCombine
from ..latency.dispatch import LatencyDispatch
from ..throughput.combine import Combine
from ..throughput.publish import Publish
from ..throughput.publish_tokens import PublishTokens
from .combine import CombineAcross
from .latency_combine import LatencyCombineAcross
from .latency_dispatch import LatencyDispatchAcross
from .publish import PublishAcross, PublishTokensAcross

ACROSS: dict[type[Any], type[Any]] = {
    Combine: CombineAcross,
    LatencyCombine: LatencyCombineAcross,
    LatencyDispatch: LatencyDispatchAcross,
    Publish: PublishAcross,
    PublishTokens: PublishTokensAcross,
}
