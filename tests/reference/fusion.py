"""Least off-chip bytes by exhaustive enumeration: every tile size, loop order and kept set.

Written from the definition of the loop nest, not from the kernel: a nest is played tile by tile,
counting what each step fetches and writes, and what the buffer holds.
"""

from itertools import pairwise, product

INFINITE = float("inf")


def _count(size, tile):
    return -(-size // tile)


def _fits(held, capacity):
    return sum(held) <= capacity


def group_bytes(g, capacity, rules):
    """Bytes of a fused group; `g` and `rules` have the fields of FusedGroup and BufferRules."""
    e, sums, strip = rules.element_bytes, rules.sum_bytes, rules.strip_depth * rules.strip_copies
    best = INFINITE
    tiles = range(g.row_step, g.row_step * _count(g.rows, g.row_step) + 1, g.row_step)
    widths = range(
        g.hidden_step, g.hidden_step * _count(g.hidden, g.hidden_step) + 1, g.hidden_step
    )
    for rows, columns, order in product(tiles, widths, ("rows", "columns")):
        n_rows, n_columns = _count(g.rows, rows), _count(g.hidden, columns)
        outer, inner = (n_rows, n_columns) if order == "rows" else (n_columns, n_rows)
        for keep in product((False, True), repeat=2):
            input_kept, output_kept = keep if order == "rows" else (False, False)
            first_kept, second_kept = keep if order == "columns" else (False, False)
            tile = rows * columns * g.held * max(e, sums)
            kept = [
                tile,
                input_kept * g.inputs * rows * g.inner * e,
                output_kept * rows * g.outer * sums,
                first_kept * g.first * g.inner * columns * e,
                second_kept * g.second * columns * g.outer * e,
            ]
            in_first = [(not input_kept) * strip * rows * e, (not first_kept) * strip * columns * e]
            in_second = [
                (not output_kept) * strip * rows * sums,
                (not second_kept) * strip * columns * e,
            ]
            if g.inner and not _fits(kept + in_first, capacity):
                continue
            if g.outer and not _fits(kept + in_second, capacity):
                continue
            moved = 0.0
            for _ in range(outer):  # what stays over the inner loop is moved once per outer step
                x, y = g.rows / outer * g.inner * e * g.inputs, g.rows / outer * g.outer
                if order == "rows":
                    moved += x * (1 if input_kept else inner)
                    moved += y * e + (
                        0 if output_kept else rules.sum_transfers * (inner - 1) * y * sums
                    )
                    moved += g.inner * g.hidden * g.first * e + g.hidden * g.outer * g.second * e
                else:
                    a, b = (g.hidden / outer * w for w in (g.inner * g.first, g.outer * g.second))
                    moved += (a * (1 if first_kept else inner)) * e
                    moved += (b * (1 if second_kept else inner)) * e
                    moved += g.rows * g.inner * e * g.inputs
            if order == "columns":  # Y is summed over the outer loop
                moved += g.rows * g.outer * (e + rules.sum_transfers * (outer - 1) * sums)
            best = min(best, moved + g.moved_bytes)
    return g.count * best


def product_bytes(m, k, n, capacity, rules):
    """Bytes of one product by tiles of all three dimensions and all orders of the loops.

    The innermost loop runs over strips: of its dimension, only a strip is in the buffer.
    """
    e, sums, strip = rules.element_bytes, rules.sum_bytes, rules.strip_depth * rules.strip_copies
    best = INFINITE
    for a in range(1, m + 1):
        for b in range(1, n + 1):  # the output's tile stays while k streams
            if a * b * sums + strip * (a + b) * e <= capacity:
                best = min(best, (m * k * _count(n, b) + k * n * _count(m, a) + m * n) * e)
    for d in range(1, k + 1):
        spilled = rules.sum_transfers * (_count(k, d) - 1) * m * n * sums
        for a in range(1, m + 1):  # a tile of the left operand stays while n streams
            if a * d * e + strip * (a * sums + d * e) <= capacity:
                best = min(best, (m * k + k * n * _count(m, a) + m * n) * e + spilled)
        for b in range(1, n + 1):
            if b * d * e + strip * (b * sums + d * e) <= capacity:
                best = min(best, (k * n + m * k * _count(n, b) + m * n) * e + spilled)
    return best


def cuts(count, bytes_of):
    """Least bytes over all ways to cut a chain."""
    best = INFINITE
    for borders in product((False, True), repeat=count - 1):
        ends = [0, *(i + 1 for i, cut in enumerate(borders) if cut), count]
        best = min(best, sum(bytes_of(i, j) for i, j in pairwise(ends)))
    return best
