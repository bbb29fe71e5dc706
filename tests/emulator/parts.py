"""Checks of parts that kernels share, in small kernels of their own."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

from . import machine
from .threads import WARP, Launch, look_again, run

FLAGS = 20


class Posting:
    """Two warps post `FLAGS` flags each, all before the warp that sets them begins, as far as the queues hold them."""

    options = {"block": (3 * WARP, 1, 1)}

    def kernel(self, args: Any) -> None:
        import cutlass

        from cute_kernels.throughput.outbox import close, deliver, new_outbox, post

        from . import arch

        outbox = new_outbox(cutlass.memory.SmemAllocator(), 2)
        warp = arch.thread_idx()[0] // WARP
        if warp < 2:
            for count in range(FLAGS):
                post(outbox, warp, count, warp * FLAGS + count)
            close(outbox, warp, FLAGS)
            return
        for _ in range(200):
            look_again()
        deliver(outbox, args.ranks, "flag", 2 * FLAGS)


def posted(draw: random.Random) -> None:
    """Every flag that a worker posts is set once, whatever the setting warp is late by."""
    from cute_kernels.views import Words

    memory = machine.new_memory(1 << 16)
    flags = memory.take(2 * FLAGS * 8, "flags", 0)
    heap = SimpleNamespace(problem=SimpleNamespace(num_domains=1))
    ranks = SimpleNamespace(heap=heap, mark=7, peer=lambda rank: flags, view=lambda name, address: Words(address))
    run([Launch(Posting(), SimpleNamespace(ranks=ranks, blocks=1))], draw)
    words = [int(memory.load_long(flags + 8 * code)) for code in range(2 * FLAGS)]
    assert words == [7] * 2 * FLAGS, words


class Walking:
    """Two warps begin to walk through the lists of a route."""

    options = {"block": (2 * WARP, 1, 1)}
    WORLD, ROWS, TOKENS = 3, 40, 6

    def kernel(self, args: Any) -> None:
        import cutlass
        from cutlass import Int32

        from cute_kernels.arrivals import begin_walk

        heap = SimpleNamespace(problem=SimpleNamespace(world_size=self.WORLD))
        sources = cutlass.memory.SmemAllocator().allocate_array(Int32, self.WORLD + 1)
        walk = begin_walk(SimpleNamespace(heap=heap), sources, args.lists, Int32(self.ROWS), Int32(self.TOKENS))
        args.found.add((int(walk.items), tuple(int(sources[i]) for i in range(self.WORLD + 1))))


def walked(draw: random.Random) -> None:
    """A walk has as many items of each source as the one with most copies has, at most the tokens of a source. It
    begins inside of the lists, whatever integers they hold."""
    import torch

    world, rows, tokens = Walking.WORLD, Walking.ROWS, Walking.TOKENS
    for sources in ([0, 2, 7, 9], [0, 0, 0, 0], [3, 40, 40, 40], [-5, 90, -7, 2**31 - 1]):
        memory, found = machine.new_memory(1 << 16), set[Any]()
        lists = torch.zeros(4 * rows + world + 3, dtype=torch.int32)
        lists[-(world + 1) :] = torch.tensor(sources, dtype=torch.int64).int()
        at = memory.put(lists, "lists")
        run([Launch(Walking(), SimpleNamespace(lists=at, found=found, blocks=1))], draw)
        kept = [min(max(begin, 0), rows) for begin in sources]
        most = max(0, *(min(after, rows) - begin for begin, after in zip(kept, sources[1:], strict=False)))
        assert found == {(min(most, tokens) * world, tuple(kept))}, (sources, found)


def guarded(draw: random.Random) -> None:
    """A copy whose place in the lists or whose home cannot be has no rows, and is reported; others stay as they are."""
    from cutlass import Int32

    from cute_kernels import arrivals

    rows, tokens, reports = 8, 5, list[int]()
    arrivals.reject = lambda ranks, reason, begin, most: reports.append(int(begin))
    problem = SimpleNamespace(top_k=3, most_copies=2, world_size=4)
    ranks: Any = SimpleNamespace(heap=SimpleNamespace(problem=problem))
    home = (2 * tokens + 1) * problem.most_copies  # of token 1 of rank 2
    for given, fits in (
        ((5, 8, home, 2), True), ((0, 0, -7, 9), True), ((0, 3, home, 2), True), ((0, 1, home + 7, 2), True),
        ((-1, 1, home, 2), False), ((6, 9, home, 2), False), ((0, 4, home, 2), False), ((3, 1, home, 2), False),
        ((0, 1, home, 4), False), ((0, 1, home, 3), False), ((0, 1, home + 8, 2), False), ((0, 1, -1, 0), False),
    ):  # fmt: skip
        got = arrivals.guarded(ranks, Int32(rows), Int32(tokens), arrivals.Copy(*map(Int32, given)))
        assert int(got.rows) == (given[1] - given[0] if fits else 0), given
        assert reports == ([] if fits else [given[0]]), given
        reports.clear()


class Owning:
    """A warp looks at the copies of a token whose entries its lanes have."""

    options = {"block": (WARP, 1, 1)}

    def kernel(self, args: Any) -> None:
        from cutlass import Int32

        from cute_kernels.copies import copies_of

        from . import arch

        lane = int(arch.lane_idx())
        known = lane < len(args.ids)
        expert, row = (Int32(args.ids[lane]), Int32(lane)) if known else (Int32(-1), Int32(-1))
        args.found[lane] = copies_of(args.problem, expert, row)


def owned(draw: random.Random) -> None:
    """Ids that no expert has name no rank and no copy, and those of the other entries are as without them."""
    from cute_kernels.heap import Problem

    for held in ((3, 0, 5), (1,) * 40):
        problem, found = Problem(len(held), held, 8, 64, "bf16", 16), dict[int, Any]()
        none = [sum(held), sum(held) + 1, 2**31 - 1, -1, -(2**31)]
        ids = [*none, 0, sum(held) - 1, 1]
        run([Launch(Owning(), SimpleNamespace(problem=problem, ids=ids, found=found, blocks=1))], draw)
        holders = [rank for rank, experts in enumerate(held) for _ in range(experts)]
        want = [-1] * len(none) + [holders[0], holders[-1], holders[1]]
        assert [int(found[lane].holder) for lane in range(len(ids))] == want, held
        numbers = {rank: place for place, rank in enumerate(sorted({rank for rank in want if rank >= 0}))}
        copies = [int(found[lane].number) for lane in range(len(none), len(ids))]
        assert copies == [numbers[rank] for rank in want[len(none) :]], held
        assert int(found[0].mask) == (1 << len(numbers)) - 1, held


CHECKS = {"posted": posted, "walked": walked, "guarded": guarded, "owned": owned}
