"""What the command `search` prints of chips under uncertain constants."""

from __future__ import annotations

from rich.console import RenderableType

from phaze_fast.cli.output import fields, table
from phaze_fast.explore import Portfolio
from phaze_fast.robust import Information, RobustResult
from phaze_fast.units import format_time

__all__ = ["information_tables", "portfolio_fields", "robust_fields"]


def portfolio_fields(found: Portfolio) -> RenderableType:
    """Show the best two chips and what each is for."""
    pairs = [
        (", ".join(names), str(chip)) for chip, names in zip(found.chips, found.models, strict=True)
    ]
    proof = "proven" if found.proven else f"not proven, no pair below {found.bound:.6g}"
    pairs += [
        ("one chip for all", f"{found.single}, {found.gain - 1.0:+.2%}"),
        ("status", proof),
        ("seconds", f"{found.seconds:.1f}"),
    ]
    return fields("The best two chips, each model on its better one", pairs)


def robust_fields(found: RobustResult) -> RenderableType:
    """Show the chip of least largest regret beside the nominal winner."""
    proof = "proven" if found.proven else "not proven"
    nominal = found.nominal
    cost = found.time_s / found.nominal_s - 1.0
    pairs = [
        ("constants", f"{len(found.uncertainty.constants)} intervals"),
        ("robust chip", str(found.chip)),
        (
            "largest regret",
            f"at most {found.max_regret:.3f}, {found.attained:.3f} attained; no chip's is below "
            f"{found.bound:.3f} ({proof} within {found.tolerance:.1%})",
        ),
        ("nominal step", f"{format_time(found.time_s)}, {cost:+.2%} against the nominal winner"),
        (
            "nominal winner",
            f"largest regret at most {nominal.bound:.3f}, {nominal.attained:.3f} attained",
        ),
        ("beaten most by", str(found.rival)),
        ("possible winners", f"{found.possible_winners:,} chips are not ruled out"),
        ("seconds", f"{found.seconds:.1f}"),
    ]
    return fields("The chip of least largest regret over the intervals", pairs)


def information_tables(found: Information) -> list[RenderableType]:
    """Show which constants decide, and how often each chip is the best."""
    left = [[name, f"{count:,}"] for name, count in found.known.items()]
    wins = [[f"{row['share']:.1%}", row["chip_text"]] for row in found.shares[:10]]
    return [
        table(
            f"Possible winners left of {found.possible_winners:,}, were a constant known",
            ["constant", "left>"],
            left,
        ),
        table(
            f"How often each chip is the best: {found.samples} samples, seed {found.seed}",
            ["share>", "chip"],
            wins,
            "each constant uniform over its interval, all independent",
        ),
    ]
