"""The ends of a block's experts as a mesh of dies sees them."""

from __future__ import annotations

from dataclasses import replace

from phaze_fast.opgraph.builder import LayerBuilder, OperatorSpec

__all__ = ["routed"]


def routed(builder: LayerBuilder) -> LayerBuilder:
    """Write the ends of a block's experts as a mesh sees them.

    Tokens are copied for their experts by an operator of its own, `dispatch`, whose output is what
    travels; what comes back is weighed as it arrives, so that `combine` is left out.
    """
    names = [spec.name for spec in builder.specs]
    if "dispatch" not in names:
        return builder
    sent, gone = names.index("dispatch"), names.index("combine")
    weigh = builder.specs[names.index("weigh")]
    made = LayerBuilder(builder.name)
    for at, spec in enumerate(builder.specs):
        if at == gone:
            continue
        inputs = tuple(builder.specs[gone].inputs[0] if i == gone else i for i in spec.inputs)
        inputs = tuple(i - (i > gone) for i in inputs)
        if at == sent:
            size = weigh.write_bytes
            made.specs.append(
                OperatorSpec(
                    "dispatch",
                    "dropout",
                    "VC",
                    inputs[:1],
                    m=weigh.m,
                    n=weigh.n,
                    read_bytes=size,
                    write_bytes=size,
                )
            )
        else:
            made.specs.append(replace(spec, inputs=inputs))
    made.kept = [
        replace(t, producer="dispatch") if t.name == "dispatched" else t for t in builder.kept
    ]
    return made
