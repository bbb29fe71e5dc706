"""The meaning of every operator, in plain torch over torch.distributed. Kernels have to agree with it.

Experts lie on ranks in contiguous blocks. Rank r has T_r <= max_tokens tokens, each naming K experts (-1: none).

**Rows.** Every (source rank, token, k) that names an expert e asks for one row of the receive buffer of e's rank.
The askers of e are numbered 0, 1, ... in the order of (source rank, token, k). With ``pad(n)`` = n rounded up to
``alignment``, the segment of e begins

* layout "grouped" (slots == 0): where that of the expert before it ends: at the sum of ``pad(askers)`` of the rank's
  earlier experts, but never past the rank's ``capacity``, which is also where the last one ends;
* layout "padded" (slots > 0): at ``(local index of e) * slots``, and ends ``slots`` rows later.

Asker number p gets row ``begin + p`` if that lies within the segment, and is *dropped* otherwise. Each rank's own
capacity, alignment and slots apply to its rows; all ranks learn them. A naming outside [-1, E) is refused.

**Route.** Five int32 tensors: ``topk_idx`` [T, K]; ``send_rows`` [T, K], the row at the expert's rank, -1 where none;
``arrivals`` [4 R + W + 3]; ``counts`` [El], kept rows of each local expert; ``offs`` [El] = begin + pad(counts).
Planning also gives ``dropped`` [El]. R is the number of rows of the receive buffer: the capacity, or ``offs[-1]`` of a
dynamic dispatch.

``arrivals`` holds three lists, one after the other. A token has a *copy* at each rank where rows of it were kept. The
distinct ranks that its ids name, ascending, number its copies 0, 1, ..., those included that have kept none of its
rows. C = min(K, W).

* ``copies`` [R + 1, 2]: for each copy here, in the order of (source rank, token), where its rows begin in ``owned``
  and its *home*, (source rank * max_tokens + token) * C + copy number; behind the last one the number of kept rows, and
  something undefined;
* ``owned`` [R, 2]: the kept rows in the order of (source rank, token, k), each with (source rank * max_tokens + token)
  * K + k of its asker;
* ``sources`` [W + 1]: where in ``copies`` those of each source rank begin; the last one is the number of copies.

What lies behind the last copy and behind the last kept row is undefined (here -1) and no operator reads it. Operators
along a route take the ``max_tokens`` that it was planned with, and rows as many as it was planned for.

**Contents.** A kept row of ``recv_x`` holds x of its token, of ``recv_weights`` the weight of its (token, k). The
padding rows of each segment, [begin + counts, offs), hold zeros. What other rows hold is undefined (here NaN, so that
a model that reads them is found out; zeros in a communicator that is not ``strict``) and no operator reads them.

**Formats.** With a ``format`` (docs/formats.md), x of each token is quantized at its owner as
``ep_ops.formats.quantize`` says, or was quantized already. A kept row of ``recv_x`` holds the token's codes, and in
``recv_scales`` its scales lie where ``ep_ops.formats.layouts`` says. The padding rows of each segment hold codes and
scales of 0, and swizzled scales are 0 behind each segment in its last tile too; whatever else no kept row has is
undefined (here NaN: code 0x7F, byte 255). With ``wire:`` a kept row holds code times scale instead, rounded to x's
dtype, and there are no scales. Without ``zeros`` padding rows are undefined, in any format. Scales that came with x
and should be powers of two, but are none, are refused.

**Combine.** On the expert's rank, for each (source rank, token): fp32 sum over k ascending of weight times row (each
product and each sum rounded), rounded to y's dtype. For each NVLink domain: fp32 sum of these over its ranks
ascending, rounded to y's dtype unless it is the owner's own. On the owner: fp32 sum of these over domains, in the order
of their lowest ranks, then of the token's residual if there is one, rounded once to y's dtype. With fp64 rows
everything is fp64. With a ``format``, both sums that are rounded to y's dtype above, those of each rank and those of
another domain than the owner's, are quantized instead, and code times scale in fp32 is added.

**Gathered.** ``combine_gathered`` is combine without weights, of rows that lie where peers can read them: in
``empty_rows``, whose memory is the same in every call. Other rows are copied there, over what it held (in a
communicator that is not ``strict``, nowhere).

**Backwards.** Of dispatch, in whatever format: rows are combined without weights, weights go back to their (token,
k), 0 where there is no row. Of combine: with g the rows of ``grad_out`` dispatched along the route, ``grad_y = g`` or
``weight * g`` rounded to its dtype, and ``grad_recv_weights`` the fp32 dot product of g and y.

**Token-major.** With layout "token_major" a dispatch gives a row to each *copy* and not to each (token, k): the copies
for a rank are numbered 0, 1, ... in the order of (source rank, token), copy number p has row p if p is below the rank's
capacity, and is dropped otherwise, with all that it asks for. Its route is that of a dispatch in which every rank is
one expert (alignment 1), asked for by the first k of a token that names it: ``send_rows`` holds the row there, and -1
at the k behind it; ``copies``, ``owned`` and ``sources`` say what they always do, R counting copies. So combines and
their backwards run along it as along any other, and add up one row for each rank. But ``counts`` [El] has how many
(row, k) name each local expert, ``offs`` [El] their sums up to and with each, and ``dropped`` [El] those of dropped
copies. ``recv_idx`` [R, K] holds, for each k of the token, the local expert that it names, -1 where it names none of
this rank and in rows without a copy; ``recv_weights`` [R, K] the weight beside it, and 0 where that is -1. Backward,
rows are combined, and the weight of a (token, k) gets what its place in the row of its copy has; other places are not
read.

**Split operations.** ``*_start`` followed by ``*_wait`` with the same arguments is the whole operator; so it is of
gradients, whose waits take sizes alone. Between the two nothing of the communicator may run but split operations of
other flights.

**Meeting.** Before anything else moves, ranks tell each other which operator they run, how many rows they will send
and whether they refuse their input; any mismatch, and the reason of a refusal, raises on all of them.

One idea a file: the operators (backend), what all ranks know of each other (ranks), which rows there are (placing), how
rows move along a route (rows), those of whole tokens (copies), in a format (quantized), the order of sums (tree), how
ranks meet (meeting).
"""

from __future__ import annotations

from .backend import ReferenceBackend

__all__ = ["ReferenceBackend"]
