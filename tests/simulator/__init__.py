"""The protocols across NVLink domains as small state machines, and a network that attacks them.

`rank.py`, `throughput.py` and `latency.py` are the protocols that this text defines; `placing.py` is what
they do without waiting. `network.py` is the adversary: memories, the wire between domains, and whose turn it is.
`reference.py` says what must come of it, `cases.py` draws what is run, and `mutations.py` breaks every rule of the
protocols once, to see that it is needed.

What is not modelled: what happens inside one NVLink domain between a store and a flag (docs/throughput.md,
docs/latency.md). There a flag stands for the stores before it.

There are D domains of N ranks each, W = D × N. The ranks with the same index in each domain form a rail. Operations
and functions of the state machines have the same names.

Wire
----
- `put_signal(target, rows, places, word, value)`: copies memory of this rank to places of the target, then sets a
  word there; returns at once.
- `put_value(target, word, value)`: the same without rows.
- `wait(word)`: waits until a word of this rank's memory has a certain value.

The only guarantee is that a signal is seen after the data of its own put. A put may read its source late, and
arrive late, in pieces and in any order, also relative to puts between the same two ranks. NVSHMEM guarantees this
for `putmem_signal_nbi` in the warp and block forms on all transports. Not assumed are order between puts (a fence
would cost a round trip on EFA), atomics (words are set, never incremented, and each has one writer, except the
alarm), and completion of a rank's own puts (NVSHMEM's wait for it has no deadline).

Inside a domain ranks load, store and set flags (throughput, latency). A flag, a release at system scope, covers
everything that was stored before it and everything that an earlier wait has made visible. Waits across the wire are
for words in the waiting rank's own memory.

Places and words
----------------
Everything that is put has its own place at the target, for each sender and bank, in the largest possible size: no
rings, credits or queues. Each put has its own word, which contains the epoch. A rank that sees a word may read the
data of its put, and nothing else. The number of puts is known in advance, so no word counts puts. If there is
nothing to put, a word says so, unless both sides know it. A word of an earlier operation has another epoch.

The hello word and the route flags contain all terms of the operation and the epoch. Words of batches contain a
number instead of the terms: neither of two different operations ends, so a batch word of the other one does no
harm.

Puts are assembled in a send area in symmetric memory, which some transports need on both sides. It has a place for
each put in two banks.

Beginning and end of an operation
---------------------------------
Every operation of W ranks is one epoch. Epoch e uses bank e mod 2 of all places and words. In each epoch ranks meet
(`meet`): each sets its hello at every rank when it begins, N of them by stores and W − N by puts, and no rank ends
the epoch before it has seen all hellos. A rank that sees hello terms other than its own gives up and informs all
ranks, so no rank ends an epoch in which another rank runs another operation. A waiting rank also checks the hello
of the rank that it waits for; a stager, which does not know which rank holds a copy, checks all ranks of its domain
(`suspects`).

An epoch ends at a rank when it has met and when everything sent to it has arrived. This makes the banks safe:

- Met. All W ranks have left e − 1. When this rank writes to the bank of e − 1 again, in e + 1, neither the target
  nor the target's domain reads it. Meeting only the own domain and rail would not suffice.
- Arrived. A rank waits for every word that is put to it, so no put of e to it is in flight when it leaves e. A rank
  that has met in e + 1 therefore knows that all of its puts of e were delivered, and thus read: send areas need no
  wait.
- Banks of words. A hello of e + 1 may arrive before one of e from the same rank, so both have a word.

Many tokens
-----------
For each source rank and each domain, the stager is the rank of that domain on the source's rail, which represents
the source there; in the source's own domain it is the source itself. Rows cross only between ranks of one rail. A
rank divides its tokens into tiles, for the route, and into batches of at most 16 tokens and about 128 KiB, for the
rows. Both are ranges of consecutive tokens, equal for all ranks. All parts run concurrently:

- dispatch, owner, each tile (`tell_tile`): counts of all experts, and the entries that concern the rank, to every
  rank: by stores and a route flag in the domain, otherwise by one put, past the stagers. Routing weights
  (token-major: ids too) to the stager of each other domain.
- dispatch, owner, each batch (`send_rows`): one put to the stager of each other domain: the rows of the tokens that
  name an expert there, without gaps, dropped ones included. The word says which tokens, as bits.
- dispatch, stager (`relay_rows`, `relay_weights`): relays each word that arrives on its rail to a flag at every
  rank of its domain; ends when all have arrived.
- dispatch, expert's rank (`receive`): places its rows when all route flags are set; waits for the relayed word of a
  copy's batch, finds the row by counting bits, and fetches it from the stager over NVLink. With a known route there
  are no counts and entries.
- combine, expert's rank (`push`): the rounded sum of each copy to the owner's stager in its own domain, at
  `[source's domain][copy number][token]`, and a flag.
- combine, owner, each batch (`ask_all`): asks each other domain's stager: for each token a mask of the copies that
  have kept rows there, also if it is 0.
- combine, stager (`pass_sums`): waits for the request, then for the requested copies; sums them over ranks
  ascending, rounds, and puts them without gaps. If a copy never arrives, no sum of the batch is sent.
- combine, owner (`add_all`): adds the sums of the domains in their order, and its own domain's unrounded.

Scalars of a combine, which are gradients of weights, are pushed with the rows and returned for each batch in a put
of their own; for token-major rows, K for each copy. The gradient of a dispatch is a combine without weights; that
of a combine is a dispatch along the known route whose rows are multiplied on arrival.

Few tokens
----------
Rows go directly to their rank, in packets of marked lines (latency kernels): inside the domain by stores, across
the wire by puts, whose data is recognized by the put's own word, which contains the mark.

- dispatch, every rank (`send_route`): its route (ids, capacity, alignment, slots) to every rank of other domains,
  in one put.
- dispatch, owner (`send_copies`): each token with its weights to each rank of another domain that it names, in one
  put, to `[source rank][token]`.
- dispatch, expert's rank (`receive_copies`): knows from the routes which rows arrive; also waits for rows that are
  dropped, whose puts could otherwise arrive during a later operation.
- combine, expert's rank (`send_sums`): the sum of each copy that has rows, in one put, to `[copy number][token]` at
  its owner.
- combine, owner (`add_sums`): knows from `send_rows` which sums arrive, and adds them in the fixed order.

The last block opens the next epoch when it has met all ranks and all blocks have made their puts.

Waits
-----
Each with who waits for what, before which step:

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

Termination. Owners send rows, routes and weights, and push, without waiting. Stagers relay what owners have sent.
In a combine the same blocks first ask and then pass sums on, and other blocks add up: asking waits for nothing,
passing on for what was pushed and requested, and adding up for what was passed on. Any other order would contain a
cycle. Blocks that pass on must be resident together; in a dispatch the blocks that send the route, the relaying
block, and one block each that sends and stages.

When one rank rejects its arguments
-----------------------------------
A rank that got wrong arguments takes part only in the meeting (`say_rejection`): it puts its reason and the word
rejection into a separate place at every rank, and its hello says that it rejects. A rank that sees the rejection
gives up all waits except those of the meeting. So an operation is rejected at all ranks or at none. Ranks then
settle (`settle`): each puts to every rank of another domain the number of its puts to it, and ends when its memory
contains as many words of this epoch as were announced. If the wire is NVLink stores, nothing is in flight, and no
rank settles.

When one rank fails
-------------------
A wait that reaches its deadline ends the communicator. The rank sends its cause, the alarm, to all ranks: by stores
in its domain, and by one put to each other rank. The alarm is a single word that all ranks may write. A rank that
receives it gives up at once and sends it on.

The cause should name the missing rank, not a rank that waits for it. Every waiting thread records the time in its
rank's memory. At a deadline a rank reads these records in its domain and names a rank in the same operation of
which nothing has waited for half the deadline. An owner that waits for the sums of a stager has twice the deadline.

What a rank still sends in the operation in which it gives up is valid, because it does not depend on what it
receives in the same operation, except for what is relayed and passed on, which does not happen without its data. In
later operations it puts nothing, and does not modify what it, or a stager of its domain, may still be putting: its
puts of the previous operation may be in flight, and the next operation uses the same bank, so the wire could read
newer data with a valid epoch.

Afterwards memory is not freed while a peer may be dead, because puts to it may be in flight forever. `shrink`
allocates new memory.
"""
