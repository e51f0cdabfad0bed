"""Which operators of a layer tensor-parallel devices can share, found by its shapes.

Two products are split as Megatron-LM splits them, the first by columns and the second by rows,
where all that lies between them is closed: nothing else reads it, nothing else enters it, and
nothing in it reduces over the columns that are split. Logits are split by their vocabulary up to
the loss, and so is the table that tokens are looked up in. Experts computed as grouped products are
split in the same way, each of them.
"""

from __future__ import annotations

from phaze_fast.models.graph_model import GraphLayer, GraphOperator, SavedTensor

__all__ = ["widths_divide", "with_split"]

_REDUCTIONS = ("mean", "sum", "amax", "var", "norm", "max", "var_mean", "linalg_vector_norm")
_WIDEST_NUMBER = 8  # bytes
_NO_PAIR = "no pair of products whose weights could be split by columns and by rows"


def _consumers(operators: tuple[GraphOperator, ...]) -> list[set[int]]:
    found: list[set[int]] = [set() for _ in operators]
    for at, op in enumerate(operators):
        for source in op.inputs:
            if source >= 0:
                found[source].add(at)
    return found


def _reduces(op: GraphOperator) -> bool:
    last = op.name.rsplit(".", 1)[-1].split("-")[0]
    return op.kind in ("norm", "softmax") or last in _REDUCTIONS


def _begins(operators: tuple[GraphOperator, ...], row: int, at: int) -> bool:
    """Whether an input only says where groups of rows begin: one number for each product."""
    groups, source = operators[row].b, operators[at]
    size = source.write_bytes + source.fixed_write_bytes
    return at >= 0 and groups > 1 and size <= _WIDEST_NUMBER * groups


class _Region:
    """What lies between some products split by columns and one that is split by rows."""

    def __init__(self, operators: tuple[GraphOperator, ...], row: int) -> None:
        self.row = row
        self.columns: set[int] = set()
        self.inside: set[int] = set()
        self.closed = True
        waiting = [at for at in operators[row].inputs if not _begins(operators, row, at)]
        while waiting:
            at = waiting.pop()
            if at < 0:
                self.closed = False
                return
            if operators[at].kind == "gemm":
                self.columns.add(at)
            elif at not in self.inside:
                self.inside.add(at)
                waiting += operators[at].inputs

    def fits(self, operators: tuple[GraphOperator, ...], consumers: list[set[int]]) -> bool:
        """Whether nothing leaves it, and nothing in it needs all columns."""
        if not self.closed or not self.columns:
            return False
        own = self.inside | {self.row}
        if any(not consumers[at] <= own for at in self.columns | self.inside):
            return False
        widths = {operators[at].n for at in self.columns}
        if operators[self.row].k > sum(operators[at].n for at in self.columns):
            return False
        return not any(_reduces(operators[at]) and operators[at].n in widths for at in self.inside)


def _vocabulary(operators: tuple[GraphOperator, ...], consumers: list[set[int]]) -> dict[int, str]:
    """Roles of a table that is looked up, and of logits and what follows them up to the loss."""
    tables = [at for at, op in enumerate(operators) if op.kind == "embedding" and op.weights]
    roles = {}
    if tables:  # smaller ones, of positions and segments, are whole on every device
        roles[max(tables, key=lambda at: operators[at].weights)] = "vocabulary"
    for at, op in enumerate(operators):
        if op.kind != "gemm":
            continue
        behind: set[int] = set()
        waiting = [at]
        while waiting:
            for reader in consumers[waiting.pop()] - behind:
                behind.add(reader)
                waiting.append(reader)
        kinds = {operators[reader].kind for reader in behind}
        if "softmax" in kinds and not kinds & {"gemm", "attention", "batched-gemm"}:
            roles[at] = "vocabulary"
            roles |= {r: "inside" for r in behind if operators[r].n == op.n}
    return roles


def with_split(layer: GraphLayer) -> GraphLayer:
    """Mark how tensor-parallel devices share a layer's operators, or say why they cannot."""
    operators = layer.forward
    consumers = _consumers(operators)
    roles: dict[int, str] = {}
    for at, op in enumerate(operators):
        if op.kind != "gemm" or at in roles:
            continue
        region = _Region(operators, at)
        if region.fits(operators, consumers) and not roles.keys() & region.columns:
            roles |= dict.fromkeys(region.columns, "columns")
            roles |= dict.fromkeys(region.inside, "inside")
            roles[at] = "rows"
    for at, role in _vocabulary(operators, consumers).items():
        roles.setdefault(at, role)
    if not roles:
        return layer.replace(unsplit=f"{layer.name} has {_NO_PAIR}")
    forward = tuple(
        op.replace(split=roles[at]) if at in roles else op for at, op in enumerate(operators)
    )
    saved = tuple(_kept(tensor, roles) for tensor in layer.saved)
    return layer.replace(forward=forward, saved=saved)


def _kept(tensor: SavedTensor, roles: dict[int, str]) -> SavedTensor:
    shared = roles.get(tensor.producer, "no") in ("columns", "inside")
    return tensor.replace(split=True) if shared else tensor


def widths_divide(layer: GraphLayer, width: int) -> str:
    """Say what of a layer so many devices cannot share evenly; empty where they can."""
    heads = max((op.k for op in layer.forward if op.kind == "attention"), default=0)
    for at, op in enumerate(layer.forward):
        size = {"columns": op.n, "rows": op.k}.get(op.split, 0)
        if op.split == "inside" and op.kind in ("attention", "batched-gemm"):
            size = op.b
        if size % width:
            return f"{width} does not divide {size} of {layer.name}.{op.name}"
        attended = any(
            reader.kind == "attention" and at in reader.inputs for reader in layer.forward
        )
        if op.split == "columns" and attended and heads and size // heads % width:
            return f"{width} does not divide {size // heads} heads of {layer.name}.{op.name}"
    return ""
