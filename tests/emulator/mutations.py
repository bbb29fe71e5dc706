"""`python -m emulator.mutations [NAME ...]`: each wait of the kernels across NVLink domains, and those of token-major
rows of few tokens, are left out in turn, in a copy of their source, and some schedule of a check must go wrong.
Minutes; a nightly workflow runs it, and whoever changes a wait. So are a few barriers and bounds of kernels within a
domain.

The waits have the names that tests/simulator/__init__.py lists. What finds those between operations is that when one
has ended nothing is under way that was put in it, and a network in which words are behind all else that moves.

Of these the emulator shows nothing, because there is one order of all loads and stores in it:
- what `wire.arrived` does, which makes data visible that came another way than its word;
- `sync_warp` before the lane that ends a dispatch of few tokens: no route comes of a rank that rejects, so the
  rejection is known when ranks meet, and the kernel ends when its last lane does;
- what only orders loads and stores: the relay's fence, the latency kernels' `hold_epoch`, and `sync_warp` behind the
  leader's store where they place rows, whose lanes meet again anyway (tests/kernels look at the PTX);
- the barriers before a put of a whole block: the network's own stand-in for that put has one, as NVSHMEM's has.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
SEEDS = range(1, 17)
LONGEST = 300
"""Seconds after which a check is ended: a kernel without a wait may never end."""


class Mutation(NamedTuple):
    """In `file` of cute_kernels `old`, which stands there once, becomes `new`."""

    check: str
    file: str
    old: str
    new: str


SUMS, SENDING = "internode/sums.py", "internode/sending.py"
SYNC, OPERATION = "sync.py", "operation.py"
REPORTS, REJECTED = "internode/reports.py", "internode/rejected.py"
LANES = "{}arch.sync_warp()\n"
DISPATCH, COMBINE = "latency/dispatch.py", "latency/combine.py"
FAR, DISPATCH_ACROSS, COMBINE_ACROSS = (
    "internode/far.py", "internode/latency_dispatch.py", "internode/latency_combine.py"
)  # fmt: skip
STAGED, PUSH = "throughput/staged.py", "throughput/push.py"
PUBLISH_ACROSS, RELAYED = "internode/publish.py", "internode/relayed.py"
PLACE = "latency/place_tokens.py"
STORED = """            if mark & LAST != 0:
                store_slice(self.wire, acc, (notes.targets + note).load(), mark & END)
"""
POSTED = """            if mark & END != 0:
                post(outbox, warp, count[0], (notes.codes + note).load())
                count[0] += 1
"""
FEW_ROWS, FEW_ROWS_E4M3 = "gemm/few_rows.py", "gemm/few_rows_e4m3.py"
FEW_ROWS_WGMMA = "gemm/few_rows_wgmma.py"
QUANTIZED, PACKETS, QUANTIZE = "quantized_sums.py", "latency/sum_packets.py", "quantize.py"
HALF_BLOCK = "of_group(amax, form.block // len(sums))"

MUTATIONS = {
    "hello": Mutation(
        "latency_across_ahead", SYNC, '    met = ranks.wait("hello", peer, peer, 0)\n', "    met = Boolean(True)\n",
    ),
    "decided": Mutation("decided", SYNC, "ranks.own_mark ^ Int64(1 - Int32(good))", "ranks.own_mark"),
    "marks of a rank that has given up": Mutation("given_up", SYNC, " ^ (failed << GIVEN_UP)", ""),
    "puts of a rank that has given up": Mutation(
        "given_up_across", SYNC, "return (self.mark ^ (self.epoch << SHIFT)) >= 0", "return Boolean(True)"
    ),
    "rejection": Mutation(
        "across_rejected_small", REPORTS, '                ptx.st_release_sys(ranks.view("rejection").base',
        '                ptx.st_release_sys(ranks.word(17)',
    ),
    "sent": Mutation(
        "latency_across_rejected", REJECTED, "expected += number_in(said, ranks.base)",
        "expected += Int64(0)",
    ),
    "come": Mutation(
        "latency_across_rejected", REJECTED, "while come < expected and not stop", "while Int64(1) < 0"
    ),
    "route told": Mutation(
        "across_small", PUBLISH_ACROSS, '            come = ranks.wait("route", index, source, tile)\n        if',
        "            come = Boolean(True)\n        if",
    ),
    "weights arrived, rows arrived": Mutation(
        "across_pairs_small", SENDING, "            came = has_number(seen, ranks.base)\n",
        "            seen = with_number(ranks.base, (seen >> 7) & ((1 << 20) - 1))\n"
        "            came = Boolean(True)\n",
    ),
    "half launched, others told": Mutation(
        "half_launched", "alarm.py", "            sync.pass_on(ranks, failed)\n", "            pass\n"
    ),
    "weights told": Mutation(
        "across_two", PUBLISH_ACROSS, "come = sync.await_word(ranks, flag, source, tile) >= 0", "come = flag != 0"
    ),
    "rows told": Mutation(
        "across_small", RELAYED, "Int32(sync.await_word(ranks, flag, source, token))",
        "Int32((ptx.ld_relaxed_sys(flag) >> 7) & ((1 << 20) - 1))",
    ),
    "staged": Mutation(
        "throughput_waits", STAGED, 'elif not ranks.wait("chunk", chunk_of(ranks, source, token), source, token):',
        "elif token < 0:",
    ),
    "pushed rows visible": Mutation(
        "pushes", PUSH, "        arch.cp_async_bulk_wait_group(LAG)\n", "",
    ),
    "pushed rows awaited": Mutation(
        "pushes_late", STAGED,
        'Int32(ranks.wait("token", ranks.heap.problem.pushed_slot(source, token), source, token))', "Int32(1)",
    ),
    "pushed rows, of the last token": Mutation(
        "pushes", PUSH, "args.tokens * self.peers", "(args.tokens - 1) * self.peers",
    ),
    "pushed rows, claims of the next operation": Mutation(
        "pushes_wide", OPERATION, "ptx.st_v4(ranks.word(CLAIMS), (Int32(0),) * 4)",
        "ptx.st_u64(ranks.word(CLAIMS), Int64(0))",
    ),
    "wanted": Mutation(
        "across_small", SUMS, "        came = sync.await_word(ranks, ranks.own + word, owner, batch)\n",
        "        came = Int64(0)\n",
    ),
    "pushed, at the stager": Mutation(
        "across_pairs_late", SUMS, "    missing = Boolean(lane < p.most_copies and (copies >> lane) & 1 != 0)",
        "    missing = Boolean(False)",
    ),
    "pushed, at the owner": Mutation(
        "across_pairs_small", SUMS, '        came = ranks.wait("token", number, copies.holder, token)',
        "        came = near",
    ),
    "sums arrived": Mutation(
        "across_small", SUMS, "            mask = sync.await_word(ranks, ranks.own + word, stager, token, 2)\n",
        "            mask = (ptx.ld_relaxed_sys(ranks.own + word) >> 7) & ((1 << 20) - 1)\n",
    ),
    "scalars arrived": Mutation(
        "across_small", SUMS, "            came = sync.await_word(ranks, ranks.own + word, stager, token, 2) >= 0\n",
        "            came = word > 0\n",
    ),
    "few route arrived": Mutation(
        "latency_across_ahead", DISPATCH_ACROSS,
        'await_far(ranks, "routes", Boolean(lane == 0), source, source, Int32(0))', "pass",
    ),
    "few row arrived": Mutation(
        "latency_across_ahead", DISPATCH_ACROSS,
        'await_far(ranks, "lines", comes, source * self.tokens + number, source, token)', "pass",
    ),
    "few route, row or sum arrived, for the other lanes": Mutation(
        "latency_across", FAR,
        "    ranks.heap.problem.wire.arrived(ranks, word, waits and came)\n" + LANES.format(" " * 4), "",
    ),
    "few sum arrived": Mutation(
        "latency_across_ahead", COMBINE_ACROSS, 'await_far(ranks, "lines", comes, number, order.holder, token)',
        "Boolean(True)",
    ),
    "hello, in a dispatch of few tokens": Mutation(
        "latency_across_ahead", DISPATCH_ACROSS, "sync.meet_all(ranks, lane)", "pass"
    ),
    "hello, in a combine of few tokens": Mutation(
        "latency_across_ahead", COMBINE, "sync.meet_all(ranks, lane)", "pass"
    ),
    "hello, for the lane that ends a combine": Mutation(
        "latency_across_rejected", COMBINE_ACROSS,
        LANES.format(" " * 8) + "        if lane == 0:\n            end(ranks)\n",
        "        if lane == 0:\n            end(ranks)\n",
    ),
    "blocks have put": Mutation(
        "latency_across_ahead", FAR,
        "    while ptx.ld_acquire_gpu(ranks.word(TICKET)) != blocks:\n        pass\n", "",
    ),
    "settle, few tokens": Mutation("latency_across_rejected", FAR, "    end_rejected(ranks)\n", ""),
    "few, a route missing": Mutation(
        "rejected_latency", DISPATCH, "Int32(ptx.barrier_count(missing) == 0)", "Int32(ptx.barrier_count(missing) >= 0)"
    ),
    "staged, by blocks that know of an alarm": Mutation(
        "alarm_staging", "throughput/stage.py", "marks.at(chunk), ranks.own_mark)", "marks.at(chunk), ranks.mark)"
    ),
    "few, lines arrived": Mutation(
        "latency_tokens", "latency/packets.py", "        waiting = missing\n", "        waiting = Int32(0)\n"
    ),
    "few, copies counted": Mutation(
        "latency_tokens_many", PLACE, "    arch.sync_threads()\n    found = Int32(0)\n", "    found = Int32(0)\n"
    ),
    "few, rows placed": Mutation(
        "latency_tokens_many", PLACE, "    arch.sync_threads()\n    return total\n", "    return total\n"
    ),
    "few, ids counted": Mutation(
        "latency_tokens", PLACE, "    arch.sync_threads()\n    if warp == 0:\n", "    if warp == 0:\n"
    ),
    "few, ids of rows behind the last": Mutation(
        "latency_tokens", DISPATCH, "behind = cutlass.min(copies, args.capacity)", "behind = args.capacity"
    ),
    "few, weights of other ranks' experts": Mutation(
        "latency_tokens", DISPATCH, "asked_expert(tables, source, k, low, high) >= 0", "entries >= 0"
    ),
    "rows behind the last": Mutation(
        "given_many", "throughput/combine.py",
        "        last[0] = cutlass.max(last[0], row)\n        row = cutlass.min(row, args.num_rows - 1)\n",
        "        last[0] = cutlass.max(last[0], row)\n",
    ),
    "own rows behind the last": Mutation(
        "given_many_own", "throughput/combine.py",
        "        if here:\n            row = cutlass.min(row, args.num_rows - 1)\n", "",
    ),
    "own sum left exact": Mutation(
        "sums_rounded", "throughput/combine.py", "                round_sum(self.slices, acc)\n",
        "                pass\n",
    ),
    "own sum left exact, in a format": Mutation(
        "sums_bf16", "throughput/combine.py", "                requantize_slice(self.wire, acc)\n",
        "                pass\n",
    ),
    "own weight of another row": Mutation(
        "sums_rounded", "throughput/combine.py", "args.recv_weights[row]\n        return weight",
        "args.recv_weights[row ^ 1]\n        return weight",
    ),
    "own scalars from staging": Mutation(
        "throughput_skewed", "throughput/combine.py",
        "                    if copy.holder == ranks.rank:\n                        at = args.row_scalars",
        "                    if copy.holder < 0:\n                        at = args.row_scalars",
    ),
    "few, rows behind the last": Mutation(
        "given_few", COMBINE,
        "                if row >= args.num_rows:\n                    row = Int32(-1)\n                send(",
        "                send(",
    ),
    "sums, amax of half a block": Mutation(
        "sums_bf16", QUANTIZE, HALF_BLOCK, HALF_BLOCK.replace(")", " // 2)")
    ),
    "sums, rounded before they are quantized": Mutation(
        "sums_bf16", QUANTIZE, '    amax = largest(ptx.pack(sums, "fp32"), "fp32")\n',
        '    sums = ptx.unpack(ptx.pack(sums, "bf16"), "bf16")\n    amax = largest(ptx.pack(sums, "fp32"), "fp32")\n',
    ),
    "sums, codes behind the end of a row": Mutation("sums", QUANTIZED, "if number < end:", "if number >= 0:"),
    "sums, posted before they are stored": Mutation(
        "sums", "throughput/adder.py", STORED, POSTED + STORED + "            mark = mark & ~END\n",
    ),
    "sums, a residual that is decoded": Mutation(
        "sums", "throughput/adder.py", "                mark = mark | PLAIN\n", ""
    ),
    "sums, a domain's one not quantized again": Mutation(
        "sums_few_across", COMBINE_ACROSS, "elif const_expr(self.problem.domain_ranks > 1):", "elif const_expr(False):"
    ),
    "sums, those of the own domain quantized again": Mutation(
        "sums_few_across", COMBINE_ACROSS, "        if (order.rounded >> copy) & 1 != 0:\n",
        "        if order.copies > 0:\n",
    ),
    "sums, a pushed one left out": Mutation(
        "sums_across_pairs", SUMS, "            add_slice(wire, at, last, acc)\n",
        "            if copies == 0:\n                add_slice(wire, at, last, acc)\n",
    ),
    "few, amax of half a block": Mutation("sums_few", QUANTIZE, HALF_BLOCK, HALF_BLOCK.replace(")", " // 2)")),
    "few, numbers behind the end of a row": Mutation(
        "sums_few", PACKETS, " and offset < width.hidden_size:", ":"
    ),
    "few, rows behind the last, of own tokens": Mutation(
        "given_few", COMBINE, "            if row >= args.num_rows:\n                row = Int32(-1)\n            own",
        "            own",
    ),
    "lines, stored by lanes that are apart": Mutation(
        "latency_across", "latency/packets.py", '    arch.sync_warp()\n    arch.inline_ptx("st',
        '    arch.inline_ptx("st',
    ),
    "gemm, a stage read before it is full": Mutation(
        "few_rows", FEW_ROWS, "part, step, ahead - 1)", "part, step, ahead)"
    ),
    "gemm, a stage read before all threads have filled it": Mutation(
        "few_rows", FEW_ROWS, "arch.sync_threads()  # the stage is full", "arch.sync_warp()  # the stage is full"
    ),
    "gemm, a stage filled while it is read": Mutation(
        "few_rows_loop", FEW_ROWS, "                    arch.sync_threads()  # nobody reads the ring any more\n", ""
    ),
    "gemm, the stages of the next expert filled while they are read": Mutation(
        "few_rows_few_blocks", FEW_ROWS, "arch.sync_threads()  # nobody reads the ring of the expert before", "pass"
    ),
    "gemm, experts behind the last block": Mutation(
        "few_rows_few_blocks", FEW_ROWS, "        while number < named:", "        if number < named:"
    ),
    "gemm, an expert skipped": Mutation(
        "few_rows_many_experts", FEW_ROWS, "and before + Int32(arch.popc(", "and Int32(arch.popc("
    ),
    "gemm, the tail of K": Mutation("few_rows", FEW_ROWS, "if k >= self.depth:", "if k >= self.depth + 8:"),
    "gemm, the tail of columns": Mutation(
        "few_rows_wide", FEW_ROWS, "if row < part.rows and at < self.width:", "if row < part.rows:"
    ),
    "gemm, columns fetched behind the last": Mutation(
        "few_rows_wide", FEW_ROWS, "at = cutlass.min(at, last - 8)", "at = at"
    ),
    "gemm, transposed columns fetched behind the last": Mutation(
        "few_rows_wide", FEW_ROWS, "at = cutlass.min(at, last - 1)", "at = at"
    ),
    "gemm, a row of the neighbor": Mutation(
        "few_rows", FEW_ROWS, "if row < part.rows and at < self.width:", "if at < self.width:"
    ),
    "gemm, rows behind the first block of them": Mutation(
        "few_rows_loop", FEW_ROWS, "while done < segment.rows:", "if done < segment.rows:"
    ),
    "gemm, rows read before the first GEMM ends": Mutation(
        "few_rows", FEW_ROWS,
        "            if const_expr(not self.gated):\n                arch.griddepcontrol_wait()\n", "",
    ),
    "gemm of codes, scales of the neighbor's rows": Mutation(
        "few_rows_e4m3", FEW_ROWS_E4M3, "lane % 4 * 2 + i, part.rows - 1)", "lane % 4 * 2, part.rows - 1)"
    ),
    "gemm of codes, scales read behind the last row": Mutation(
        "few_rows_e4m3", FEW_ROWS_E4M3, "cutlass.min(group * 8 + lane % 4 * 2 + i, part.rows - 1)",
        "group * 8 + lane % 4 * 2 + i + self.experts * 16",
    ),
    "gemm of codes, scales of another block of K": Mutation(
        "few_rows_e4m3", FEW_ROWS_E4M3, "cutlass.min(step * blocks + block, self.scales - 1)",
        "cutlass.min(step * blocks, self.scales - 1)",
    ),
    "gemm of codes, scales of another expert's weights": Mutation(
        "few_rows_e4m3", FEW_ROWS_E4M3, "Int64(part.expert) *", "Int64(part.expert * 0) *"
    ),
    "gemm of codes, the other pair of each word of rows": Mutation(
        "few_rows_e4m3", FEW_ROWS_E4M3, "numbers[k][pair]", "numbers[k][1 - pair]"
    ),
    "gemm of codes, the ring overwritten while it is read": Mutation(
        "few_rows_e4m3_loop", FEW_ROWS_E4M3, "arch.sync_threads()  # nobody reads the ring any more", "pass"
    ),
    "gemm of codes, magnitudes read before all warps have stored theirs": Mutation(
        "few_rows_e4m3", FEW_ROWS_E4M3, "arch.sync_threads()  # the largest magnitudes of all warps are there", "pass"
    ),
    "gemm of codes, a stage read before a fence": Mutation(
        "few_rows_wgmma", FEW_ROWS_WGMMA, "        ptx.fence_async_shared()\n", ""
    ),
    "gemm of codes, a stage fenced before it is full": Mutation(
        "few_rows_wgmma", FEW_ROWS_WGMMA, "        ptx.cp_async_wait(most)\n        ptx.fence_async_shared()\n",
        "        ptx.fence_async_shared()\n        ptx.cp_async_wait(most)\n",
    ),
    "gemm of codes, a stage read before all threads have fenced it": Mutation(
        "few_rows_wgmma", FEW_ROWS, "arch.sync_threads()  # the stage is full", "arch.sync_warp()  # the stage is full"
    ),
    "gemm of codes, a stage filled while it is read": Mutation(
        "few_rows_wgmma_loop", FEW_ROWS, "                    arch.sync_threads()  # nobody reads the ring any more\n",
        "",
    ),
    "gemm of codes, sums read before they are there": Mutation(
        "few_rows_wgmma", FEW_ROWS_WGMMA, "ptx.wgmma_wait(len(products) - 1, products.pop(0))", "products.pop(0)"
    ),
    "gemm of codes, the last sums read before they are there": Mutation(
        "few_rows_wgmma", FEW_ROWS_WGMMA, "len(products) - 1, products.pop(0)", "1, products.pop(0)"
    ),
    "gemm of codes, chunks of lines in their order": Mutation(
        "few_rows_wgmma", FEW_ROWS_E4M3, "swizzled(line, chunk % 8, 8)", "(line * 8 + chunk % 8) * 16"
    ),
    "gemm of codes, a ring at a multiple of less": Mutation(
        "few_rows_wgmma", FEW_ROWS_E4M3, "ALIGNMENT = 1024", "ALIGNMENT = 512"
    ),
    "gemm of codes, groups of lines at another distance": Mutation(
        "few_rows_wgmma", FEW_ROWS_WGMMA, "8 * BLOCK // 16 << 32", "16 * BLOCK // 16 << 32"
    ),
    "gemm of codes, the weights of the first four warps": Mutation(
        "few_rows_wgmma", FEW_ROWS_WGMMA, "warp_id() // 4 * (64 * BLOCK)", "warp_id() // 8 * (64 * BLOCK)"
    ),
    "gemm of codes, the first rows again": Mutation(
        "few_rows_wgmma_wide", FEW_ROWS_WGMMA, "(block * tile.rows + first) * BLOCK", "block * tile.rows * BLOCK"
    ),
    "gemm of codes, the first rows' scales again": Mutation(
        "few_rows_wgmma_wide", FEW_ROWS_WGMMA, "of_rows[first // 4 + 2 * group", "of_rows[2 * group"
    ),
    "gemm of codes, scales behind the last row": Mutation(
        "few_rows_wgmma", FEW_ROWS_WGMMA, "cutlass.min(i // 2 * 8 + lane % 4 * 2 + i % 2, part.rows - 1)",
        "i // 2 * 8 + lane % 4 * 2 + i % 2 + self.experts * 16",
    ),
    "gemm of codes, scales of the first block of a stage": Mutation(
        "few_rows_wgmma", FEW_ROWS_WGMMA, "cutlass.min(step * self.blocks + block, self.scales - 1)",
        "cutlass.min(step * self.blocks, self.scales - 1)",
    ),
    "gemm of codes, the magnitude of a half of the columns": Mutation(
        "few_rows_e4m3", FEW_ROWS_E4M3, "range_constexpr(0, self.warps, 4)", "range_constexpr(0, self.warps, 8)"
    ),
}  # fmt: skip


def mutate(mutation: Mutation, to: Path) -> None:
    """The kernels' source in that folder, mutated."""
    shutil.copytree(ROOT / "cute_kernels", to / "cute_kernels", ignore=shutil.ignore_patterns("__pycache__"))
    path = to / "cute_kernels" / mutation.file
    text = path.read_text()
    assert text.count(mutation.old) == 1, f"{mutation.old!r} stands {text.count(mutation.old)} times in {mutation.file}"
    path.write_text(text.replace(mutation.old, mutation.new))


def found(mutation: Mutation) -> str:
    """The seed that shows it, and how; "": none does."""
    with tempfile.TemporaryDirectory() as folder:
        mutate(mutation, Path(folder))
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([folder, str(ROOT / "tests"), str(ROOT)])}
        for seed in SEEDS:
            command = [sys.executable, "-W", "ignore", "-m", "emulator.main", mutation.check, str(seed)]
            try:
                ran = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=LONGEST)
            except subprocess.TimeoutExpired:
                return f"seed {seed}: does not end in {LONGEST} s"
            if ran.returncode:
                said = ran.stderr.strip().splitlines() or [f"exit status {ran.returncode}"]
                return f"seed {seed}: {said[-1][:160]}"
    return ""


def main(names: list[str]) -> int:
    missed = 0
    for name in names or MUTATIONS:
        mutation = MUTATIONS[name]
        said = found(mutation)
        missed += not said
        print(f"{name}: {mutation.check}: {said or 'NOT FOUND'}", flush=True)
    return missed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
