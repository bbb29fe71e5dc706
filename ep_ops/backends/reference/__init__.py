"""Definition of every operator, implemented in plain PyTorch over torch.distributed. Kernels must return the same
results.

Experts are assigned to ranks in contiguous blocks. Rank r has T_r <= max_tokens tokens, and each token names K experts;
-1 names no expert.

**Rows.** Every (source rank, token, k) that names an expert e requests one row of the receive buffer of e's rank. The
requests for e are numbered 0, 1, ... in the order of (source rank, token, k). Let ``pad(n)`` be n rounded up to
``alignment``. The segment of e begins

* with layout "grouped" (slots == 0): where the segment of the previous expert ends, which is the sum of
  ``pad(requests)`` of the rank's previous experts, limited to the rank's ``capacity``. The last segment also ends at
  the capacity at the latest.
* with layout "padded" (slots > 0): at ``(local index of e) * slots``. It ends ``slots`` rows later.

Request number p gets row ``begin + p`` if that row is within the segment; otherwise it is *dropped*. Each rank applies
its own capacity, alignment and slots to its rows, and all ranks learn which rows exist. An id outside [-1, E) raises.

**Route.** A route consists of five int32 tensors: ``topk_idx`` [T, K]; ``send_rows`` [T, K], the row at the expert's
rank, or -1 if there is none; ``arrivals`` [4 R + W + 3]; ``counts`` [El], the kept rows of each local expert; and
``offs`` [El] = begin + pad(counts). A plan also returns ``dropped`` [El]. R is the number of rows of the receive
buffer: the capacity, or ``offs[-1]`` for a dynamic dispatch.

``arrivals`` contains three lists, one after the other. A token has a *copy* at each rank that kept any of its rows. Its
copy numbers 0, 1, ... enumerate the distinct ranks that its ids name, in ascending order, including ranks that kept
none of its rows. C = min(K, W).

* ``copies`` [R + 1, 2]: for each copy at this rank, in the order of (source rank, token), where its rows begin in
  ``owned``, and its *home*, (source rank * max_tokens + token) * C + copy number. After the last copy: the number of
  kept rows, and an undefined value.
* ``owned`` [R, 2]: the kept rows in the order of (source rank, token, k), each with (source rank * max_tokens + token)
  * K + k of its request.
* ``sources`` [W + 1]: where the copies of each source rank begin in ``copies``. The last entry is the number of copies.

Entries after the last copy and after the last kept row are undefined (-1 on this backend), and no operator reads them.
Operators along a route use the ``max_tokens`` and the number of rows that the route was planned with.

**Contents.** A kept row of ``recv_x`` contains x of its token, and an entry of ``recv_weights`` the weight of its
(token, k). The padding rows of each segment, [begin + counts, offs), are zeros. All other rows are undefined, and no
operator reads them. On this backend they are NaN, so that a model that reads them fails, or zeros if the communicator
is not ``strict``.

**Formats.** With a ``format`` (docs/formats.md), x of each token is quantized at its owner as defined by
``ep_ops.formats.quantize``, unless it was passed quantized. A kept row of ``recv_x`` contains the token's codes, and
``recv_scales`` its scales in the memory layout of ``ep_ops.formats.layouts``. Padding rows have codes and scales of 0,
and swizzled scales are also 0 after each segment in its last tile. Everything else is undefined (on this backend NaN:
code 0x7F, byte 255). With ``wire:`` a kept row contains code times scale, rounded to x's dtype, and there are no
scales. Without ``zeros`` padding rows are undefined in any format. Scales that were passed with x, must be powers of
two and are not, raise.

**Combine.** On the expert's rank, for each (source rank, token): the fp32 sum over ascending k of weight times row,
with each product and each sum rounded; the result is rounded to y's dtype. For each NVLink domain: the fp32 sum of
these over its ranks in ascending order, rounded to y's dtype unless it is the owner's domain. On the owner: the fp32
sum of these over domains, in the order of their lowest ranks, then the token's residual if there is one, rounded once
to y's dtype. With fp64 rows all arithmetic is fp64. With a ``format``, the sums that are rounded to y's dtype above (of
each rank, and of each domain other than the owner's) are quantized instead, and code times scale in fp32 is added.

**Gathered combine.** ``combine_gathered`` is a combine without weights whose rows lie in memory that peers can read: in
``empty_rows``, whose memory is the same in every call. Other rows are copied there and overwrite its contents (unless
the communicator is not ``strict``).

**Backward.** The backward of dispatch, in any format, combines the gradients of rows without weights, and returns the
gradients of weights to their (token, k), or 0 if there is no row. The backward of combine dispatches ``grad_out`` along
the route to g; ``grad_y`` is g, or ``weight * g`` rounded to its dtype, and ``grad_recv_weights`` is the fp32 dot
product of g and y.

**Token-major.** With layout "token_major" a dispatch returns one row for each *copy* instead of one for each (token,
k). The copies for a rank are numbered 0, 1, ... in the order of (source rank, token). Copy number p has row p if p is
less than the rank's capacity; otherwise it is dropped with all its requests. The route is that of a dispatch in which
every rank is one expert (alignment 1), requested by the first k of a token that names the rank: ``send_rows`` has the
row at that k, and -1 at later k. ``copies``, ``owned`` and ``sources`` have the same meaning, and R counts copies.
Combines and backward operators therefore run along it as along any route, and add one row for each rank. However,
``counts`` [El] is the number of (row, k) that name each local expert, ``offs`` [El] its inclusive prefix sum, and
``dropped`` [El] the number of those of dropped copies. ``recv_idx`` [R, K] contains, for each k of the token, the local
expert that it names, or -1 if it names none of this rank or the row has no copy. ``recv_weights`` [R, K] contains the
corresponding weight, or 0 where ``recv_idx`` is -1. In backward, rows are combined, and the weight of a (token, k) gets
the entry of its k in the row of its copy; other entries are not read.

**Split operations.** ``*_start`` followed by ``*_wait`` with the same arguments is equivalent to the whole operator.
The same is true of gradients, whose waits take only sizes. Between the two, only split operations of other flights of
the communicator may run.

**Meeting.** Before any data moves, ranks exchange which operator they run, how many rows they will send, and whether
they reject their input. A mismatch or a rejection raises on all ranks.

Modules: the operators (backend), experts and ids of all ranks (ranks), which rows exist (placing), how rows move along
a route (transfer), token-major rows (copies), quantized rows (quantized), the order of summation (tree), how ranks meet
(meeting), and deadlines (waits).
"""

from __future__ import annotations

from .backend import ReferenceBackend

__all__ = ["ReferenceBackend"]
