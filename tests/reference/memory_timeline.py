"""A stage's memory event by event: every layer of every pass, forward and backward, one at a time."""

from reference.memory import order_of


def simulated_peak(layers, schedule, stages, stage, micro_batches, late, buffers, fragmentation):
    """Bytes that a stage holds at most besides weights and optimiser state.

    A layer is a dict of what it keeps of a micro-batch (`kept`), needs beside that while it runs
    backward (`live`), the bytes of its gradients (`gradient`) and, for the head, of the logits
    while the loss is computed (`loss`). Gradients are there all the time, or where they are `late`
    from their layer's first backward pass on.
    """
    grown = set() if late else set(range(len(layers)))
    held, most = 0.0, 0.0

    def look(extra):
        nonlocal most
        moving = (held + extra + buffers) * (1 + fragmentation)
        most = max(most, moving + sum(layers[k]["gradient"] for k in grown))

    for parts in order_of(schedule, stages, stage, micro_batches, 1):
        for kind, _, _ in parts:
            if kind == "F":
                for layer in layers:
                    held += layer["kept"]
                    look(layer.get("loss", 0.0))
            else:
                for k in reversed(range(len(layers))):
                    look(layers[k]["live"])
                    held -= layers[k]["kept"]
                    grown.add(k)
                    look(0.0)
    look(0.0)
    assert abs(held) < 1e-3
    return most
