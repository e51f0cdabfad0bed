"""Answers of the command `wafer`: as a document, as a table and in words."""

from __future__ import annotations

from typing import Any

from rich.console import RenderableType
from rich.text import Text

from phaze_fast.cli.wafer_tables import (
    comparison_table,
    front_table,
    picture,
    proof,
    space_rows,
    study_rows,
    summary,
)
from phaze_fast.tables import Table, joined_columns
from phaze_fast.wafer import Evaluation
from phaze_fast.wafer.mapping.traffic import describe
from phaze_fast.wafer.search.result import MappingResult
from phaze_fast.wafer.search.session import Session
from phaze_fast.wafer.studies.comparison import Comparison
from phaze_fast.wafer.studies.fault_study import FaultStudy
from phaze_fast.wafer.studies.pareto import WaferFront
from phaze_fast.wafer.studies.wafers import WaferResult

__all__ = ["Case", "Cases"]


class Case:
    """One model on one wafer or space, answered."""

    def __init__(
        self,
        found: MappingResult | Comparison,
        space: WaferResult | None,
        study: FaultStudy | None = None,
        front: WaferFront | None = None,
    ) -> None:
        self.comparison = found if isinstance(found, Comparison) else None
        self.result = found.ours if isinstance(found, Comparison) else found
        self.space, self.study, self.front = space, study, front

    @property
    def best(self) -> Evaluation:
        """The best mapping."""
        return self.result.best

    def data(self) -> dict[str, Any]:
        """Give the document of this case."""
        answer = (self.comparison or self.result).to_dict()
        if self.study is not None:
            answer["fault_study"] = self.study.to_dict()
        if self.front is not None:
            answer["front"] = self.front.to_dict()
        if self.space is None:
            return answer
        whole = self.space.to_dict()  # its bound, counts and wafer are those of the whole space
        return {**answer, **{key: whole[key] for key in whole if key != "ours"}}

    def rows(self) -> dict[str, Any]:
        """Columns of the wafers, the plans compared, or the best mappings."""
        columns = (self.front or self.space or self.comparison or self.result).to_columns()
        count = len(next(iter(columns.values())))
        return {"model": [self.result.problem.model.name] * count, **columns}

    def human(self, with_op_mappings: bool) -> list[RenderableType]:
        """Describe this case."""
        pairs = proof(self.result) + (space_rows(self.space) if self.space is not None else [])
        pairs += study_rows(self.study) if self.study is not None else []
        parts = [summary(self.result.problem, self.best, pairs)]
        parts += [front_table(self.front)] if self.front is not None else []
        return [*parts, *picture(self.result.problem, self.best)] if with_op_mappings else parts


class Cases(Table):
    """Every model on every wafer or space that was asked for, as far as answered."""

    def __init__(self, cases: list[Case], session: Session) -> None:
        self.cases, self.recalled = cases, session.recalled

    def data(self) -> dict[str, Any]:
        """Give the document of one case, or of all of them."""
        every = [case.data() for case in self.cases]
        return every[0] if len(every) == 1 else {"cases": every}

    def to_columns(self) -> dict[str, Any]:
        """Give the rows of all cases as one table."""
        rows = []
        for case in self.cases:
            columns = case.rows()
            rows += [
                dict(zip(columns, values, strict=True))
                for values in zip(*columns.values(), strict=True)
            ]
        return joined_columns(rows)

    def human(self, show: bool) -> list[RenderableType]:
        """Describe all cases, and compare them."""
        parts: list[RenderableType] = []
        for case in self.cases:
            parts += case.human(len(self.cases) == 1)
            if show:
                parts.append(Text(describe(case.result.problem, case.best.encoding)))
        compared = [
            (case.comparison, case.space is not None)
            for case in self.cases
            if case.comparison is not None
        ]
        if compared:
            parts.append(comparison_table(compared))
        if self.recalled:
            parts.append(Text(f"Results kept from earlier runs: {self.recalled:,}"))
        return parts
