"""The protocols across NVLink domains as small state machines, and a network that attacks them.

`rank.py`, `throughput.py` and `latency.py` are the protocols that docs/across-domains.md explains; `placing.py` is what
they do without waiting. `network.py` is the adversary: memories, the wire between domains, and whose turn it is.
`reference.py` says what must come of it, `cases.py` draws what is run, and `mutations.py` breaks every rule of the
protocols once, to see that it is needed.

What is not modelled: what happens inside one NVLink domain between a store and a flag (docs/throughput.md,
docs/latency.md). There a flag stands for the stores before it.
"""
