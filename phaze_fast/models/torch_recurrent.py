"""LSTMs and GRUs as a GPU's library runs them: one input product, then one step after another.

On the meta device PyTorch would run every step as several operators, some in place; cuDNN has one
product and one element-wise kernel for each step, and one product for the gradient of the weights.
"""

from __future__ import annotations

from typing import Any

import torch  # type: ignore[import-not-found, unused-ignore]

RECURRENT = (torch.lstm, torch.gru)
"""Functions of PyTorch's recurrent modules."""


class _Recurrence(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
    """The steps of one layer in one direction, recorded operator by operator."""

    @staticmethod
    def forward(ctx: Any, gates: Any, start: Any, weights: Any, cell: str, recorder: Any) -> Any:
        """Record a product and a cell for each step; `gates` are the products with the input."""
        steps, samples, width = gates.shape
        rows = [gates.new_empty((steps + 1, samples, start.shape[-1])) for _ in range(2)]
        hidden, cells = rows if cell == "lstm" else (rows[0], rows[0])
        states = [hidden] if cells is hidden else [hidden, cells]
        recorder.add("copy", recorder.arrays([start]), recorder.arrays([hidden[0]]), {})
        products = gates.new_empty((samples, width))
        for at in range(steps):
            reads = recorder.arrays([hidden[at], weights.t()])
            recorder.add("mm", reads, recorder.arrays([products]), {})
            reads = recorder.arrays([gates[at], products, cells[at]])
            written = recorder.arrays([*(state[at + 1] for state in states), gates[at]])
            recorder.add(f"_thnn_fused_{cell}_cell", reads, written, {})
        ctx.save_for_backward(gates, hidden, cells, weights)
        ctx.cell, ctx.recorder = cell, recorder
        return hidden[1:].clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        """Record the steps in reverse, and one product for the weights of all of them."""
        gates, hidden, cells, weights = ctx.saved_tensors
        recorder, of_gates = ctx.recorder, torch.empty_like(gates)
        of_hidden, of_cell = (gates.new_empty(hidden.shape[1:]) for _ in range(2))
        for at in reversed(range(gates.shape[0])):
            reads = recorder.arrays([gradient[at], of_hidden, of_cell, gates[at], cells[at]])
            written = recorder.arrays([of_gates[at], of_cell])
            recorder.add(f"_thnn_fused_{ctx.cell}_cell_backward", reads, written, {})
            reads = recorder.arrays([of_gates[at], weights])
            recorder.add("mm", reads, recorder.arrays([of_hidden]), {})
        flat = of_gates.flatten(0, 1)
        reads = recorder.arrays([flat.t(), hidden[:-1].flatten(0, 1)])
        of_weights = torch.empty_like(weights)
        recorder.add("mm", reads, recorder.arrays([of_weights]), {})
        return of_gates, of_hidden, of_weights, None, None


def run_recurrent(func: Any, recorder: Any, *args: Any) -> Any:
    """Run an LSTM or a GRU; what it returns has the shapes that PyTorch's function returns."""
    if not isinstance(args[2], tuple | list):
        raise RuntimeError("packed sequences, whose lengths depend on data; expected padded ones")
    x, states, weights, biased, layers, dropout, train, both_ways, batch_first = args
    cell = "lstm" if func is torch.lstm else "gru"
    start = states[0] if cell == "lstm" else states
    rows = x.transpose(0, 1) if batch_first else x
    directions, each = 1 + both_ways, 2 + 2 * biased + (start.shape[-1] != weights[1].shape[1])
    last = []
    for layer in range(layers):
        outputs = []
        for way in range(directions):
            at = layer * directions + way
            own = weights[each * at : each * (at + 1)]
            bias = own[2] + own[3] if biased else None
            gates = torch.nn.functional.linear(rows, own[0], bias)
            hidden = _Recurrence.apply(  # type: ignore[no-untyped-call, unused-ignore]
                gates, start[at], own[1], cell, recorder
            )
            outputs.append(hidden)
            last.append(hidden[-1])
        rows = outputs[0] if directions == 1 else torch.cat(outputs, -1)
        if train and dropout and layer + 1 < layers:
            rows = torch.native_dropout(rows, dropout, True)[0]
    out = rows.transpose(0, 1) if batch_first else rows
    ends = torch.stack(last).detach()
    return (out, ends, torch.empty_like(ends)) if cell == "lstm" else (out, ends)
