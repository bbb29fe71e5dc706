"""Runs the source of the kernels on a CPU, thread by thread, to test their logic.

Every GPU thread is a greenlet, and every device function runs as the plain Python that it is written in, on fakes of
`cutlass` and `cute_kernels.ptx`. All ranks' kernels run at once; which warp goes on next is drawn at random.

What is emulated: fixed-width integers, bounds and alignment of global and shared memory, ranges of shifts, collectives
of warps (which must be reached by all 32 lanes alike), barriers of blocks, mbarriers and bulk copies, dependent
launches, and blocks that start late.

Lanes of a warp go apart: now and then one stops before an access to memory, while the others go on to their next
collective. Lanes that load or store a line (latency/packets.py) must have met since their last access.

Products of four warps read shared memory through descriptors, at once or as late as their waits allow, and only what a
fence of the writing thread has ordered before.

What is not: the order in which memory becomes visible, other proxies and fences, and timing. Each access is complete at
once: this proves logic, not order. Nor is what the DSL makes of the source: that it traces and compiles is what other
tests see.
"""
