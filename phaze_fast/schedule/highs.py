"""Schedules by HiGHS where branch and bound found no proof; only this file imports HiGHS.

The program, for operators with the two modes "one core" (latency l) and "all cores" (latency a),
as the layers of PHAZE have them. Times are divided by the makespan of the known schedule, so that
no better schedule is longer than 1; U = 1 + `_SLACK` is the horizon:

(1) minimise T
(2) T >= t_i + p_i,  p_i = l_i + (a_i - l_i) y_i
(3) t_j >= t_i + p_i                               for every edge i -> j
(4) t_j >= t_i + p_i - U (1 - x_ij)                for unordered pairs that may collide
(5) x_ij + x_ji >= y_i,  x_ij + x_ji >= y_j        where i (j) on all cores keeps j (i) from running
(6) x_ij + x_ji >= z_ic + z_jc - 1                 where both need a type that may be full
(7) sum over c of z_ic + y_i >= 1                  an operator on one core has one
y, x, z binary. T <= U is the cutoff, and T is at least the known bound.

Results of HiGHS are used only within its tolerances:

- A mode that takes longer than the known schedule is omitted: no better schedule has it. So no
  coefficient is above U.
- Latencies, and differences of an operator's two, that are below `_RESOLUTION` are rounded down.
  Every schedule is also a schedule of the rounded layer, so a bound of the latter is valid.
- Modes and order are taken from HiGHS, starts from `earliest_starts`: the makespan is that of the
  layer itself, to the last bit.
- The bound is HiGHS's dual bound less `_DUAL_ERROR`. A schedule is ``optimal`` where its makespan
  is at most `TOLERANCE` above it, and never where HiGHS contradicts itself or the known schedule.

The known schedule is not passed to HiGHS as a start: given one, HiGHS 1.15.1 declared a suboptimal
schedule optimal in tests on random layers, with presolve (layer 1,242) and without (layer 1,230).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from phaze_fast.errors import InvalidInputError
from phaze_fast.schedule.instance import LayerInstance, LayerSchedule

TOLERANCE = 1e-6
"""Relative; a makespan that HiGHS calls optimal is at most so far above the proven bound."""

_DUAL_ERROR = 5e-7
"""Most error of HiGHS's dual bound, as a part of the makespan: far above what tolerances of
1e-9 on rows and columns that lie between 0 and 1 add up to."""
_RESOLUTION = 1e-9
"""Latencies below this part of the makespan are zero to HiGHS, which drops such coefficients."""
_SLACK = 1e-6
"""Keeps the known schedule, and every better one, within the cutoffs in spite of rounding."""
_SOLVER_TOLERANCE = 1e-9


class _Program:
    """Rows and columns of a mixed-integer program, collected one by one."""

    def __init__(self) -> None:
        self.lower: list[float] = []
        self.upper: list[float] = []
        self.whole: list[bool] = []
        self.rows: list[tuple[float, dict[int, float]]] = []

    def column(self, lower: float, upper: float, whole: bool = False) -> int:
        self.lower.append(lower)
        self.upper.append(upper)
        self.whole.append(whole)
        return len(self.lower) - 1

    def at_least(self, bound: float, terms: dict[int, float]) -> None:
        """Add the row: sum of terms >= bound."""
        self.rows.append((bound, terms))


@dataclass(frozen=True)
class _Mode:
    """A mode of an operator, on one core or on all."""

    mode: int
    """Its position among the operator's modes."""
    scaled: float
    """Latency as a part of the horizon, rounded down."""


@dataclass
class _Columns:
    """Columns of the program by meaning."""

    end: int
    start: list[int]
    all_cores: list[int]
    """Whether an operator takes all cores."""
    before: dict[tuple[int, int], int] = field(default_factory=dict)
    """Whether the first ends before the second starts, of pairs that may collide."""


def _reach(instance: LayerInstance) -> list[int]:
    """Collect the successors of each operator, direct and indirect, as bits."""
    count = len(instance)
    after = [0] * count
    for a, b in sorted(instance.edges, reverse=True):
        after[a] |= 1 << b
    for i in reversed(range(count)):
        for j in range(i + 1, count):
            if after[i] >> j & 1:
                after[i] |= after[j]
    return after


def _modes_of(schedule: LayerSchedule) -> list[dict[int, _Mode]]:
    """List the fastest mode of each operator on one core (key 1) and on all cores (key 0).

    Modes longer than the known schedule are omitted, except those of that schedule.
    """
    choices = []
    if not schedule.instance.one_or_all:
        raise InvalidInputError(
            f"{schedule.instance.name}: HiGHS is given operators on one core or on all; "
            "expected no other core counts"
        )
    for modes, chosen in zip(schedule.instance.modes, schedule.mode, strict=True):
        fastest: dict[int, _Mode] = {}
        for mode, (cores, latency) in enumerate(modes):
            scaled = latency / schedule.makespan
            known = fastest.get(cores)
            if (scaled > 1.0 and mode != chosen) or (known and known.scaled <= scaled):
                continue
            fastest[cores] = _Mode(mode, min(scaled, 1.0))
        choices.append(_rounded_down(fastest))
    return choices


def _rounded_down(modes: dict[int, _Mode]) -> dict[int, _Mode]:
    """Round down latencies, and differences of them, that HiGHS's tolerances treat as zero."""
    least = min(mode.scaled for mode in modes.values())
    floor = least if least >= _RESOLUTION else 0.0
    return {
        cores: replace(mode, scaled=floor if mode.scaled - floor < _RESOLUTION else mode.scaled)
        for cores, mode in modes.items()
    }


def _build(schedule: LayerSchedule, choices: list[dict[int, _Mode]]) -> tuple[_Program, _Columns]:
    instance, horizon = schedule.instance, 1.0 + _SLACK
    count = len(instance)
    one = [(w[1] if 1 in w else w[0]).scaled for w in choices]
    every = [(w[0] if 0 in w else w[1]).scaled for w in choices]
    program = _Program()
    columns = _Columns(
        end=program.column(min(schedule.bound / schedule.makespan, 1.0) * (1 - _SLACK), horizon),
        start=[program.column(0.0, horizon) for _ in range(count)],
        # Fixed where there is one mode only.
        all_cores=[program.column(float(1 not in w), float(0 in w), whole=True) for w in choices],
    )
    start, all_cores = columns.start, columns.all_cores

    def follows(i: int, later: dict[int, float], constant: float) -> None:
        """Add the row: later >= t_i + p_i + constant."""
        terms = {**later, start[i]: -1.0}
        if one[i] != every[i]:
            terms[all_cores[i]] = one[i] - every[i]
        program.at_least(one[i] + constant, terms)

    for i in range(count):
        follows(i, {columns.end: 1.0}, 0.0)
    for a, b in instance.edges:
        follows(a, {start[b]: 1.0}, 0.0)
    reach = _reach(instance)
    cores = _core_columns(program, instance, reach, all_cores)
    for i in range(count):
        for j in range(i + 1, count):
            shared = instance.types[i] & instance.types[j]
            if reach[i] >> j & 1 or (schedule.overlap and not shared):
                continue
            first, second = (program.column(0.0, 1.0, whole=True) for _ in range(2))
            columns.before[i, j], columns.before[j, i] = first, second
            both = {first: 1.0, second: 1.0}
            follows(i, {start[j]: 1.0, first: -horizon}, -horizon)
            follows(j, {start[i]: 1.0, second: -horizon}, -horizon)
            program.at_least(0.0, {**both, all_cores[i]: -1.0})
            program.at_least(0.0, {**both, all_cores[j]: -1.0})
            for r in range(3):
                if not shared >> r & 1 or r not in cores:
                    continue
                for c in range(instance.cores[r]):
                    pair = {cores[r][i][c]: -1.0, cores[r][j][c]: -1.0}
                    program.at_least(-1.0, {**both, **pair})
    return program, columns


def _core_columns(
    program: _Program, instance: LayerInstance, reach: list[int], all_cores: list[int]
) -> dict[int, dict[int, list[int]]]:
    """Add assignments to cores, for core types that unordered operators may fill."""
    columns: dict[int, dict[int, list[int]]] = {}
    for r, have in enumerate(instance.cores):
        users = [i for i, types in enumerate(instance.types) if types >> r & 1]
        most = 1 + max(
            (
                sum(1 for j in users if j != i and not (reach[i] >> j | reach[j] >> i) & 1)
                for i in users
            ),
            default=0,
        )
        if most <= have:
            continue
        columns[r] = {}
        for i in users:
            columns[r][i] = [program.column(0.0, 1.0, whole=True) for _ in range(have)]
            program.at_least(1.0, {**dict.fromkeys(columns[r][i], 1.0), all_cores[i]: 1.0})
    return columns


def _model(program: _Program, end: int) -> Any:
    import highspy

    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(program.lower), len(program.rows)
    cost = np.zeros(lp.num_col_)
    cost[end] = 1.0
    lp.col_cost_ = cost
    lp.col_lower_, lp.col_upper_ = np.array(program.lower), np.array(program.upper)
    lp.row_lower_ = np.array([bound for bound, _ in program.rows])
    lp.row_upper_ = np.full(lp.num_row_, highspy.kHighsInf)
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    sizes = [len(terms) for _, terms in program.rows]
    lp.a_matrix_.start_ = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    lp.a_matrix_.index_ = np.array([c for _, t in program.rows for c in t], dtype=np.int32)
    lp.a_matrix_.value_ = np.array([v for _, t in program.rows for v in t.values()])
    kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
    lp.integrality_ = [kinds[whole] for whole in program.whole]
    return lp


@dataclass(frozen=True)
class _Answer:
    """The result of HiGHS for the program; times are fractions of the horizon."""

    dual_bound: float
    """Lower bound of the makespan; zero where HiGHS has none."""
    objective: float
    """Makespan of the solution; infinite where HiGHS has none."""
    values: list[float]
    sound: bool
    """Whether the run ended at a proof or a limit, with a solution, if any, that keeps the rows."""


def _run(program: _Program, end: int, time_limit_s: float) -> _Answer:
    import highspy

    solver: Any = highspy.Highs()  # type: ignore[no-untyped-call]
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("time_limit", float(time_limit_s))
    solver.setOptionValue("mip_rel_gap", _SOLVER_TOLERANCE)
    solver.setOptionValue("mip_abs_gap", _SOLVER_TOLERANCE)
    for kind in ("mip", "primal", "dual"):
        solver.setOptionValue(f"{kind}_feasibility_tolerance", _SOLVER_TOLERANCE)
    solver.passModel(_model(program, end))
    solver.run()
    info, status = solver.getInfo(), highspy.HighsModelStatus
    # The known schedule is feasible, so an infeasible program is a numerical error.
    sound = solver.getModelStatus() in (status.kOptimal, status.kTimeLimit, status.kInterrupt)
    dual_bound = float(info.mip_dual_bound)
    solved = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    if not solved:
        return _Answer(dual_bound if math.isfinite(dual_bound) else 0.0, math.inf, [], sound)
    worst = max(float(info.max_primal_infeasibility), float(info.max_integrality_violation))
    objective = float(info.objective_function_value)
    sound = sound and worst <= _DUAL_ERROR and dual_bound <= objective + _DUAL_ERROR
    values = list(solver.getSolution().col_value)
    return _Answer(dual_bound if math.isfinite(dual_bound) else 0.0, objective, values, sound)


def solve_with_highs(schedule: LayerSchedule, time_limit_s: float) -> LayerSchedule:
    """Prove or improve a schedule with HiGHS.

    Parameters
    ----------
    schedule
        A feasible schedule; its makespan is the horizon, so that longer schedules are excluded.
    time_limit_s
        Wall time for HiGHS.

    Returns
    -------
    LayerSchedule
        The better of the two schedules, with the better of the two bounds. It is ``optimal`` by
        ``highs`` where its makespan exceeds a bound of HiGHS by at most the fraction `TOLERANCE`.
        Where results of HiGHS contradict the given schedule, that is returned.

    Raises
    ------
    InvalidInputError
        Where highspy is not installed, or operators run on other counts than one core and all.
    """
    try:
        import highspy  # noqa: F401
    except ImportError:
        raise InvalidInputError(
            "highspy is not installed; install it, or pass highs=False (--no-highs) to keep the "
            "known schedule, with its gap"
        ) from None
    if schedule.makespan <= 0.0:  # nothing takes any time
        return schedule
    choices = _modes_of(schedule)
    program, columns = _build(schedule, choices)
    answer = _run(program, columns.end, time_limit_s)
    best = schedule
    if answer.values:
        candidate = _decoded(schedule, choices, columns, answer.values)
        if candidate is not None and candidate.makespan < schedule.makespan:
            best = candidate
    return _with_proof(schedule, best, answer)


def _with_proof(schedule: LayerSchedule, best: LayerSchedule, answer: _Answer) -> LayerSchedule:
    """Combine the best schedule with the better of the known bound and that of HiGHS."""
    proven = (answer.dual_bound - _DUAL_ERROR) * schedule.makespan if answer.sound else 0.0
    if schedule.bound > best.makespan or proven > best.makespan:  # both cannot be true
        return schedule if schedule.bound > best.makespan else best
    bound = max(schedule.bound, proven)
    if schedule.status == "optimal" and best is schedule:
        return schedule
    if proven >= best.makespan * (1.0 - TOLERANCE):
        return replace(best, status="optimal", proved_by="highs", bound=bound)
    return replace(best, status="feasible", proved_by="nothing", bound=bound)


def _order(schedule: LayerSchedule, columns: _Columns, values: list[float]) -> list[int]:
    """Order operators by start, each after its predecessors in the graph and in HiGHS's order."""
    count = len(schedule.instance)
    waits: list[set[int]] = [set() for _ in range(count)]
    for a, b in schedule.instance.edges:
        waits[b].add(a)
    after: list[set[int]] = [set() for _ in range(count)]
    for (i, j), column in columns.before.items():
        if values[column] > 0.5 and values[columns.before[j, i]] <= 0.5:
            after[j].add(i)
    order: list[int] = []
    left = set(range(count))
    while left:
        ready = [i for i in left if not waits[i] & left]
        # Where HiGHS's order has a cycle, because of its tolerances, only the edges count.
        free = [i for i in ready if not after[i] & left] or ready
        chosen = min(free, key=lambda i: (values[columns.start[i]], i))
        order.append(chosen)
        left.remove(chosen)
    return order


def _decoded(
    schedule: LayerSchedule, choices: list[dict[int, _Mode]], columns: _Columns, values: list[float]
) -> LayerSchedule | None:
    """Build the schedule of HiGHS's modes and order with exact latencies; None where that fails."""
    instance, mode = schedule.instance, []
    for modes, column in zip(choices, columns.all_cores, strict=True):
        chosen = modes.get(0 if values[column] > 0.5 else 1) or next(iter(modes.values()))
        mode.append(chosen.mode)
    starts = earliest_starts(instance, _order(schedule, columns, values), mode, schedule.overlap)
    if not is_feasible(instance, starts, mode, schedule.overlap):
        return None
    exact = replace(schedule, starts=tuple(starts), mode=tuple(mode), energy_j=None)
    ends = [s + d for s, d in zip(starts, exact.durations, strict=True)]
    return replace(exact, makespan=max(ends))


# ---- exact starts ----

# Starts and the check use only the latencies and core counts of the instance, so that a solver's
# tolerances do not affect an answer. An operator that takes no time still needs its cores at the
# instant when it runs.


class _Timeline:
    """Operators with fixed starts; tests whether another operator fits at a time."""

    def __init__(self, instance: LayerInstance, blocked: Sequence[tuple[int, ...]]) -> None:
        self._cores, self._blocked = instance.cores, blocked
        self._placed: list[tuple[float, float, int]] = []

    def ends(self) -> list[float]:
        return [end for _, end, _ in self._placed]

    def place(self, op: int, start: float, end: float) -> None:
        self._placed.append((start, end, op))

    def fits(self, op: int, start: float, end: float) -> bool:
        """Whether cores suffice at `start` and wherever another operator starts before `end`."""
        overlapping = [p for p in self._placed if p[0] < end and start < p[1]]
        instants = {start, *(p[0] for p in overlapping if p[0] > start)}
        return all(self._cores_suffice(op, at, overlapping) for at in instants)

    def _cores_suffice(
        self, op: int, at: float, overlapping: list[tuple[float, float, int]]
    ) -> bool:
        running = [self._blocked[j] for s, e, j in overlapping if s <= at < e]
        # Operators of zero length run one after another in an instant: their cores do not add up.
        instant = [self._blocked[j] for s, e, j in overlapping if s == at == e]
        for r, have in enumerate(self._cores):
            used = self._blocked[op][r] + sum(cores[r] for cores in running)
            if used + max((cores[r] for cores in instant), default=0) > have:
                return False
        return True


def earliest_starts(
    instance: LayerInstance, order: Sequence[int], mode: Sequence[int], overlap: bool
) -> list[float]:
    """Fix operators one by one in `order`, each as early as edges and cores allow.

    This is serial schedule generation: applied to the order of starts of a feasible schedule, it
    gives one in which no operator starts later. O(n^4) for n operators at worst.

    Parameters
    ----------
    instance
        The layer.
    order
        Every operator once, none before an operator that it depends on.
    mode
        Position of each operator's mode among its modes.
    overlap
        Whether operators of other types may run at the same time as one on all cores.

    Examples
    --------
    >>> from phaze_fast.schedule import instance_from_dict
    >>> ops = [{"id": i, "type": "TC", "lat_single": 2.0} for i in range(3)]
    >>> layer = {"name": "x", "ops": ops, "edges": [[0, 2]], "num_tc": 2, "num_vc": 1}
    >>> earliest_starts(instance_from_dict(layer), [0, 1, 2], [0, 0, 0], False)
    [0.0, 0.0, 2.0]
    """
    before: list[list[int]] = [[] for _ in order]
    for a, b in instance.edges:
        before[b].append(a)
    length = [modes[choice][1] for modes, choice in zip(instance.modes, mode, strict=True)]
    timeline = _Timeline(instance, instance.blocked_cores(mode, overlap))
    starts = [0.0] * len(order)
    for op in order:
        ready = max((starts[b] + length[b] for b in before[op]), default=0.0)
        instants = sorted({ready, *(end for end in timeline.ends() if end > ready)})
        starts[op] = next(at for at in instants if timeline.fits(op, at, at + length[op]))
        timeline.place(op, starts[op], starts[op] + length[op])
    return starts


def is_feasible(
    instance: LayerInstance, starts: Sequence[float], mode: Sequence[int], overlap: bool
) -> bool:
    """Whether a schedule respects every edge and never uses more cores than there are."""
    length = [modes[choice][1] for modes, choice in zip(instance.modes, mode, strict=True)]
    ends = [s + d for s, d in zip(starts, length, strict=True)]
    if min(starts) < 0.0 or any(starts[b] < ends[a] for a, b in instance.edges):
        return False
    timeline = _Timeline(instance, instance.blocked_cores(mode, overlap))
    for op in range(len(instance)):
        if not timeline.fits(op, starts[op], ends[op]):
            return False
        timeline.place(op, starts[op], ends[op])
    return True
