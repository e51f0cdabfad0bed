"""Random recorded training steps of small models: an embedding, layers and a head."""

from types import SimpleNamespace

from hypothesis import strategies as st

from phaze_fast.models.recording import Array, Call, Saved

OPERATORS = st.fixed_dictionaries(
    {
        "width": st.sampled_from([8, 24, 64]),
        "residual": st.booleans(),  # adds the layer's input
        "weights": st.booleans(),
        "saves": st.sampled_from(["nothing", "input", "output", "both"]),
        "temporaries": st.integers(0, 2),  # of its gradient
    }
)
LAYERS = st.lists(st.lists(OPERATORS, min_size=1, max_size=4), min_size=1, max_size=4)
STEPS = st.fixed_dictionaries(
    {"layers": LAYERS, "times": st.integers(1, 2), "head": st.lists(OPERATORS, max_size=3)}
)


class Recording:
    """Writes the operators of a step of `samples` samples."""

    def __init__(self, samples):
        self.samples = samples
        self.calls, self.saved = [], []
        self.parameters, self.copies, self.frozen = {}, {}, set()
        self.constants = SimpleNamespace(random_lines=[])
        self.storages, self.sequence = 0, 0
        self.writer, self.arrays, self.tape = {}, {}, []

    def array(self, *shape, parameter=False):
        self.storages += 1
        size = 2
        for dim in shape:
            size *= dim
        made = Array(self.storages, shape, 2, size, parameter)
        self.arrays[made.storage] = made
        return made

    def call(self, name, reads, writes, backward, path, sequence):
        sources = [self.writer[a.storage] for a in reads if a.storage in self.writer]
        made = Call(name, tuple(reads), tuple(writes), tuple(sources), backward, path, sequence)
        self.calls.append(made)
        self.writer |= {a.storage: len(self.calls) - 1 for a in writes}

    def save(self, array, path):
        self.saved.append(Saved(array, len(self.calls), path, self.writer.get(array.storage, -1)))

    def run(self, operators, x, path):
        """Run a layer forward; return its output."""
        first = x
        for op in operators:
            self.sequence += 1
            reads, kept = [x], []
            residual = op["residual"] and first.shape == (self.samples, op["width"])
            if residual and first is not x:
                reads.append(first)
            if op["weights"]:
                count = 1000 + len(self.parameters)
                weights = self.array(count, parameter=True)
                self.parameters[weights.storage] = count
                reads.append(weights)
            if op["saves"] in ("input", "both"):
                self.save(x, path)
                kept.append(x)
            y = self.array(self.samples, op["width"])
            self.call("mul", reads, [y], False, path, self.sequence)
            if op["saves"] in ("output", "both"):
                self.save(y, path)
                kept.append(y)
            self.tape.append((self.sequence, op, reads, kept, y))
            x = y
        return x

    def differentiate(self, output):
        """Run the whole backward pass."""
        pending = {output.storage: self.array(*output.shape)}
        for sequence, op, reads, kept, y in reversed(self.tape):
            gradient = pending.pop(y.storage)
            for _ in range(op["temporaries"]):
                made = self.array(*gradient.shape)
                self.call("mul", [gradient, *kept], [made], True, (), sequence)
            found = []
            for x in reads:
                if len(found) == 1 and not x.parameter:  # the residual
                    found.append((x, gradient))
                    continue
                made = self.array(*x.shape)
                self.call("mul", [gradient, *kept], [made], True, (), sequence)
                found.append((x, made))
            for x, made in found:
                if x.parameter or x.storage not in self.writer:
                    continue
                if x.storage in pending:
                    total = self.array(*x.shape)
                    self.call("add", [pending[x.storage], made], [total], True, (), sequence)
                    made = total
                pending[x.storage] = made


def recorded(step, samples):
    """Return the recording of a step and its modules."""
    made, root = Recording(samples), (1, "")
    widths = {"width": 24, "residual": False, "weights": True, "saves": "input", "temporaries": 0}
    x = made.run([widths], made.array(samples, 8), (root,))
    layers = step["layers"] * step["times"]
    for at, operators in enumerate(layers):
        x = made.run(operators, x, (root, (2 + at, f"layers.{at}")))
    made.differentiate(made.run([widths, *step["head"]], x, (root,)))
    names = tuple(str(at) for at in range(len(layers)))
    modules = {"": ("Model", ("layers",)), "layers": ("ModuleList", names)}
    modules |= {f"layers.{name}": ("Block", ()) for name in names}
    return made, modules
