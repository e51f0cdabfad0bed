"""The memory of a recorded step, played operator by operator with sets of references."""


class Player:
    """Allocates what an operator writes and frees what nothing refers to any more."""

    def __init__(self, recording):
        self.recording = recording
        self.calls = recording.calls
        self.sizes = {}  # allocated storages and their bytes
        self.made_in = {}  # modules that ran when a storage was written
        self.passed = {}  # modules that a storage was passed to and that still run
        self.same = {}  # results of sums that were written in place
        self.profile = []

    def name(self, storage):
        while storage in self.same:
            storage = self.same[storage]
        return storage

    def read_after(self, at):
        return {self.name(a.storage) for call in self.calls[at + 1 :] for a in call.reads}

    def written_in_backward(self, before):
        return {a.storage for c in self.calls[:before] if c.backward for a in c.writes}

    def is_sum(self, at):
        call = self.calls[at]
        done = self.written_in_backward(at)
        return call.backward and call.name == "add" and all(a.storage in done for a in call.reads)

    def node_goes_on(self, at):
        """Whether the next operator belongs to the same node of autograd."""
        if at + 1 == len(self.calls) or not self.calls[at].backward:
            return False
        same = self.calls[at].sequence == self.calls[at + 1].sequence
        return same and not self.is_sum(at) and not self.is_sum(at + 1)

    def run(self):
        for saved in self.recording.saved:
            if saved.source < 0:
                self.sizes[saved.array.storage] = saved.array.held_bytes
        gradients = set()
        for at, call in enumerate(self.calls):
            for array in call.reads if call.backward else ():  # the first gradient
                if array.storage not in self.recording.parameters:
                    self.sizes.setdefault(self.name(array.storage), array.held_bytes)
            self.write(at, call)
            if call.backward:
                later = {a.storage for c in self.calls for a in c.reads}
                gradients |= {
                    self.name(a.storage)
                    for a in call.writes
                    if a.storage not in later and a.elements in self.recording.parameters.values()
                }
            else:
                self.pass_on(call)
            self.profile.append(sum(self.sizes.values()))
            if not self.node_goes_on(at):
                self.free(at, gradients)
        return self.profile

    def write(self, at, call):
        in_place = False
        if self.is_sum(at):
            first, result = call.reads[0].storage, call.writes[0].storage
            raw = {a.storage for c in self.calls[at + 1 :] for a in c.reads}
            if first not in raw and call.reads[0].held_bytes == call.writes[0].held_bytes:
                self.same[result] = first
                in_place = True
        if not in_place:
            for array in call.writes:
                self.sizes[array.storage] = array.held_bytes
                self.made_in[array.storage] = {number for number, _ in call.path}

    def pass_on(self, call):
        for array in call.reads:
            for number, path in call.path:
                if path and number not in self.made_in.get(array.storage, {number}):
                    self.passed.setdefault(array.storage, set()).add(number)
                    break

    def free(self, at, gradients):
        wanted = self.read_after(at) | gradients
        running = {n for c in self.calls[at + 1 :] if not c.backward for n, _ in c.path}
        for storage in list(self.sizes):
            held = self.passed.get(storage, set()) & running
            if storage not in wanted and not held:
                del self.sizes[storage]
