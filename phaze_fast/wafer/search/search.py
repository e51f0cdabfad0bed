"""The search for the fastest mapping of a model on a wafer, with a lower bound.

Layouts are visited in the order of a quick bound, in batches of a fixed size; a layout whose bound
is no better than the best mapping so far is pruned, and so is one in which a die needs more than
its memory under every mapping. If none of the first batch has a mapping that fits, one is
constructed: the mapping of least memory in the layouts with most memory. Each layout that is not
pruned gets start mappings - plans of other systems and the operator mappings of a relaxation -
which are improved by single changes and a short annealing. The most promising layouts then get a
genetic search: several seeds, long annealings, and children that take some operators from one
parent and the rest from another. The same seed gives the same answer for any number of threads.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from phaze_fast import _core
from phaze_fast.errors import InvalidInputError
from phaze_fast.tables import Array, picked
from phaze_fast.threads import thread_count
from phaze_fast.units import format_bytes
from phaze_fast.wafer.mapping.encoding import Encoding
from phaze_fast.wafer.mapping.evaluate import Evaluation, evaluation_of, score_op_mappings
from phaze_fast.wafer.mapping.layout import Layout
from phaze_fast.wafer.mapping.problem import Problem
from phaze_fast.wafer.search.baselines import is_linear, plan_starts
from phaze_fast.wafer.search.bounds import (
    LeastMemory,
    Roofline,
    least_memory,
    priced_mappings,
    quick_bound,
    roofline,
    state_shortfall,
    tight_bound,
    work_bound,
)
from phaze_fast.wafer.search.result import (
    Effort,
    MappingResult,
    bound_space_of,
    whole_number,
)
from phaze_fast.wafer.search.session import Data, Progress, Session, Task, session_of

Rank = tuple[bool, float]
"""Whether a mapping exceeds memory, and the excess in bytes or else its time. Smaller is better."""

_LAST: Rank = (True, float("inf"))
_BATCH = 16  # layouts between two updates of the incumbent
_CONSTRUCTED = 64  # layouts with most memory among which a mapping is constructed
_TIGHTENED = 4  # number of bounds tightened at a time
_FIRST_STEPS = 3_000
_NEAR = 1.2  # factor on the incumbent below which the survey tries single changes
_LOSS = 0.03  # initial relative loss that annealing accepts
_LOSSES = (0.03, 0.1, 0.3)  # initial relative losses for successive seeds


@dataclass
class Tried:
    """State of one visited layout."""

    layout: Layout
    bound_s: float
    rank: Rank
    operator_mappings: Any
    mapping: Any
    """The compiled layout; None if it was pruned, does not fit or the budget ran out."""
    oom: LeastMemory | None = None
    """Proof that no mapping of the layout fits, if there is one."""
    evaluations: int = 0
    kernel_s: float = 0.0
    kernel_evaluations: int = 0


def _by_memory(layout: Layout) -> tuple[bool, int, int, int, Layout]:
    """Sort key for most memory per sequence: plain 1F1B, many dies, small micro-batches first."""
    plain = layout.schedule == "1f1b" and not layout.blocks
    return (not plain, -layout.dies * layout.stages, layout.micro_batch, -layout.dies, layout)


def rank_of(mapping: _core.Mapping) -> Rank:
    """Rank the current operator mappings of a compiled mapping."""
    score = mapping.score()[0]
    over_bytes = float(score["over_bytes"] + score["stream_over_bytes"])
    return (over_bytes > 0, over_bytes if over_bytes > 0 else float(score["time_s"]))


class MappingSearch:
    """One search on one wafer, for a mapping that takes less than `below_s`.

    The other parameters are those of `search_mapping`.
    """

    def __init__(
        self,
        problem: Problem,
        effort: Effort,
        seed: int = 0,
        threads: int | None = None,
        starts: Sequence[tuple[Layout, Array]] = (),
        progress: Progress | None = None,
        wanted: Sequence[Layout] | None = None,
        below_s: float = float("inf"),
    ) -> None:
        self.problem, self.effort, self.progress = problem, effort, progress
        self.seed = whole_number("seed", seed, 0, 2**62)
        self.threads = thread_count(threads)
        self.starts: dict[Layout, list[Array]] = {}
        for layout, op_mappings in starts:
            self.starts.setdefault(layout, []).append(op_mappings)
        self.below_s, self.wanted = below_s, wanted
        self.roofline: Roofline = roofline(problem)
        self.began = time.perf_counter()
        self.bounds: list[float] = []
        self.pruned = self.unseen = 0
        self.begun = False
        self.missing = False  # whether the state fits in none of the layouts
        self.short_of_state = state_shortfall(problem)  # why in no placement at all, or empty
        self.count = 0

    # ---- one layout ----

    def visit(self, task: tuple[Layout, float, float]) -> Tried | None:
        """Examine one layout unless the budget is spent; None if an operator cannot be split."""
        layout, least_s, best = task
        if self.begun and self.late():
            return Tried(layout, least_s, _LAST, None, None)
        return self.examine(layout, least_s, best)

    def examine(self, layout: Layout, least_s: float, best: float) -> Tried | None:
        """Bound one layout and improve a few starts; None if some operator cannot be split."""
        least_s = max(least_s, work_bound(self.problem, layout))
        if least_s >= best:
            return Tried(layout, least_s, _LAST, None, None)
        try:
            mapping = self.problem.mapping(layout)
        except InvalidInputError:
            return None
        self.begun = True  # at least one layout is visited, even without budget
        minima = least_memory(self.problem, mapping)
        oom = next((least for least in minima if least.proves_oom), None)
        if oom is not None:
            tried = Tried(layout, float("inf"), _LAST, oom.op_mappings, mapping, oom)
            self.start(tried, (oom.op_mappings,))
            tried.mapping = None  # to free it: many layouts may not fit
            return tried
        relaxation = mapping.relaxation()
        free, relaxed = relaxation.bound(1.0, 0.0, enough=best)
        bound = max(quick_bound(self.problem, layout, relaxation, free, best), least_s)
        tried = Tried(layout, bound, _LAST, mapping.op_mappings(), mapping)
        if bound < best < float("inf") and self.problem.stream is not None:
            tried.bound_s = bound = self.tighten(tried, best, relaxation)
        if bound >= best:
            return tried
        known_starts = self.starts.get(layout, [])
        self.start(tried, (relaxed, *known_starts, *plan_starts(self.problem, layout)))
        if tried.rank[0] and bound < float("inf"):  # memory is exceeded
            self.start(tried, priced_mappings(self.problem, layout, relaxation, free))
        if tried.rank[0]:
            self.start(tried, (least.op_mappings for least in minima))
        mapping.assign(tried.operator_mappings)
        began = time.thread_time()
        op_mappings, _, count = mapping.anneal(self.seed, _FIRST_STEPS, _LOSS)
        misfit, least = rank_of(mapping)
        if not misfit and least < _NEAR * best:
            op_mappings, _, more = mapping.descend(2)
            count += more
        tried.kernel_s += time.thread_time() - began
        tried.kernel_evaluations += count
        tried.evaluations += count
        tried.operator_mappings, tried.rank = op_mappings, rank_of(mapping)
        return tried

    def start(self, tried: Tried, starts: Iterable[Array]) -> None:
        """Evaluate start mappings of a layout; keep the best in `tried`."""
        for op_mappings in starts:
            try:
                tried.mapping.assign(op_mappings)
            except InvalidInputError:  # not legal in this layout
                continue
            tried.evaluations += 1
            rank = rank_of(tried.mapping)
            if rank < tried.rank:
                tried.rank, tried.operator_mappings = rank, op_mappings

    # ---- the genetic search in one layout ----

    def breed(self, tried: Tried) -> Tried:
        """Anneal several seeds, then children of the best mapping with others in turn."""
        mapping = tried.mapping
        if tried.oom is not None or (self.effort.stop is not None and self.effort.stop()):
            return tried
        few = 2.0 * self.effort.seeds * self.effort.steps
        if mapping.mapping_count() <= few:  # enumerate all
            tried.operator_mappings, _, evaluations = mapping.exhaust()
            mapping.assign(tried.operator_mappings)
            tried.evaluations += evaluations
            tried.rank = rank_of(mapping)
            return tried
        crowd: list[tuple[Rank, Array]] = [(tried.rank, tried.operator_mappings)]
        for k in range(self.effort.seeds):
            crowd.append(self.annealed(tried, tried.operator_mappings, self.seed + 1 + k))
        crowd.sort(key=lambda pair: pair[0])
        count = len(tried.operator_mappings)
        for k in range(self.effort.seeds):
            first, second = crowd[0][1], crowd[1 + k % (len(crowd) - 1)][1]
            cut = 1 + (self.seed + 7 * k) % (count - 1) if count > 1 else 0
            child = np.concatenate([first[:cut], second[cut:]])
            crowd.append(self.annealed(tried, child, self.seed + 101 + k))
        crowd.sort(key=lambda pair: pair[0])
        mapping.assign(crowd[0][1])
        op_mappings, _, evaluations = mapping.descend(4)
        tried.evaluations += evaluations
        tried.operator_mappings, tried.rank = op_mappings, rank_of(mapping)
        return tried

    def annealed(self, tried: Tried, op_mappings: Array, seed: int) -> tuple[Rank, Array]:
        """Anneal from given operator mappings; return the rank and the result."""
        mapping = tried.mapping
        mapping.assign(op_mappings)
        began = time.thread_time()
        loss = _LOSSES[seed % len(_LOSSES)]
        annealed_mappings, _, count = mapping.anneal(seed, self.effort.steps, loss)
        tried.kernel_s += time.thread_time() - began
        tried.kernel_evaluations += count
        tried.evaluations += count
        return rank_of(mapping), annealed_mappings

    def tighten(
        self, tried: Tried, enough_s: float, relaxation: _core.Relaxation | None = None
    ) -> float:
        """Return a tighter bound of one layout, or its known bound once the budget is spent."""
        if tried.oom is not None or self.late():
            return tried.bound_s
        relaxation = relaxation or tried.mapping.relaxation()
        return tight_bound(self.problem, tried.layout, relaxation, tried.bound_s, enough_s)

    def certify(self, pool: ThreadPoolExecutor, seen: list[Tried], best: float) -> None:
        """Tighten the lowest bounds until the lowest of all is a tightened one."""
        seen = sorted(seen, key=lambda tried: (tried.bound_s, tried.layout))
        while seen and seen[0].bound_s < min([best, *self.bounds]):
            lowest, seen = seen[:_TIGHTENED], seen[_TIGHTENED:]
            self.bounds += pool.map(lambda tried: self.tighten(tried, best), lowest)
        self.bounds += [tried.bound_s for tried in seen]

    # ---- the whole search ----

    def layouts(self) -> list[tuple[float, Layout]]:
        """List every layout with its quick bound: those with starts first, then by rising bound.

        If the state fits in none, the layouts with most memory are visited, which shows how much
        memory is missing.
        """
        problem = self.problem
        wanted = set(self.starts)
        wanted |= set(problem.layouts() if self.wanted is None else self.wanted)
        queue = sorted((self.roofline.bound_s(problem, layout), layout) for layout in wanted)
        self.count = len(queue)
        # Layouts with starts come first, so that they are never skipped.
        queue.sort(key=lambda pair: pair[1] not in self.starts)
        if queue and min(queue)[0] == float("inf") == self.below_s:
            self.missing = True
            return [(0.0, layout) for layout in sorted(wanted, key=_by_memory)]
        return queue

    def survey(self, pool: ThreadPoolExecutor, queue: list[tuple[float, Layout]]) -> list[Tried]:
        """Visit layouts in batches; pruned layouts are counted and their bounds recorded."""
        seen: list[Tried] = []
        constructed: Tried | None = None
        best = self.below_s
        for at in range(0, len(queue), _BATCH):
            left, batch = queue[at:], queue[at : at + _BATCH]
            if constructed is not None:
                left, batch = (
                    [pair for pair in pairs if pair[1] != constructed.layout]
                    for pairs in (left, batch)
                )
            if self.begun and (self.late() or (self.missing and seen)):
                self.unseen += 0 if self.missing else len(left)
                self.pruned += len(left) if self.missing else 0
                self.bounds += [least for least, _ in left]
                break
            tasks = [(layout, least, best) for least, layout in batch if least < best]
            self.pruned += len(batch) - len(tasks)
            self.bounds += [least for least, _ in batch if least >= best]
            batch_limit_s = best
            for tried in pool.map(self.visit, tasks):
                if tried is None:
                    continue
                if tried.rank == _LAST:
                    late = tried.bound_s < batch_limit_s
                    self.unseen += late
                    self.pruned += not late
                    self.bounds.append(tried.bound_s)
                    continue
                seen.append(tried)
                if not tried.rank[0]:
                    best = min(best, tried.rank[1])
            if at == 0 and best == float("inf") and not self.missing:
                examined = {tried.layout for tried in seen}
                others = [layout for _, layout in queue if layout not in examined]
                constructed = self.construct(pool, others)
            if at == 0 and constructed is not None:
                seen.append(constructed)
                best = constructed.rank[1]
                self.unseen -= any(layout == constructed.layout for _, layout in batch)
            if self.progress is not None:
                self.progress(min(at + _BATCH, len(queue)), len(queue), best)
        return seen

    def construct(self, pool: ThreadPoolExecutor, layouts: list[Layout]) -> Tried | None:
        """Construct a mapping that fits, without regard to the budget; None if there is none.

        Of the layouts with most memory, the one whose mapping of least memory fits and is fastest
        is examined. Where there is off-wafer memory, that mapping streams the weights.
        """

        def time_s(layout: Layout) -> float:
            try:
                mapping = self.problem.mapping(layout)
            except InvalidInputError:
                return float("inf")
            tried = Tried(layout, 0.0, _LAST, None, mapping)
            minima = least_memory(self.problem, mapping)
            self.start(tried, (least.op_mappings for least in minima))
            return float("inf") if tried.rank[0] else tried.rank[1]

        most_memory = sorted(layouts, key=_by_memory)[:_CONSTRUCTED]
        times_s = zip(pool.map(time_s, most_memory), most_memory, strict=True)
        fastest_s, fastest = min(times_s, default=(float("inf"), None))
        if fastest is None or fastest_s == float("inf"):
            return None
        tried = self.examine(fastest, self.roofline.bound_s(self.problem, fastest), float("inf"))
        return None if tried is None or tried.rank[0] else tried

    def promising(self, seen: list[Tried]) -> list[Tried]:
        """Return the best layouts, and half as many that do not fit yet and could be faster."""
        seen = [tried for tried in seen if tried.oom is None] or seen[:1]
        most = self.effort.promising
        most *= 1 + any(tried.layout.schedule != "1f1b" for tried in seen[:most])  # similar layouts
        best = seen[0].rank[1] if not seen[0].rank[0] else float("inf")
        hopeful = [t for t in seen[most:] if t.rank[0] and t.bound_s < best]
        hopeful.sort(key=lambda tried: (tried.rank, tried.layout))
        return seen[:most] + hopeful[: (most + 1) // 2]

    def run(self) -> MappingResult | None:
        """Run the search; None if bounds prune all layouts below `below_s`."""
        queue = self.layouts()
        with ThreadPoolExecutor(self.threads) as pool:
            seen = self.survey(pool, queue)
            if not seen:
                return None
            seen.sort(key=lambda tried: (tried.rank, tried.layout))
            chosen = list(pool.map(self.breed, self.promising(seen)))
            chosen.sort(key=lambda tried: (tried.rank, tried.layout))
            best = float("inf") if chosen[0].rank[0] else chosen[0].rank[1]
            self.certify(pool, seen, best)
        ranked = [
            score_op_mappings(self.problem, t.layout, t.operator_mappings)
            if t.mapping is None
            else evaluation_of(self.problem, t.layout, t.mapping)
            for t in chosen
        ]
        fits = ranked[0].fits
        return MappingResult(
            problem=self.problem,
            best=ranked[0],
            bound_s=self.bound_s,
            evaluations=sum(tried.evaluations for tried in seen),
            seconds=time.perf_counter() - self.began,
            kernel_s=sum(tried.kernel_s for tried in seen),
            kernel_evaluations=sum(tried.kernel_evaluations for tried in seen),
            layouts=self.count,
            pruned=self.pruned,
            unseen=self.unseen,
            seed=self.seed,
            bound_space=bound_space_of(
                self.problem, "" if self.wanted is None else f"{self.count:,} given layouts"
            ),
            runners_up=tuple(ranked[1:]),
            shortfall="" if fits else self.shortfall(seen),
        )

    def shortfall(self, seen: Sequence[Tried]) -> str:
        """Return the constraint that no mapping meets; empty where that is not proven."""
        if self.short_of_state:
            return self.short_of_state
        if self.bound_s < float("inf"):
            return ""
        proofs = [tried.oom for tried in seen if tried.oom is not None]
        if not proofs:
            return "the state does not fit on the dies of any layout"
        closest = min(proofs, key=lambda oom: oom.needed_bytes / oom.limit_bytes)
        memory = "memory, off-wafer memory included," if closest.off_wafer else "memory"
        return (
            f"in each of {self.count:,} layouts a die needs more {memory} than it has, under every "
            f"mapping: at least {format_bytes(closest.needed_bytes)} of "
            f"{format_bytes(closest.limit_bytes)}"
        )

    @property
    def bound_s(self) -> float:
        """A lower bound on the time of every mapping; infinite if none fits."""
        return float("inf") if self.missing else min(self.bounds, default=0.0)

    def late(self) -> bool:
        """Whether the budget is spent."""
        return self.effort.spent(self.began)


def search_mapping(
    problem: Problem,
    effort: Effort | None = None,
    seed: int = 0,
    threads: int | None = None,
    starts: Sequence[tuple[Layout, Array]] = (),
    progress: Progress | None = None,
    wanted: Sequence[Layout] | None = None,
) -> MappingResult:
    """Find the fastest mapping of a model on one wafer.

    Parameters
    ----------
    problem
        The model, the wafer and the step.
    effort
        How long to search.
    seed
        Seed of all random choices; the same seed gives the same answer.
    threads
        Maximum number of threads; the result does not depend on it.
    starts
        Additional mappings to start from, as (layout, operator mappings).
    progress
        Called periodically.
    wanted
        Layouts to search; by default all.

    Returns
    -------
    MappingResult
        The best mapping, its status, a bound, and counts. If no mapping that fits was found,
        `best.fits` is false and `reason` gives the constraint, or what was not examined.

    Examples
    --------
    >>> problem = Problem("bertlarge", "dojo-tile-like")
    >>> result = search_mapping(problem, Effort(seeds=1, steps=200, promising=1, budget_s=1.0))
    >>> result.best.fits and result.bound_s <= result.best.time_s
    True
    """
    settings = (effort or Effort(), seed, threads, starts, progress, wanted)
    return _existing(problem, MappingSearch(problem, *settings).run())


def _existing(problem: Problem, result: MappingResult | None) -> MappingResult:
    if result is None:
        raise InvalidInputError(
            f"wafer: {problem.wafer.name} has no rectangle over which every operator of "
            f"{problem.model.name} can be split"
        )
    return result


def search_data(task: Task, threads: int, progress: Progress | None) -> Data:
    """Search one wafer and return plain data, which `read_result` reads."""
    problem, given = task.problem, task.given
    effort = Effort(**given["effort"], budget_s=task.budget_s, stop=task.stop)
    below_s = float("inf") if given["below_s"] is None else given["below_s"]
    encodings = map(Encoding.from_list, given["starts"])
    starts = [(encoding.layout, encoding.arrays(problem)[0]) for encoding in encodings]
    wanted = _wanted(problem, given["wanted"])
    settings = (threads, starts, progress, wanted, below_s)
    search = MappingSearch(problem, effort, given["seed"], *settings)
    result, bound_s = search.run(), search.bound_s
    return {
        "bound_s": bound_s if math.isfinite(bound_s) else None,
        "result": None if result is None else result.to_record(),
        # A result that was cut short by a budget or an interrupt is not cached.
        "cut": (task.stop is not None and task.stop())
        or (task.budget_s is not None and (result is None or result.seconds >= task.budget_s)),
    }


def _wanted(problem: Problem, name: str | dict[str, Any]) -> list[Layout] | None:
    if isinstance(name, dict):
        return [Layout(**{**name, "blocks": tuple(name["blocks"])})]
    if name == "all":
        return None
    return [layout for layout in problem.layouts() if is_linear(problem, layout)]


def search_task(
    problem: Problem,
    effort: Effort,
    seed: int,
    starts: Sequence[Evaluation] = (),
    below_s: float = float("inf"),
    wanted: str | Layout = "all",
) -> Task:
    """Return the search of one wafer as a task.

    Parameters
    ----------
    problem, effort, seed
        As for `search_mapping`.
    starts
        Mappings to start from.
    below_s
        Mappings must take less than this time.
    wanted
        Layouts: ``all``, ``linear`` (consecutive ranks), or one layout.
    """
    task_data = {
        "effort": picked(effort, "seeds", "steps", "promising"),
        "seed": seed,
        "below_s": below_s if math.isfinite(below_s) else None,
        "starts": [evaluation.encoding.to_list() for evaluation in starts],
        "wanted": asdict(wanted) if isinstance(wanted, Layout) else wanted,
    }
    return Task(search_data, problem, task_data, effort.budget_s, effort.stop)


def read_result(problem: Problem, data: Data) -> tuple[MappingResult | None, float]:
    """Read the output of `search_data`: result (None if bounds prune all layouts) and bound."""
    bound_s = float("inf") if data["bound_s"] is None else float(data["bound_s"])
    record = data["result"]
    return None if record is None else MappingResult.from_record(problem, record), bound_s


def result_of(problem: Problem, data: Data) -> MappingResult:
    """Read the result of `search_data`.

    Raises
    ------
    InvalidInputError
        If no layout of the wafer is valid for the model.
    """
    return _existing(problem, read_result(problem, data)[0])


def search_mappings(
    problems: Sequence[Problem],
    effort: Effort | None = None,
    seed: int = 0,
    threads: int | None = None,
    progress: Progress | None = None,
    session: Session | None = None,
) -> list[MappingResult]:
    """Find the fastest mapping for each of several problems: models, wafers, batches.

    Parameters
    ----------
    problems
        Problems, each with a model, a wafer and a step.
    effort, seed, threads, progress
        As for `search_mapping`.
    session
        An open session to run in, with an executor, a journal or a store of results.

    Examples
    --------
    >>> problems = [Problem("bertlarge", name) for name in ("dram-wafer", "dojo-tile-like")]
    >>> quick = Effort(seeds=1, steps=200, promising=1, budget_s=1.0)
    >>> [result.best.fits for result in search_mappings(problems, quick)]
    [True, True]
    """
    tasks = [search_task(problem, effort or Effort(), seed) for problem in problems]
    with session_of(session, threads) as opened:
        answers = opened.run(tasks, progress)
    return [result_of(problem, data) for problem, data in zip(problems, answers, strict=True)]
