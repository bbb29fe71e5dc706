"""Comparison of expert ids when activation checkpointing runs a forward pass again.

A router that has changed since the forward pass (a new bias, another state of its random generator) sends tokens to
other experts, and the gradients would belong to a forward pass that never ran. So the expert ids of each operator
in a checkpointed region are kept, and compared when the region runs again. Where selective checkpointing keeps the
results of a dispatch, nothing is sent again, and the gradients compare the ids.

PyTorch has no public interface that tells which region is running; if it is not found, nothing is compared. Compiled
functions are not compared: they raise an error if a tensor that recomputation reads was changed in place.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint

top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
"""Returns the hooks of saved tensors, which checkpointing sets; None: there are none."""
_current_task = torch._C._current_graph_task_id
_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
dispatch_modes = torch._C._len_torch_dispatch_stack
"""Returns the number of modes, one of which selective checkpointing adds."""


class _Region:
    """The expert ids of a checkpointed region, in the order of its dispatches and combines."""

    def __init__(self) -> None:
        self.ids: list[tuple[Tensor, int]] = []  # with their versions
        self.passed: dict[Any, tuple[int, Tensor | None]] = {}
        """Run in backward -> how many of ``ids`` it has passed, and the last ids that it used."""

    def note(self, topk_idx: Tensor, again: Any) -> None:
        """Keep the ids. ``again``: the run in backward, which compares them instead; None in the forward pass.

        A run in backward may leave out operators whose results selective checkpointing keeps.
        """
        if again is None:
            self.ids.append((topk_idx, topk_idx._version))
            return
        passed, last = self.passed.get(again, (0, None))
        if last is not None and last.data_ptr() == topk_idx.data_ptr():
            return  # of the same route
        remaining = range(passed, len(self.ids))
        found = next((index for index in remaining if _same(topk_idx, *self.ids[index])), None)
        if found is None and remaining:
            raise _changed()
        self.passed[again] = passed if found is None else found + 1, topk_idx


_regions: weakref.WeakKeyDictionary[Any, _Region] = weakref.WeakKeyDictionary()


class _Reentrant(threading.local):
    """The region of ``checkpoint(..., use_reentrant=True)`` that runs in this thread, and its run in backward."""

    region: tuple[_Region, Any] | None = None
    task: int = -1  # the backward that called it; the backward of the region itself is another one


reentrant = _Reentrant()
reentrant_runs: list[None] = []
"""An element for each such region that runs, in any thread, for callers that only need to know whether there is one."""


def note(topk_idx: Tensor) -> None:
    """Keep the expert ids of an operator in a checkpointed region, or compare them if the region runs again.

    Raises:
        RuntimeError: the ids differ.
    """
    running = _running()
    if running is not None:
        region, again = running
        region.note(topk_idx, again)


def kept(topk_idx: Tensor) -> tuple[Tensor, int] | None:
    """Return what the gradient of a dispatch or combine passes to :func:`compare` if selective checkpointing may keep
    results, else None."""
    selective = dispatch_modes() > 0 and type(topk_idx) is Tensor and top_hooks(False) is not None
    return (topk_idx, topk_idx._version) if selective else None


def compare(topk_idx: Tensor, forward_idx: Tensor, version: int) -> None:
    """Raise RuntimeError unless the expert ids are those of the forward pass. ``version``: of ``forward_idx``, then."""
    if not _same(topk_idx, forward_idx, version):
        raise _changed()


def _same(topk_idx: Tensor, forward_idx: Tensor, version: int) -> bool:
    """Return whether expert ids are equal. Synchronizes the host if the tensors are different ones; returns True while
    a CUDA graph is captured."""
    if topk_idx.is_cuda and torch.cuda.is_current_stream_capturing():
        return True
    if topk_idx.data_ptr() == forward_idx.data_ptr() and topk_idx.shape == forward_idx.shape:
        return forward_idx._version == version
    return torch.equal(topk_idx, forward_idx)


def _changed() -> RuntimeError:
    return RuntimeError(
        "topk_idx differs from the expert ids of the forward pass, which activation checkpointing runs again; allowed:"
        " a router that chooses the same experts until backward has ended (change its bias after backward, and draw"
        " random numbers from PyTorch's default generator)"
    )


def _running() -> tuple[_Region, Any] | None:
    """Return the innermost checkpointed region that runs, and its run in backward (None in the forward pass)."""
    others: list[Any] = []  # hooks that the program has set inside of the region, such as save_on_cpu
    try:
        while (hooks := top_hooks(False)) is not None:
            if (found := _region_of(hooks[0])) is not None:
                return found
            others.append(hooks)
            _pop_hooks()
        return reentrant.region if reentrant.task == _current_task() else None
    finally:
        for hooks in reversed(others):
            _push_hooks(*hooks)


def _region_of(pack: Any) -> tuple[_Region, Any] | None:
    """Return the region and the run whose hook for saved tensors this is; None: it is another hook."""
    pack = inspect.unwrap(pack)
    names = getattr(getattr(pack, "__code__", None), "co_freevars", ())
    cells = dict(zip(names, getattr(pack, "__closure__", None) or (), strict=False))
    if "frame" in cells:
        frame, again = cells["frame"].cell_contents, None
    elif "target_frame_ref" in cells and "gid" in cells:
        frame, again = cells["target_frame_ref"].cell_contents(), cells["gid"].cell_contents
    else:
        return None
    if not isinstance(frame, getattr(checkpoint, "_CheckpointFrame", ())):
        return None
    return _regions.setdefault(frame, _Region()), again


def watch_reentrant() -> None:
    """Keep :data:`reentrant` up to date."""
    function = checkpoint.CheckpointFunction
    function.forward = staticmethod(_within(function.forward, False))  # type: ignore[method-assign]
    function.backward = staticmethod(_within(function.backward, True))  # type: ignore[method-assign]


def _within(run: Callable[..., Any], backward: bool) -> Callable[..., Any]:
    def within(ctx: Any, *args: Any) -> Any:
        outer = reentrant.region, reentrant.task
        if not backward:
            ctx.ep_region = _Region()
        reentrant.region, reentrant.task = (ctx.ep_region, object() if backward else None), _current_task()
        reentrant_runs.append(None)
        try:
            return run(ctx, *args)
        finally:
            reentrant.region, reentrant.task = outer
            reentrant_runs.pop()

    return within
