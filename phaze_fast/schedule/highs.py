"""Takes a schedule that is not proven, gives HiGHS's: the only file that imports it.

The program, for operators with the two ways "one core" (latency l) and "all cores" (latency a),
which is what a layer of PHAZE has. Times are divided by the makespan of the schedule at hand, which
is also the horizon H = 1:

(1) minimise T
(2) T >= t_i + p_i,  p_i = l_i + (a_i - l_i) y_i
(3) t_j >= t_i + p_i                               for every edge i -> j
(4) t_j >= t_i + p_i - 2H (1 - x_ij)               for pairs in no order that may collide, both ways
(5) x_ij + x_ji >= y_i,  x_ij + x_ji >= y_j        where i (j) on all cores keeps j (i) from running
(6) x_ij + x_ji >= z_ic + z_jc - 1                 where both need a type that may be full
(7) sum over c of z_ic + y_i >= 1                  an operator on one core has one
y, x, z binary. T <= H is the cutoff, the bound at hand the least T. The schedule itself is not
given as a start: with one, HiGHS 1.15.1 called a layer optimal that was not, in each of two runs
over random layers that ended there, at the 1,242nd with presolve and the 1,230th without.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from phaze_fast.errors import InvalidInputError
from phaze_fast.schedule.result import LayerSchedule

__all__ = ["solve_with_highs"]

_INFINITY = float("inf")


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
        """Sum of terms >= bound."""
        self.rows.append((bound, terms))


def _reach(made: LayerSchedule) -> list[int]:
    """Operators that wait for each one, however far, as bits."""
    count = len(made.instance)
    after = [0] * count
    for a, b in sorted(made.instance.edges, reverse=True):
        after[a] |= 1 << b
    for i in reversed(range(count)):
        for j in range(i + 1, count):
            if after[i] >> j & 1:
                after[i] |= after[j]
    return after


def _latencies(made: LayerSchedule) -> tuple[list[float], list[float]]:
    """(on one core, on all) of each operator; both the same where there is one way only."""
    one, every = [], []
    for modes in made.instance.modes:
        ways = dict(modes)
        if set(ways) - {0, 1}:
            raise InvalidInputError(
                f"{made.instance.name}: HiGHS is given operators on one core or on all; "
                "expected no other core counts"
            )
        one.append(ways.get(1, _INFINITY))
        every.append(ways.get(0, _INFINITY))
    return one, every


def _build(made: LayerSchedule) -> tuple[_Program, dict[str, Any]]:
    instance, horizon = made.instance, made.makespan
    count = len(instance)
    one, every = (([v / horizon for v in column]) for column in _latencies(made))
    program = _Program()
    end = program.column(made.bound / horizon * (1 - 1e-9), 1.0)
    start = [program.column(0.0, 1.0) for _ in range(count)]
    # y: whether an operator takes all cores; fixed where there is one way only.
    alone = [
        program.column(float(one[i] == _INFINITY), float(every[i] != _INFINITY), whole=True)
        for i in range(count)
    ]
    one = [every[i] if one[i] == _INFINITY else one[i] for i in range(count)]
    every = [one[i] if every[i] == _INFINITY else every[i] for i in range(count)]

    def follows(i: int, later: dict[int, float], constant: float) -> None:
        """Later >= t_i + p_i + constant."""
        terms = {**later, start[i]: -1.0, alone[i]: one[i] - every[i]}
        program.at_least(one[i] + constant, terms)

    for i in range(count):
        follows(i, {end: 1.0}, 0.0)
    for a, b in instance.edges:
        follows(a, {start[b]: 1.0}, 0.0)
    reach = _reach(made)
    cores = _core_columns(program, made, reach, alone)
    for i in range(count):
        for j in range(i + 1, count):
            if reach[i] >> j & 1:
                continue
            shared = instance.types[i] & instance.types[j]
            collide = bool(shared) or not made.overlap
            if not collide:
                continue
            before = [program.column(0.0, 1.0, whole=True) for _ in range(2)]
            both = {before[0]: 1.0, before[1]: 1.0}
            follows(i, {start[j]: 1.0, before[0]: -2.0}, -2.0)
            follows(j, {start[i]: 1.0, before[1]: -2.0}, -2.0)
            program.at_least(0.0, {**both, alone[i]: -1.0})
            program.at_least(0.0, {**both, alone[j]: -1.0})
            for r in range(3):
                if not shared >> r & 1 or r not in cores:
                    continue
                for c in range(instance.cores[r]):
                    pair = {cores[r][i][c]: -1.0, cores[r][j][c]: -1.0}
                    program.at_least(-1.0, {**both, **pair})
    return program, {"end": end, "start": start, "alone": alone}


def _core_columns(
    program: _Program, made: LayerSchedule, reach: list[int], alone: list[int]
) -> dict[int, dict[int, list[int]]]:
    """Add assignments to cores, for types that operators in no order might fill."""
    instance = made.instance
    found: dict[int, dict[int, list[int]]] = {}
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
        found[r] = {}
        for i in users:
            found[r][i] = [program.column(0.0, 1.0, whole=True) for _ in range(have)]
            program.at_least(1.0, {**dict.fromkeys(found[r][i], 1.0), alone[i]: 1.0})
    return found


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


def solve_with_highs(made: LayerSchedule, time_limit_s: float) -> LayerSchedule:
    """Prove or improve a schedule with HiGHS.

    Parameters
    ----------
    made
        A feasible schedule; its makespan is the horizon, so that nothing worse is looked at.
    time_limit_s
        Wall time for HiGHS.

    Returns
    -------
    LayerSchedule
        The better of the two, with the better bound; ``optimal`` where HiGHS proved it.

    Raises
    ------
    InvalidInputError
        Where highspy is not installed, or operators run on other counts than one core and all.
    """
    try:
        import highspy
    except ImportError:
        raise InvalidInputError(
            "highspy is not installed; install it, or pass highs=False (--no-highs) to keep the "
            "schedule that was found, with its gap"
        ) from None
    program, columns = _build(made)
    solver: Any = highspy.Highs()  # type: ignore[no-untyped-call]
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("time_limit", float(time_limit_s))
    solver.setOptionValue("mip_rel_gap", 1e-9)
    solver.passModel(_model(program, columns["end"]))
    solver.run()
    info, outcome = solver.getInfo(), solver.getModelStatus()
    proven = outcome == highspy.HighsModelStatus.kOptimal
    horizon = made.makespan
    bound = max(made.bound, min(float(info.mip_dual_bound) * horizon, horizon))
    values = np.array(solver.getSolution().col_value)
    if proven and values.size:
        candidate = _read(made, values, columns)
        if candidate.makespan < made.makespan * (1 - 1e-9):
            made = candidate
        return replace(made, status="optimal", proved_by="highs", bound=made.makespan)
    if outcome == highspy.HighsModelStatus.kInfeasible:  # nothing is better than the horizon
        return replace(made, status="optimal", proved_by="highs", bound=made.makespan)
    return replace(made, bound=bound)


def _read(made: LayerSchedule, values: Any, columns: dict[str, Any]) -> LayerSchedule:
    """Modes from HiGHS; starts are laid out anew in its order, free of its tolerances."""
    count = len(made.instance)
    mode = []
    for i, ways in enumerate(made.instance.modes):
        wanted = 0 if values[columns["alone"][i]] > 0.5 else 1
        cores = [c for c, _ in ways]
        mode.append(cores.index(wanted) if wanted in cores else 0)
    order = sorted(range(count), key=lambda i: (values[columns["start"][i]], i))
    starts = _left_aligned(made, order, mode)
    chosen = replace(made, starts=tuple(starts), mode=tuple(mode))
    ends = [s + d for s, d in zip(starts, chosen.durations, strict=True)]
    return replace(chosen, makespan=max(ends))


def _left_aligned(made: LayerSchedule, order: list[int], mode: list[int]) -> list[float]:
    """Earliest starts in a given order, each operator beside those before it."""
    instance = made.instance
    before: dict[int, list[int]] = {i: [] for i in range(len(instance))}
    for a, b in instance.edges:
        before[b].append(a)
    length = [instance.modes[i][mode[i]][1] for i in range(len(instance))]
    holds = replace(made, mode=tuple(mode)).held
    whole = [instance.modes[i][mode[i]][0] == 0 and not made.overlap for i in range(len(instance))]
    starts = [0.0] * len(instance)
    placed: list[int] = []
    for i in order:
        ready = max((starts[b] + length[b] for b in before[i]), default=0.0)
        moments = sorted({ready, *(starts[j] + length[j] for j in placed)})
        for moment in (m for m in moments if m >= ready):
            beside = [
                j
                for j in placed
                if starts[j] < moment + length[i] and moment < starts[j] + length[j]
            ]
            if (whole[i] and beside) or any(whole[j] for j in beside):
                continue
            checks = [moment, *(starts[j] for j in beside if starts[j] > moment)]
            fits = all(
                sum(holds[j][r] for j in beside if starts[j] <= at < starts[j] + length[j])
                + holds[i][r]
                <= instance.cores[r]
                for at in checks
                for r in range(3)
            )
            if fits:
                starts[i] = moment
                break
        placed.append(i)
    return starts
