"""ATen operators as a compiler sees them: norms, softmax and losses in parts.

A norm is a reduction to statistics and an element-wise operator that uses them; the backward pass
can compute the latter again from stored statistics. PyTorch's inductor splits operators in the same
way (torch/_decomp/decompositions.py, torch/_inductor/decomposition.py) before it fuses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import count

from phaze_fast.models.recording import Array, Call

_NORMS = """native_layer_norm native_group_norm native_batch_norm _native_batch_norm_legit
    cudnn_batch_norm _batch_norm_with_update _fused_rms_norm"""
NORMS = frozenset(_NORMS.split())
_NORM_GRADIENTS = frozenset(f"{name}_backward" for name in (*NORMS, "batch_norm"))
_SOFTMAX = frozenset({"_softmax", "_log_softmax", "_safe_softmax"})
_SOFTMAX_GRADIENTS = frozenset({"_softmax_backward_data", "_log_softmax_backward_data"})
_REDUCTIONS = """sum mean amax amin max min argmax argmin var var_mean std std_mean prod any all
    norm linalg_vector_norm logsumexp mse_loss smooth_l1_loss binary_cross_entropy
    binary_cross_entropy_with_logits kl_div"""
_REDUCED = frozenset(_REDUCTIONS.split())
_OWN_KERNELS = """fused_mask_load mm bmm addmm baddbmm _grouped_mm linalg_solve_triangular attention
    attention_backward convolution convolution_input convolution_weight cumsum cumprod
    logcumsumexp _logcumsumexp topk sort argsort index_put _index_put_impl index_add index_copy
    scatter scatter_add masked_scatter masked_scatter_backward _unsafe_index_put
    embedding_dense_backward im2col col2im bincount histc searchsorted bucketize
    multinomial cdist _cdist_forward dist cross dot
    _thnn_fused_lstm_cell _thnn_fused_gru_cell _thnn_fused_lstm_cell_backward
    _thnn_fused_gru_cell_backward vdot repeat_interleave zero upsample_bilinear2d_backward
    upsample_nearest2d_backward max_pool2d_with_indices_backward max_pool3d_with_indices_backward"""
LIBRARY = frozenset(_OWN_KERNELS.split())
"""Operators that are kernels of their own: of libraries, or that sort, scan or scatter."""
_NOT_AGAIN = """random cat stack max_pool2d_with_indices max_pool3d_with_indices avg_pool2d
    avg_pool3d _adaptive_avg_pool2d upsample_nearest2d upsample_bilinear2d bernoulli normal uniform
    copy fill constant_pad_nd flip roll repeat"""
NOT_AGAIN = frozenset(_NOT_AGAIN.split())
"""Generated operators that the backward pass does not run again."""
STATISTICS = frozenset({"norm_statistics", "softmax_statistics"})
PARTIAL = "partial_sums"
PICKED = "pick"
_ROWS_OF_A_PARTIAL_SUM = 16  # 512 partial sums for 8,192 rows, as profiled
_FP32, _BF16 = 4, 2  # bytes of an element
_PADDED = {"mm": (0, 1), "addmm": (1, 2)}  # positions of the operands that are padded
_ALIGNED = 8  # elements in bf16: 16 bytes
_LEAST_PADDED = 256  # products with a smaller side are memory-bound and not padded


class Parts:
    """The parts of recorded operators; arrays between parts get new storages."""

    def __init__(self) -> None:
        self._storages = count(1)

    def array(self, shape: tuple[int, ...], item_bytes: int = _FP32) -> Array:
        """Return an array with a storage of its own."""
        size = math.prod(shape) * item_bytes
        return Array(-next(self._storages), shape, item_bytes, size)

    def copy(self, call: Call, sequence: int, storages: dict[int, int]) -> Call:
        """Return an operator that runs again in the backward pass, with new storages."""
        for array in call.writes:
            storages[array.storage] = -next(self._storages)

        def moved(arrays: tuple[Array, ...]) -> tuple[Array, ...]:
            return tuple(replace(a, storage=storages.get(a.storage, a.storage)) for a in arrays)

        reads, writes = moved(call.reads), moved(call.writes)
        return replace(call, reads=reads, writes=writes, backward=True, sequence=sequence)

    def of(self, call: Call, twin: Call) -> Iterator[Call]:
        """Yield the parts of one operator; `twin` is that operator for other samples."""
        name = call.name
        if name in NORMS and len(call.writes) > 1:
            yield from self._norm(call, twin)
        elif name in _NORM_GRADIENTS:
            yield from self._norm_gradient(call, twin)
        elif name in _SOFTMAX:
            x, y = call.reads[0], call.writes[0]
            yield from self._by_statistics(call, "softmax_statistics", (x,), y)
        elif name in _SOFTMAX_GRADIENTS:
            yield from self._by_statistics(
                call, "softmax_statistics", call.reads[:2], call.writes[0]
            )
        elif name == "nll_loss_forward":
            picked = self.array(call.reads[0].shape[:-1])
            yield replace(call, name=PICKED, writes=(picked,))
            yield from self._sums(replace(call, name="sum", reads=(picked,)))
        elif name == "nll_loss_backward":  # reads the shape of the logits, not their values
            yield replace(call, reads=(call.reads[0], *call.reads[2:]))
        elif name == "embedding_dense_backward":
            yield from self._scattered(call)
        elif name == "native_dropout" and len(call.writes) == 2:
            y, mask = call.writes
            yield replace(call, name="random", reads=(), writes=(mask,))
            yield replace(call, name="mul", reads=(call.reads[0], mask), writes=(y,))
        elif name in _REDUCED and not (_by_rows(call) and _by_rows(twin)):
            yield from self._sums(call)
        elif name in _PADDED:
            yield from self._aligned(call, twin)
        else:
            yield call

    def _by_statistics(
        self, call: Call, name: str, reads: tuple[Array, ...], written: Array
    ) -> Iterator[Call]:
        statistics = self.array(reads[0].shape[:-1], 2 * _FP32)
        yield replace(call, name=name, reads=reads, writes=(statistics,))
        yield replace(call, name="normalise", reads=(*call.reads, statistics), writes=(written,))

    def _norm(self, call: Call, twin: Call) -> Iterator[Call]:
        x, y, statistics = call.reads[0], call.writes[0], call.writes[1:]
        reduced = replace(call, name="norm_statistics", reads=(x,), writes=statistics)
        by_rows = all(_grouped(c.reads[0].shape, c.writes[1].shape) for c in (call, twin))
        yield from ([reduced] if by_rows else self._sums(reduced))
        yield replace(call, name="normalise", reads=(*call.reads, *statistics), writes=(y,))

    def _norm_gradient(self, call: Call, twin: Call) -> Iterator[Call]:
        x, of_x, rest = call.reads[1], call.writes[0], call.writes[1:]
        if of_x.shape != x.shape:  # the input needs no gradient
            rest = call.writes
        else:
            rows = call.reads[2].shape
            sums = self.array(rows, 2 * _FP32)
            reduced = replace(call, name="norm_statistics", writes=(sums,))
            by_rows = all(_grouped(c.reads[1].shape, c.reads[2].shape) for c in (call, twin))
            yield from ([reduced] if by_rows else self._sums(reduced))
            yield replace(call, name="normalise", reads=(*call.reads, sums), writes=(of_x,))
        if rest:
            yield from self._sums(replace(call, name="sum", writes=rest))

    def _sums(self, call: Call) -> Iterator[Call]:
        """Yield a reduction whose rows are spread over cores: partial sums, then their sum."""
        read = max((array.elements for array in call.reads), default=1)
        width = max(sum(array.elements for array in call.writes), 1)
        rows = -(-read // (width * _ROWS_OF_A_PARTIAL_SUM))
        partial = self.array((rows, width))
        yield replace(call, name=PARTIAL, writes=(partial,))
        yield replace(call, name="sum_of_partial_sums", reads=(partial,))

    def _aligned(self, call: Call, twin: Call) -> Iterator[Call]:
        """Yield a product whose rows start at 16-byte bounds, after padded copies of operands.

        PyTorch, torch/_inductor/fx_passes/pad_mm.py. Dimensions that grow with the samples stay as
        they are: how they are padded depends on the number of samples.
        """
        at, reads = _PADDED[call.name], list(call.reads)
        pairs = {
            slot: tuple(zip(reads[slot].shape, twin.reads[slot].shape, strict=True)) for slot in at
        }
        sizes = {size for dims in pairs.values() for pair in dims for size in pair}
        for slot in at if min(sizes) >= _LEAST_PADDED and reads[at[0]].item_bytes == _BF16 else ():
            array = reads[slot]
            shape = tuple(
                -(-size // _ALIGNED) * _ALIGNED if size == other else size
                for size, other in pairs[slot]
            )
            if shape == array.shape:
                continue
            wide = self.array(shape, array.item_bytes)
            reads[slot] = replace(wide, parameter=array.parameter)
            yield replace(call, name="constant_pad_nd", reads=(array,), writes=(reads[slot],))
        yield replace(call, reads=tuple(reads))

    def _scattered(self, call: Call) -> Iterator[Call]:
        """Yield the gradient of a table: zeros, atomic sums in fp32, and a cast."""
        table, rows = call.writes[0], call.reads[0]
        sums = table
        if table.item_bytes != _FP32:
            sums = self.array(table.shape)
        yield replace(call, name="fill", reads=(), writes=(sums,))
        zeros, touched = replace(sums, shape=(0,)), replace(sums, shape=rows.shape)
        yield replace(call, reads=(*call.reads, zeros), writes=(touched,))
        if sums is not table:
            yield replace(call, name="_to_copy", reads=(sums,), writes=(table,))


def _by_rows(call: Call) -> bool:
    """Whether a reduction keeps the leading dimensions, so that one core reduces a whole row."""
    read = max(call.reads, key=lambda array: array.elements).shape
    left = call.writes[0].shape
    rows = [extent for extent in left if extent > 1]
    return bool(rows) and [extent for extent in read if extent > 1][: len(rows)] == rows


def _grouped(x: tuple[int, ...], statistics: tuple[int, ...]) -> bool:
    """Whether each sample has statistics of its own, as in layer and group norms."""
    return statistics[0] == x[0]


def is_reduction(call: Call) -> bool:
    """Whether an operator reduces rows."""
    return call.name in STATISTICS or call.name in _REDUCED or call.name == PARTIAL
