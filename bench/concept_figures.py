"""Draws the figures of docs/concepts.md from the program's own answers; run it to do so anew."""

from __future__ import annotations

from pathlib import Path

import phaze_fast as pf
from phaze_fast.planning import layer_schedules, timeline

DOCS = Path(__file__).resolve().parents[1] / "docs"
WIDE, ROW, LEFT = 720.0, 22.0, 150.0
COLOURS = {"F": "#0072b2", "B": "#e69f00", "rest": "#7f8790", "memory": "#56b4e9"}
CORES = {("tensor",): "#0072b2", ("vector",): "#009e73", ("network",): "#cc79a7"}
BOTH = "#e69f00"


def _svg(parts: list[str], rows: int, title: str) -> str:
    high = ROW * rows + 34
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE:g} {high:g}" role="img">'
    style = "<style>text{font:12px sans-serif;fill:#55606c}</style>"
    ground = f'<rect width="{WIDE:g}" height="{high:g}" fill="#ffffff"/>'
    return "\n".join([head, f"<title>{title}</title>", style, ground, *parts, "</svg>\n"])


def _bar(start: float, end: float, row: int, colour: str) -> str:
    x, wide = LEFT + (WIDE - LEFT - 10) * start, (WIDE - LEFT - 10) * (end - start)
    y = 8 + ROW * row
    return (
        f'<rect x="{x:.2f}" y="{y:g}" width="{max(wide, 0.6):.2f}" height="{ROW - 5:g}" '
        f'fill="{colour}" stroke="#ffffff" stroke-width="0.6"/>'
    )


def _label(text: str, row: int) -> str:
    return f'<text x="8" y="{8 + ROW * row + 13:g}">{text}</text>'


def _key(entries: dict[str, str], rows: int) -> list[str]:
    found, x, y = [], LEFT, 8 + ROW * rows
    for text, colour in entries.items():
        found.append(f'<rect x="{x:g}" y="{y + 4:g}" width="11" height="11" fill="{colour}"/>')
        found.append(f'<text x="{x + 16:g}" y="{y + 14:g}">{text}</text>')
        x += 30 + 7 * len(text)
    return found


def pipelines() -> str:
    """1F1B and interleaved: the same work, less waiting."""
    cluster = pf.Cluster(devices=8, fabric="dgx-h100", chip="h100")
    given = {"pp": 4, "dp": 2, "global_batch": 16, "recompute": "full", "zero": 1}
    parts, row, longest = [], 0, 0.0
    played = []
    for name, more in (("1F1B", {}), ("interleaved", {"schedule": "interleaved", "vpp": 2})):
        step = timeline("llama2-7b", cluster, {**given, **more})
        played.append((name, step))
        longest = max(longest, step.plan.time_s)
    for name, step in played:
        for stage in range(4):
            parts.append(_label(f"{name}, stage {stage}", row))
            for each in step.of_stage(stage):
                letter = step.kinds[int(each["kind"])]
                ends = (each["start_s"] / longest, each["end_s"] / longest)
                parts.append(_bar(*ends, row, COLOURS.get(letter, COLOURS["rest"])))
            ends = (step.passes_s / longest, step.plan.time_s / longest)
            parts.append(_bar(*ends, row, COLOURS["rest"]))
            row += 1
    names = {"forward": COLOURS["F"], "backward": COLOURS["B"]}
    parts += _key({**names, "gradients, optimiser": COLOURS["rest"]}, row)
    return _svg(parts, row, "Two pipeline schedules of four stages and eight micro-batches")


def memory() -> str:
    """Bytes of each stage over the step."""
    cluster = pf.Cluster(devices=8, fabric="dgx-h100", chip="h100")
    given = {"pp": 4, "dp": 2, "global_batch": 32, "recompute": "none", "zero": 1}
    step = timeline("llama2-7b", cluster, given)
    parts, most = [], 1.1 * step.plan.memory_bytes
    for stage in range(4):
        times, held = step.memory(stage)
        base = 8 + ROW * (2 * stage + 2) - 5
        points = [f"{LEFT:.1f},{base:.1f}"]
        for k, (at, bytes_) in enumerate(zip(times, held, strict=True)):
            until = times[k + 1] if k + 1 < len(times) else step.plan.time_s
            y = base - (2 * ROW - 6) * bytes_ / most
            for edge in (at, until):
                x = LEFT + (WIDE - LEFT - 10) * edge / step.plan.time_s
                points.append(f"{x:.1f},{y:.1f}")
        points.append(f"{WIDE - 10:.1f},{base:.1f}")
        shape = f'<polygon points="{" ".join(points)}" fill="{COLOURS["memory"]}" stroke="none"/>'
        parts += [_label(f"stage {stage}", 2 * stage + 1), shape]
    parts += _key({"bytes of a device": COLOURS["memory"]}, 8)
    return _svg(parts, 8, "Memory of four stages over a step")


def layer() -> str:
    """The operators of a block on the cores of a chip."""
    cluster = pf.Cluster(devices=8, fabric="tpuv4-pod", chip="tpuv4")
    made = layer_schedules("bert-large", cluster, {"dp": 8, "global_batch": 64})
    block = next(each for each in made if (each.kind, each.way) == ("block", "forward")).to_dict()
    parts = []
    for row, each in enumerate(block["operators"]):
        ends = [s / block["time_s"] for s in (each["start_s"], each["start_s"] + each["time_s"])]
        colour = CORES.get(tuple(each["cores"]), BOTH)
        parts += [_label(each["name"], row), _bar(ends[0], ends[1], row, colour)]
    rows = len(block["operators"])
    names = {"vector cores": CORES[("vector",)], "tensor and vector cores": BOTH}
    return _svg([*parts, *_key(names, rows)], rows, "A block's forward pass on one chip")


def widths() -> str:
    """Sixteen devices: two share a layer, two stages, four replicas."""
    shades = ["#0072b2", "#e69f00"]
    parts = []
    for replica in range(4):
        parts.append(_label(f"replica {replica}", replica))
        for stage in range(2):
            for share in range(2):
                place = 2 * stage + share
                parts.append(_bar(place / 4, (place + 1) / 4 - 0.01, replica, shades[stage]))
                x = LEFT + (WIDE - LEFT - 10) * (place / 4) + 8
                y = 8 + ROW * replica + 13
                text = f"device {4 * replica + place}: half {share} of its layers"
                parts.append(f'<text x="{x:.0f}" y="{y:g}" style="fill:#ffffff;font-size:9.5px">')
                parts.append(f"{text}</text>")
    parts += _key({"stage 0": shades[0], "stage 1": shades[1]}, 4)
    return _svg(parts, 4, "Tensor width 2, 2 stages, 4 replicas on 16 devices")


def main() -> None:
    """Draw all."""
    for draw in (pipelines, memory, layer, widths):
        (DOCS / f"concept_{draw.__name__}.svg").write_text(draw(), "utf-8")


if __name__ == "__main__":
    main()
