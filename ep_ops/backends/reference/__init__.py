"""The definition of every operator, in plain torch over torch.distributed. Kernels must agree with it.

Experts are on ranks in contiguous blocks. Rank r has T_r <= max_tokens tokens, and each names K experts (-1: none).

**Rows.** Every (source rank, token, k) that names an expert e requests one row of the receive buffer of e's rank. The
requests for e are numbered 0, 1, ... in the order of (source rank, token, k). With ``pad(n)`` = n rounded up to
``alignment``, the segment of e begins

* layout "grouped" (slots == 0): at the end of the previous expert's segment, which is the sum of ``pad(requests)`` of
  the rank's earlier experts, at most the rank's ``capacity``, where the last segment ends as well;
* layout "padded" (slots > 0): at ``(local index of e) * slots``, and ends ``slots`` rows later.

Request number p gets row ``begin + p`` if it is within the segment, and is *dropped* otherwise. Each rank's own
capacity, alignment and slots apply to its rows; all ranks learn them. An id outside of [-1, E) raises an error. With
layout "distinct", which is "grouped" otherwise, so does an id that its token names before.

**Route.** Five int32 tensors: ``topk_idx`` [T, K]; ``send_rows`` [T, K], the row at the expert's rank, -1 for none;
``arrivals`` [4 R + W + 3]; ``counts`` [El], kept rows of each local expert; ``offs`` [El] = begin + pad(counts). A plan
also returns ``dropped`` [El]. R is the number of rows of the receive buffer: the capacity, or ``offs[-1]`` of a dynamic
dispatch.

``arrivals`` holds three lists. A token has a *copy* at each rank that has kept rows of it. The distinct ranks that its
ids name number its copies in ascending order 0, 1, ..., including ranks that have kept none. C = min(K, W).

* ``copies`` [R + 1, 2]: for each copy here, in the order of (source rank, token), where its rows begin in ``owned``,
  and its *home*, (source rank * max_tokens + token) * C + copy number; after the last one, the number of kept rows and
  an undefined number;
* ``owned`` [R, 2]: the kept rows in the order of (source rank, token, k), each with its request, (source rank *
  max_tokens + token) * K + k;
* ``sources`` [W + 1]: where the copies of each source rank begin in ``copies``, and the number of copies.

Entries after the last copy and the last kept row are undefined (here -1), and no operator reads them. Operators along a
route take the ``max_tokens`` of its plan, and as many rows as it was planned for.

**Contents.** A kept row holds x of its token (``recv_x``) and the weight of its (token, k) (``recv_weights``). The
padding rows of each segment, [begin + counts, offs), hold zeros. Other rows are undefined, and no operator reads them.
Here they are NaN, so that a model that reads them is noticed, or zeros if the communicator is not ``strict``.

**Formats.** With a ``format`` (docs/formats.md), x of each token is quantized at its owner as defined in
``ep_ops.formats.quantize``, unless it is already. A kept row of ``recv_x`` holds the token's codes, and its scales lie
in ``recv_scales`` as defined in ``ep_ops.formats.layouts``. Codes and scales of padding rows are 0, and so are swizzled
scales after each segment in its last tile. Everything else is undefined (here NaN: code 0x7F, byte 255). With ``wire:``
a kept row holds code times scale, rounded to the dtype of x, and there are no scales. Without ``zeros`` padding rows
are undefined in any format. Given scales that should be powers of two and are not raise an error.

**Combine.** On the expert's rank, for each (source rank, token): fp32 sum over k ascending of weight times row (each
product and each sum rounded), rounded to the dtype of y. For each NVLink domain: fp32 sum of these over its ranks
ascending, rounded to the dtype of y unless it is the owner's domain. On the owner: fp32 sum of these over domains, in
the order of their lowest ranks, plus the token's residual if given, rounded once to the dtype of y. With fp64 rows
everything is fp64. With a ``format``, the sums of each rank, and those of domains other than the owner's, are quantized
instead of rounded, and code times scale in fp32 is added.

**Gathered.** ``combine_gathered`` is a combine without weights of rows that peers can read: in ``empty_rows``, whose
memory is the same in every call. Other rows are copied to it (not if the communicator is not ``strict``).

**Gradients.** Dispatch, in any format: rows are combined without weights, and weights return to their (token, k), with
0 where there is no row. Combine: with g the rows of ``grad_out`` dispatched along the route, ``grad_y = g`` or ``weight
* g`` rounded to its dtype, and ``grad_recv_weights`` is the fp32 dot product of g and y.

**Token-major.** With layout "token_major" a dispatch has one row for each *copy*. The copies for a rank are numbered 0,
1, ... in the order of (source rank, token). Copy number p has row p if p is below the rank's capacity; otherwise it is
dropped with all its requests. The route is that of a dispatch in which every rank is one expert (alignment 1),
requested by the first k of a token that names the rank: ``send_rows`` holds the row there, and -1 at the later k.
``copies``, ``owned`` and ``sources`` are as above, where R counts copies. Combines and their gradients therefore work
as on any route, and add one row for each rank. ``counts`` [El] is the number of (row, k) that name each local expert,
``offs`` [El] their cumulative sums, and ``dropped`` [El] those of dropped copies. ``recv_idx`` [R, K] holds the local
expert of each k of the token, and -1 for experts of other ranks and in rows without a copy; ``recv_weights`` [R, K]
holds the weights, and 0 where recv_idx is -1. In backward, rows are combined, and the gradient of the weight of a
(token, k) is read from its entry in the row of its copy; no other entry is read.

**Split operations.** ``*_start`` followed by ``*_wait`` with the same arguments is the whole operator, and so are those
of gradients, whose waits take sizes only. Between the two, only split operations of other flights may run on the
communicator.

**Meeting.** First, ranks exchange which operator they run, how many rows they send, and whether they reject their
arguments. A mismatch or a rejection raises on all ranks.

Files: the operators (backend), the locations of experts (ranks), placement of rows (placing), transfer of rows along a
route and the order of sums (transfer), token-major rows (copies), quantized rows (quantized), agreement before each
operation (meeting), deadlines (waits).
"""

from __future__ import annotations

from .backend import ReferenceBackend

__all__ = ["ReferenceBackend"]
