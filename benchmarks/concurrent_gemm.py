"""Time a grouped GEMM concurrently with a dispatch or a combine that it does not depend on.

    torchrun --nproc-per-node 2 benchmarks/concurrent_gemm.py [--width 2048] [--experts 256] [--seconds 4]

Needs quack-kernels 0.6.5 on GPUs. In one run, with pauses between calls and without: the GEMM alone, the operation
alone, one after the other, and both at once. ``hidden`` is (one after the other - both at once) / the operation alone.
No kernel that starts tiles as rows arrive can hide more than this.
"""

import argparse
import time

import torch
import torch.distributed as dist

import ep_ops

parser = argparse.ArgumentParser()
for name, default in {"tokens": 4096, "hidden": 7168, "experts": 256, "top-k": 8, "width": 2048}.items():
    parser.add_argument(f"--{name}", type=int, default=default)
parser.add_argument("--seconds", type=float, default=4.0)
args = parser.parse_args()
gpu = torch.cuda.is_available()
dist.init_process_group("nccl" if gpu else "gloo")
rank = dist.get_rank()
device = torch.device("cuda", rank % torch.cuda.device_count()) if gpu else torch.device("cpu")
dtype = torch.bfloat16 if gpu else torch.float32
if gpu:
    torch.cuda.set_device(device)
sizes = dict(num_experts=args.experts, hidden_size=args.hidden, top_k=args.top_k, max_tokens_per_rank=args.tokens)
comm = ep_ops.Communicator(**sizes, device=device, dtype=dtype, alignment=8)
torch.manual_seed(rank)
x = torch.randn(args.tokens, args.hidden, device=device, dtype=dtype)
idx = torch.rand(args.tokens, args.experts, device=device).topk(args.top_k).indices
weights = torch.full((args.tokens, args.top_k), 1 / args.top_k, device=device)
capacity = -(-args.tokens * args.top_k * 5 // 4 // 128) * 128 + 128 * comm.num_local_experts
w_in = torch.randn(comm.num_local_experts, args.hidden, 2 * args.width, device=device, dtype=dtype) * args.hidden**-0.5
w_out = torch.randn(comm.num_local_experts, args.width, args.hidden, device=device, dtype=dtype) * args.width**-0.5
with torch.no_grad():
    rows = comm.dispatch(x, idx, weights, capacity=capacity, zeros=True)
    y = torch.randn(rows.x.shape[0], args.hidden, device=device, dtype=dtype)
    h = torch.randn(rows.x.shape[0], args.width, device=device, dtype=dtype)
offs, route = rows.route.offs, rows.route
ends = torch.cat([offs.new_zeros(1), offs])


def quack(dynamic, wgrad=False):
    from quack.gemm_interface import gemm

    if wgrad:
        return lambda: gemm(h.mT, y, cu_seqlens_k=ends, dynamic_scheduler=dynamic, tuned=False)
    return lambda: gemm(rows.x, w_in, cu_seqlens_m=ends, dynamic_scheduler=dynamic, tuned=False)


gemms = {"first GEMM, torch": lambda: ep_ops.nn.grouped_mm(rows.x, w_in, offs)}
if gpu:
    gemms |= {"first GEMM, quack": quack(False), "first GEMM, quack dynamic": quack(True)}
    gemms |= {"second weights' gradient, quack dynamic": quack(True, wgrad=True)}
operations = {
    "dispatch": (lambda: comm.dispatch_start(x, idx, weights, capacity=capacity), comm.dispatch_wait),
    "combine": (lambda: comm.combine_start(y, route, rows.weights), comm.combine_wait),
}


def timed(call, pause):
    """Return the mean ms of a call on the slowest rank; all ranks make the same number of calls. Without GPUs, make the
    calls and return 0."""
    if not gpu:
        call()
        return 0.0
    count, spent = 60 if pause else int(args.seconds / 0.006), 0.0
    for _ in range(count if pause else 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        time.sleep(0.02)
        dist.all_reduce(torch.zeros(1, device=device))
        torch.cuda._sleep(1_000_000)  # ranks have met, and the host gets ahead
        begin.record()
        for _ in range(1 if pause else count):
            call()
        end.record()
        end.synchronize()
        spent += begin.elapsed_time(end)
    mean = torch.tensor([spent / count], device=device)
    dist.all_reduce(mean, dist.ReduceOp.MAX)
    return float(mean)


def ways(run, start, wait):
    """Return functions that run the GEMM ``run`` and a split operation, alone and together."""

    def at_once():
        ticket = start()
        run()
        wait(ticket)

    return {
        "gemm": run,
        "alone": lambda: wait(start()),
        "after": lambda: (wait(start()), run()),
        "together": at_once,
    }


with torch.no_grad():
    for pause in (True, False):
        for what, run in gemms.items():
            for name, (start, wait) in operations.items():
                t = {key: [timed(call, pause) for _ in range(2)][-1] for key, call in ways(run, start, wait).items()}
                load = f"{torch.cuda.clock_rate()} MHz {torch.cuda.power_draw() // 1000} W" if gpu and not pause else ""
                if rank == 0:
                    figures = ", ".join(f"{key} {value:.3f}" for key, value in t.items())
                    hidden = (t["after"] - t["together"]) / max(t["alone"], 1e-9)
                    kind = "paused" if pause else "sustained"
                    print(f"{kind} | {what} | {name} | {figures} | hidden {hidden:.0%} {load}")
comm.destroy()
dist.destroy_process_group()
