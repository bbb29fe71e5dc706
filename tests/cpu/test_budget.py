"""How many multiprocessors dispatch and combine take: the model's choice, and what a `with` block sets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
import toy
from torch._dynamo.testing import CompileCounterWithBackend

from cute_kernels.heap import Problem
from ep_ops.backends.budget import ANY, Budget
from ep_ops.backends.cute.sm_model import TokenTraffic, default_budget
from ep_ops.backends.cute.tuning import Tuning
from ep_ops.commands.decode import memory_speed

H200 = 132


def of(experts: Sequence[int], top_k: int, hidden: int = 7168, slices: int = 4) -> TokenTraffic:
    return TokenTraffic.of(Problem(len(experts), tuple(experts), top_k, hidden, "bf16", 4096), slices)


EVEN = {world_size: of((256 // world_size,) * world_size, 8) for world_size in (1, 2, 4, 8, 16)}


def pushers(traffic: TokenTraffic, blocks: int, tokens: int = 4096, gpu: str = "NVIDIA H100 PCIe") -> int:
    knobs = Tuning(gpu, traffic.ranks).knobs("combine", traffic.layout, "?" * bool(traffic.sum_bytes), tokens)
    return traffic.pushers(blocks, knobs)


def chosen(traffic: TokenTraffic, sms: int, dispatch: int | None, combine: int | None, most: int = 100) -> Budget:
    return default_budget(traffic, Tuning("", traffic.ranks), sms, most, dispatch, combine)


def test_rows_of_a_token():
    assert of((8,), 2, 8, 1) == TokenTraffic(1, 1, 0, 2, 16, 1)
    assert of((1, 1, 1, 1), 1, 16, 3) == TokenTraffic(4, 1, 0.75, 1, 32, 3)
    two = of((2, 2), 2, 8, 1)  # of 6 pairs 2 stay on one rank
    assert math.isclose(two.reached, 5 / 3) and math.isclose(two.crossing, 5 / 6)
    # Every token reaches every rank that has experts; more names than experts name no others.
    assert of((3, 0, 2), 5).reached == of((3, 0, 2), 32).reached == 2
    # Owners add the rows of two ranks, if a warp has a lane for the sum of the other rank.
    assert two.adds_own and not of((16, 17), 32).adds_own and not of((1, 1, 1, 1), 1).adds_own


def test_what_was_measured_to_be_enough():
    """4 ranks, 256 experts, 8 a token: 22 SMs fill the link in a dispatch, 10 in a gathering combine, and 20 that push
    and 12 that sum in a combine; on 2 ranks 48, and of 112 that combine some 44 push. Short rows take a few more."""
    traffic = EVEN[4]
    assert (traffic.dispatch_sms(H200), traffic.combine_sms(H200), traffic.gather_sms(H200)) == (22, 32, 10)
    assert EVEN[2].dispatch_sms(H200) == 48 and 58 <= EVEN[2].combine_sms(H200) <= 66
    combines = [chosen(EVEN[n], H200, None, None).combine for n in (1, 2, 4)]
    assert combines == [EVEN[1].combine_sms(H200), 110, 110]
    assert pushers(traffic, 32) == 20 and pushers(traffic, 64) == 28 and 42 <= pushers(EVEN[2], 112) <= 46
    assert 42 <= traffic.scaled_sms(H200) <= 46 and 56 <= EVEN[2].scaled_sms(H200) <= 66
    assert of((64,) * 4, 1).dispatch_sms(H200) == 20  # few rows, of which enough must be under way
    short = of((64,) * 4, 8, 2048, 1)
    assert 32 <= short.combine_sms(H200) <= 36 and 20 <= pushers(short, 36) <= 22


def test_alone_the_memory_is_the_limit():
    """One rank, 8 rows of 14336 bytes a token: 9 are moved in a dispatch, at 80 GB/s an SM and 3.7 TB/s in all; twice 9
    while 8.5 times 4 slices of 90 ns are scaled. That may be more than half of a small GPU: there is no link."""
    alone = EVEN[1]
    assert alone.dispatch_sms(H200) == 2 * math.ceil(1.2 * 3.7e12 / 80e9 / 2) == 56
    assert alone.scaled_sms(H200) == 2 * math.ceil(1.5 * 8.5 * 4 * 90e-9 / (14336 * 18 / 3.7e12) / 2) == 66
    assert alone.dispatch_sms(78) == 56 and alone.scaled_sms(60) == 60
    # On two ranks too it is what limits `scaled`, which moves 22 rows then: x is staged besides.
    two = EVEN[2]
    busy = (8 + two.reached / 2) * 4 * 90e-9
    assert two.scaled_sms(H200) == 2 * math.ceil(1.5 * busy * 3.7e12 / 14336 / (2 * (two.reached + 8) + 2) / 2) == 58


def test_fast_memory_leaves_spare_blocks_to_sums():
    """2 H200s, of 110 blocks: 26 push grouped rows, 18 to 22 token-major ones, 36 and about 30 sums in a format. Of few
    tokens 34 to 42 push. On 2 H100s more push. With 4 ranks both GPUs have the same."""
    two, fast = EVEN[2], "NVIDIA H200"
    formatted = two.in_format(7392)
    found = [pushers(traffic, 110, gpu=fast) for traffic in (two, two.copies, formatted, formatted.copies)]
    assert found == [26, 19, 36, 30] and [pushers(two, 110), pushers(two.copies, 110)] == [42, 29]
    assert [pushers(two, 110, n, fast) for n in (64, 2048, 2049)] == [36, 36, 26]
    assert pushers(two.copies, 110, 2048, fast) == 29
    assert [pushers(EVEN[4], n, gpu=fast) for n in (32, 64, 110)] == [pushers(EVEN[4], n) for n in (32, 64, 110)]
    for n in range(2, 140):
        assert 1 <= pushers(two, n, gpu=fast) < n and pushers(two, n, gpu=fast) <= pushers(two, n)


@pytest.mark.parametrize(("clock", "bits", "speed"), [(3_201_000, 6016, 4.81e12), (2_619_000, 5120, 3.35e12)])
def test_memory_speed_by_clock_and_width(clock, bits, speed, monkeypatch):
    """The values of H200s and H100s."""
    properties = SimpleNamespace(memory_clock_rate=clock, memory_bus_width=bits)  # kHz
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert memory_speed(torch.device("cuda", 0)) == pytest.approx(speed, rel=0.001)


def test_few_blocks_are_shared_as_many_are():
    """19.9 push and 11.2 sum where there are enough of them: nearly two of three."""
    assert [pushers(EVEN[4], blocks) for blocks in (2, 3, 4, 8, 16, 32)] == [1, 2, 3, 5, 10, 20]


def test_what_is_asked_for_is_what_is_taken():
    traffic = EVEN[4]
    asked = chosen(traffic, H200, 30, 40)
    assert (*now(asked), asked.gather, asked.scaled) == (30, 40, 40, 40)
    model = chosen(traffic, H200, None, None)
    assert (*now(model), model.gather, model.scaled) == (22, 110, 10, 44)


def test_more_ranks_need_fewer():
    """More of what is moved waits for the link. On one rank a combine stages all sums, on two only half of them."""
    for choose in (
        TokenTraffic.dispatch_sms,
        TokenTraffic.combine_sms,
        TokenTraffic.gather_sms,
        TokenTraffic.scaled_sms,
    ):
        found = [choose(EVEN[world_size], H200) for world_size in EVEN]
        assert found[1:] == sorted(found[1:], reverse=True) and found[0] > found[2] > found[-1]


@pytest.mark.parametrize("experts", [(1,), (256,), (3, 5), (0, 4), (64,) * 4, (1,) * 8])
@pytest.mark.parametrize("top_k", [1, 8, 32])
@pytest.mark.parametrize("sms", [1, 8, 16, 20, 78, 132, 160])
def test_every_gpu_has_blocks_for_everything(experts, top_k, sms):
    traffic = of(experts, top_k)
    for asked in (None, 1, 1000):
        budget = chosen(traffic, sms, asked, asked, sms - 17)
        assert 1 <= budget.dispatch <= max(1, sms - 17) and 2 <= budget.combine <= max(2, sms)
        assert 1 <= budget.gather <= max(2, sms) and 1 <= budget.scaled <= max(1, sms - 17)
    assert traffic.dispatch_sms(sms) <= sms and traffic.combine_sms(sms) <= sms
    if len(experts) > 1:
        assert max(traffic.dispatch_sms(sms), traffic.combine_sms(sms)) <= sms // 2, "the rest is for computation"
    for blocks in range(2, 140):
        assert 1 <= pushers(traffic, blocks) < blocks


def now(budget: Budget) -> tuple[int, int]:
    return budget.dispatch, budget.combine


def test_blocks_nest_and_restore():
    budget = Budget(24, 64, 22, 44, 100, 132)
    with budget.changed(dispatch=16, combine=None):
        assert now(budget) == (16, 64) and (budget.gather, budget.scaled) == (22, 44)
        with budget.changed(dispatch=None, combine=32):
            assert now(budget) == (16, 32) and (budget.gather, budget.scaled) == (32, 32)
            with pytest.raises(KeyError), budget.changed(dispatch=1, combine=2):
                assert now(budget) == (1, 2)
                raise KeyError
            assert now(budget) == (16, 32)
        assert now(budget) == (16, 64)
    assert now(budget) == (24, 64) and (budget.gather, budget.scaled) == (22, 44)


def test_nothing_takes_more_than_there_is():
    """Pushes and sums may take the whole GPU. A dispatch, and `scaled`, which is one, leave room for blocks that
    wait."""
    budget = Budget(110, 140, 150, 120, most_dispatch=100, most_combine=132)
    assert (*now(budget), budget.gather, budget.scaled) == (100, 132, 132, 100)
    with budget.changed(dispatch=None, combine=120):
        assert (*now(budget), budget.gather, budget.scaled) == (100, 120, 120, 100)
        with budget.changed(dispatch=None, combine=80):
            assert (*now(budget), budget.gather, budget.scaled) == (100, 80, 80, 80)
    follows = Budget(110, 120, most_dispatch=100, most_combine=132)  # gather and scaled are what combine is
    assert (follows.gather, follows.scaled) == (120, 100)


def test_everything_takes_something():
    """One SM dispatches or gathers; a combine needs one that pushes and one that sums."""
    none_left = Budget(0, 0, -3, -3, most_dispatch=0, most_combine=0)
    assert (none_left.most_dispatch, none_left.most_combine) == (1, 2)
    assert (*now(none_left), none_left.gather, none_left.scaled) == (1, 2, 1, 1)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"dispatch": 0}, "dispatch is 0; allowed: None or an int of 1..100 multiprocessors"),
        ({"dispatch": 101}, "dispatch is 101; allowed: None or an int of 1..100"),
        ({"combine": 1}, "combine is 1; allowed: None or an int of 2..132"),
        ({"combine": 133}, "combine is 133;"),
        ({"combine": 32.0}, "combine is 32.0;"),
        ({"dispatch": True}, "dispatch is True;"),
    ],
)
def test_out_of_range(given, text):
    budget = Budget(24, 64, 22, 44, 100, 132)
    with pytest.raises(ValueError, match=text), budget.changed(**{"dispatch": None, "combine": None} | given):
        pass
    assert now(budget) == (24, 64)


@pytest.fixture
def comm():
    with toy.communicator() as comm:
        yield comm


@pytest.fixture
def seen(comm, monkeypatch):
    """The budget of each dispatch and combine that ran."""
    calls = []

    bind = comm.backend.bind

    def recording(spec, a):
        run = bind(spec, a)

        def record(a):
            calls.append(now(comm.backend.budget))
            return run(a)

        return record if spec.kind in ("dispatch", "combine") else run

    monkeypatch.setattr(comm.backend, "bind", recording)
    comm.calls.forget()
    return calls


@pytest.mark.parametrize("backend", [None, "eager", pytest.param("inductor", marks=pytest.mark.drawn)])
def test_read_when_the_operators_run(comm, seen, backend):
    """One compilation serves all budgets."""
    run, counter = toy.layer, None
    if backend is not None:
        torch._dynamo.reset()
        counter = CompileCounterWithBackend(backend)
        run = torch.compile(toy.layer, backend=counter, fullgraph=True)
    args = (comm, *toy.inputs(5), toy.scales())
    usual = now(comm.backend.budget)
    run(*args)
    with comm.sm_budget(dispatch=16, combine=32):
        run(*args)
        with comm.sm_budget(combine=8):
            run(*args)
    run(*args)
    assert seen == [usual] * 2 + [(16, 32)] * 2 + [(16, 8)] * 2 + [usual] * 2
    assert counter is None or counter.frame_count == 1


def test_inside_a_compiled_function(comm, seen):
    """A budget inside a compiled function works where the graph may break, and is rejected, not ignored, where it may
    not."""

    def inside(*args):
        with comm.sm_budget(dispatch=16, combine=32):
            return toy.layer(comm, *args)

    args = (*toy.inputs(5), toy.scales())
    torch._dynamo.reset()
    torch.compile(inside, backend="eager")(*args)
    assert seen == [(16, 32)] * 2
    torch._dynamo.reset()
    with pytest.raises(Exception, match="sm_budget"):
        torch.compile(inside, backend="eager", fullgraph=True)(*args)
    assert now(comm.backend.budget) == (1, 2)


def test_the_reference_takes_any(comm):
    with comm.sm_budget(dispatch=ANY, combine=ANY):
        pass
    with pytest.raises(ValueError, match="dispatch is 0"), comm.sm_budget(dispatch=0):
        pass


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)])
def test_blocks_that_end_in_any_order(order: tuple[int, ...]) -> None:
    """When blocks end in any order, as those of generators do, the budgets of the other blocks stay, and at the end the
    default."""
    budget = Budget(24, 96, modelled=(True, True))
    before = {name: value for name, value in vars(budget).items() if name[0] != "_"}
    given: list[tuple[int | None, int | None]] = [(16, None), (8, 40), (None, 32)]
    blocks = [budget.changed(*limits) for limits in given]
    for block in blocks:
        block.__enter__()
    ended: set[int] = set()
    for index in order:
        blocks[index].__exit__(None, None, None)
        ended.add(index)
        left = [limits for other, limits in enumerate(given) if other not in ended]
        dispatch = next((limit for limit, _ in reversed(left) if limit is not None), 24)
        combine = next((limit for _, limit in reversed(left) if limit is not None), 96)
        assert (budget.dispatch, budget.combine) == (dispatch, combine)
    assert {name: value for name, value in vars(budget).items() if name[0] != "_"} == before
