"""A layer's schedule: starts, cores, utilisation, critical path, a chart."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from phaze_fast.schedule.instance import LayerInstance

__all__ = ["LayerSchedule"]

_RESOURCES = ("TC", "VC", "NET")
_CHART = 60


@dataclass(frozen=True)
class LayerSchedule:
    """When each operator of a layer starts, on how many cores, and how good that is."""

    instance: LayerInstance
    status: str
    """``optimal`` where proven, else ``feasible``."""
    makespan: float
    """End of the last operator, in the unit of the latencies."""
    bound: float
    """No schedule ends earlier."""
    proved_by: str
    """``list-schedule``, ``branch-and-bound``, ``highs`` or ``nothing``."""
    starts: tuple[float, ...]
    mode: tuple[int, ...]
    """Which of its ways each operator runs in."""
    nodes: int
    """Of the search tree."""
    solve_s: float
    """Wall time."""
    overlap: bool = False
    """Whether an operator on all cores lets other types run beside it."""
    energy_j: float | None = None
    """Joules on the chip, where costs are known; a file of latencies has none."""

    @property
    def gap(self) -> float:
        """How far the makespan may be above the optimum, as a fraction of the bound."""
        return self.makespan / self.bound - 1.0 if self.bound > 0 else 0.0

    @property
    def durations(self) -> tuple[float, ...]:
        """Of each operator."""
        pairs = zip(self.instance.modes, self.mode, strict=True)
        return tuple(modes[choice][1] for modes, choice in pairs)

    @cached_property
    def held(self) -> tuple[tuple[int, int, int], ...]:
        """Cores of each type (tensor, vector, network) each operator holds."""
        found = []
        for types, modes, choice in zip(
            self.instance.types, self.instance.modes, self.mode, strict=True
        ):
            asked = modes[choice][0]
            use = [
                0 if not types >> r & 1 else (have if asked == 0 else min(asked, have))
                for r, have in enumerate(self.instance.cores)
            ]
            found.append((use[0], use[1], use[2]))
        return tuple(found)

    @property
    def utilization(self) -> dict[str, float]:
        """Share of each type's core time that its operators hold."""
        found = {}
        for r, name in enumerate(_RESOURCES):
            have = self.instance.cores[r]
            if have == 0 or not any(t >> r & 1 for t in self.instance.types):
                continue
            busy = sum(
                held[r] * seconds for held, seconds in zip(self.held, self.durations, strict=True)
            )
            found[name] = busy / (have * self.makespan) if self.makespan > 0 else 0.0
        return found

    @property
    def critical_path(self) -> tuple[str, ...]:
        """Operators that follow one another without a gap from some start to the end."""
        ends = [s + d for s, d in zip(self.starts, self.durations, strict=True)]
        path: list[int] = []
        at = self.makespan
        slack = 1e-9 * max(self.makespan, 1e-300)
        while True:
            found = [i for i, end in enumerate(ends) if abs(end - at) <= slack and i not in path]
            if not found:
                break
            op = max(found, key=lambda i: self.durations[i])
            path.append(op)
            at = self.starts[op]
            if at <= slack:
                break
        return tuple(self.instance.names[i] for i in reversed(path))

    def chart(self, width: int = _CHART) -> str:
        """Draw the schedule as text, a line per operator in order of start."""
        order = sorted(range(len(self.instance)), key=lambda i: (self.starts[i], i))
        label = max(len(name) for name in self.instance.names)
        scale = width / self.makespan if self.makespan > 0 else 0.0
        lines = []
        for i in order:
            first = min(int(self.starts[i] * scale), width - 1)
            last = max(first + 1, round((self.starts[i] + self.durations[i]) * scale))
            cores = self.instance.modes[i][self.mode[i]][0]
            mark = "#" if cores == 0 else "="
            bar = " " * first + mark * (last - first)
            kind = "+".join(
                name for r, name in enumerate(_RESOURCES) if self.instance.types[i] >> r & 1
            )
            asked = "all" if cores == 0 else str(cores)
            lines.append(f"{self.instance.names[i]:{label}} {kind:5} {asked:>3} |{bar:{width}}|")
        return "\n".join(lines)

    def __str__(self) -> str:
        used = ", ".join(f"{name} {share:.0%}" for name, share in self.utilization.items())
        proof = f"proven by {self.proved_by}" if self.status == "optimal" else f"gap {self.gap:.2%}"
        energy = "" if self.energy_j is None else f"; {self.energy_j:.4g} J"
        head = f"{self.instance.name}: {self.makespan:.6g} ({self.status}, {proof}); {used}{energy}"
        return f"{head}\n{self.chart()}"
