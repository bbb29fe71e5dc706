"""The protocols across NVLink domains as small state machines, and a network that attacks them.

`rank.py`, `throughput.py` and `latency.py` are the protocols that docs/across-domains.md explains; `placing.py` is what
they do without waiting. `network.py` is the adversary: memories, the wire between domains, and whose turn it is.
`reference.py` says what must come of it, `cases.py` draws what is run, and `mutations.py` breaks every rule of the
protocols once, to see that it is needed.

What is not modelled: what happens inside one NVLink domain between a store and a flag (docs/throughput.md,
docs/latency.md). There a flag stands for the stores before it.

Waits, each with who waits for what, before which step:

- hello: every rank, for the hellos of all; before the end of the epoch: banks and send areas are reused.
- rejection: every rank that sees a rejecting hello, for the rejection itself; before the end of the epoch: no rank
  takes the operation for complete.
- route arrived: expert's rank, for the route flag of each tile of each rank; before reading counts and entries.
- weights arrived: stager, for the weights of each tile of its rail; before relaying that.
- weights relayed: expert's rank, for that they were relayed; before reading them.
- staged: expert's rank, for the flag of a row of its domain; before fetching it.
- rows arrived: stager, for each batch of its rail; before relaying its word.
- rows relayed: expert's rank, for a relayed word; before fetching rows of the batch.
- wanted: stager, for the request of an owner; before waiting for copies, and adding up.
- pushed: stager; owner, for its own domain, for the flag of a copy; before adding it.
- sums arrived: owner, for a batch of a domain's sums; before adding them.
- scalars arrived: owner, for a batch of a domain's scalars; before reading them.
- few route arrived: expert's rank, few tokens, for the route of each rank; before placing, and knowing which rows
  arrive.
- few row arrived: expert's rank, few tokens, for each row that names an expert here; before storing it; the end of
  the epoch.
- few sum arrived: owner, few tokens, for the sum of each copy with kept rows; before adding it.
- blocks have put: the last block of a rank, few tokens, for all of its rank's blocks; before announcing how much
  was put; the next epoch.
- sent: every rank, after a rejection, for the number of puts of each other rank to it; before checking whether all
  have arrived.
- come: every rank, after a rejection, for as many words as were sent; before the next operation.
"""
