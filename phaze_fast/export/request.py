"""Common code of the formats: the plan to write, option names, shell commands, nested settings."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, cached_property
from itertools import accumulate, pairwise
from math import gcd
from typing import Any, Literal

from phaze_fast import _core
from phaze_fast.documents import package_data
from phaze_fast.errors import InvalidInputError, check_one_of, not_accepted, printable
from phaze_fast.memory import SCHEDULES, places
from phaze_fast.models import TransformerModel
from phaze_fast.planning import Plan, PlanSpec
from phaze_fast.planning.frameworks import (
    FRAMEWORKS,
    framework_precisions,
    framework_table,
    inexpressible,
)
from phaze_fast.planning.training import split_recompute
from phaze_fast.records import FrozenDict
from phaze_fast.software import DEFAULT, load_software

FORMATS = FRAMEWORKS
"""Formats that plans are exported to and read from."""


@dataclass(frozen=True)
class Unexpressed:
    """A part of a plan, or of its model, that a format cannot express."""

    what: str
    """The part and its value, as an option of `predict`."""
    why: str
    """What the format lacks, or does instead."""
    of: Literal["plan", "model"] = "plan"
    """Whether the part is one of the plan or of the model's architecture."""

    def __str__(self) -> str:
        return f"{self.what}: {self.why}"


@dataclass(frozen=True)
class Exported:
    """A plan as a file of a training framework."""

    format: str
    text: str
    """The file."""
    unexpressed: tuple[Unexpressed, ...]
    """Parts of plan and model that the file does not express; empty where it expresses all."""

    @property
    def complete(self) -> bool:
        """Whether the file expresses plan and model."""
        return not self.unexpressed

    @property
    def plan_complete(self) -> bool:
        """Whether the file expresses all of the plan that the time of a step depends on."""
        return all(part.of == "model" for part in self.unexpressed)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "format": self.format,
            "complete": self.complete,
            "plan_complete": self.plan_complete,
            "unexpressed": [asdict(part) for part in self.unexpressed],
            "text": self.text,
        }


@dataclass(frozen=True)
class ReadPlan:
    """A plan that was read from a framework's file."""

    spec: PlanSpec
    notes: tuple[str, ...]
    """Settings of the file that the prediction does not use."""


# ---- the plan ----


@dataclass(frozen=True)
class Chunk:
    """Consecutive layers of one stage."""

    embedding: bool
    blocks: range
    """Numbers of the chunk's blocks, from 0."""
    head: bool
    recompute: str
    """What the chunk's stage recomputes."""


@dataclass(frozen=True)
class Request:
    """A plan to be exported."""

    spec: PlanSpec
    model: TransformerModel
    node_devices: int
    """Devices of a node."""

    @classmethod
    def of(
        cls,
        plan: Plan | PlanSpec | Mapping[str, Any],
        model: TransformerModel,
        node_devices: int,
    ) -> Request:
        """Read a plan and fill in its stages.

        Raises
        ------
        InvalidInputError
            Where its stages or their recomputation are missing.
        """
        spec = PlanSpec.of(plan)
        blocks = model.layers + model.encoder_layers
        if spec.recompute == "auto":
            raise InvalidInputError(
                "recompute: auto is not accepted; expected what each stage recomputes, as "
                "`plan --json` and `predict --json` write it"
            )
        if spec.stages is None:
            chunks = places(spec.schedule, spec.pp, spec.vpp)
            if blocks % chunks:
                raise InvalidInputError(
                    f"stages: missing, and {blocks} blocks are not a multiple of pp x vpp = "
                    f"{chunks}; expected layers of each stage, as `predict --json` writes them"
                )
            spec = spec.replace(stages=stage_sizes([blocks // chunks] * chunks))
        if sum(spec.stages or ()) != blocks + 2:
            raise InvalidInputError(
                f"stages: {sum(spec.stages or ())} layers are not accepted; {model.name} has "
                f"{blocks + 2}, embedding and head counted"
            )
        return cls(spec, model, node_devices)

    def remarks(self, names: FlagNames, missing: Sequence[Unexpressed]) -> list[str]:
        """Return the first lines of a file: its title, and what the file does not express."""
        lines = [f"{self.title}: {names.title}", f"Names of flags as in {names.version}."]
        return lines + [f"Not expressed: {item}" for item in missing]

    @property
    def title(self) -> str:
        """Title of the file, for its first line."""
        return f"{self.model.name} on {self.spec.devices} devices"

    @property
    def rounds(self) -> int:
        """Micro-batches of a replica in one step."""
        return self.spec.global_batch // (self.spec.dp * self.spec.micro_batch)

    @property
    def hybrid(self) -> bool:
        """Whether state is sharded inside groups of replicas and copied between groups."""
        return self.spec.shard is not None and self.spec.shard < self.spec.dp

    @property
    def text_decoder(self) -> bool:
        """Whether the model is a decoder of text."""
        model = self.model
        return not model.encoder_layers and model.patches is None and model.head == "lm"

    def option(self, field: str) -> str:
        """Return a field of the plan and its value as an option of `predict`."""
        value, name = getattr(self.spec, field), field.replace("_", "-")
        if isinstance(value, bool):
            return f"--{name}" if value else f"--no-{name}"
        value = getattr(value, "name", value)
        text = ",".join(map(str, value)) if isinstance(value, tuple) else value
        return f"--{name} {text}"

    def unexpressed(self, names: FlagNames, **cases: bool) -> list[Unexpressed]:
        """List the parts of the plan that a format cannot express.

        Parameters
        ----------
        names
            Names of the format; the table ``unexpressed`` has the part and the reason of each case.
        cases
            Whether each case applies to this plan, besides those of `inexpressible`.
        """
        spec, table = self.spec, framework_table(names.format)
        of_layout = inexpressible(names.format, spec.strategy, spec.layout)
        cases = {
            **{case: bool(applies[0]) for case, applies in of_layout.items()},
            **cases,
            "precision": spec.precision.name not in framework_precisions(names.format, self.model),
            "optimizer": spec.optimizer_name not in table["optimizers"],
        }
        texts = [text for case, text in names.tables["unexpressed"].items() if cases.get(case)]
        if spec.ep > 1 and spec.expert_overlap > 0:
            texts.insert(0, ("expert_overlap", "the library's dispatcher decides"))
        if spec.asked_overlap is not None:
            texts.insert(0, ("overlap_experts", "the schedule decides"))
        by_default = spec.strategy.model_copy(update={"expert_imbalance": None})
        load = by_default.with_load(self.model).expert_imbalance
        if spec.ep > 1 and not cases.get("ep") and spec.expert_imbalance not in (None, load):
            texts.insert(0, ("expert_imbalance", "the data and the router decide"))
        if self.model.lora is not None:
            texts.insert(0, ("lora", "its adapters belong to the model; this trains all weights"))
        if spec.software != load_software(DEFAULT):
            own = "a profile of this package, which no framework's file names; give it to `predict`"
            texts.insert(0, ("software", own))
        known = {"spec": spec, "model": self.model, "request": self}
        known["stages"] = self.option("stages")
        return [
            Unexpressed(
                self.option(part) if part in PlanSpec.model_fields else part.format(**known),
                why.format(**known),
            )
            for part, why in texts
        ]

    def unexpressed_model(self, names: FlagNames, **cases: bool) -> list[Unexpressed]:
        """List the parts of the model's architecture that a format cannot express.

        Parameters
        ----------
        names
            Names of the format; the table ``accepted`` has the values that it can express of some
            fields, and ``unexpressed_model`` the part and the reason of each case.
        cases
            Whether each case applies to this model.
        """
        model, parts = self.model, []
        for path, values in names.tables.get("accepted", {}).items():
            value = field_value(model, path)
            if value not in values:
                text = ", ".join(map(str, values))
                why = f"{names.format} has {text}; written so"
                parts.append((f"{path} {value}", why))
        texts = [names.tables["unexpressed_model"][case] for case, on in cases.items() if on]
        parts += [(what.format(model=model), why.format(model=model)) for what, why in texts]
        return [Unexpressed(f"{model.name}: {what}", why, "model") for what, why in parts]

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """Chunks in the order of the model."""
        spec, last = self.spec, self.model.layers + self.model.encoder_layers + 1
        code = SCHEDULES.index(spec.schedule)
        chain = _core.pipeline_chain(code, spec.pp, spec.vpp).tolist()
        words = spec.recompute if isinstance(spec.recompute, tuple) else (spec.recompute,) * spec.pp
        chunks = []
        for k, (begin, end) in enumerate(pairwise([0, *accumulate(spec.stages or ())])):
            stage = chain.index(k) // spec.vpp
            blocks = range(max(begin, 1) - 1, min(end, last) - 1)
            chunks.append(Chunk(begin == 0, blocks, end == last + 1, words[stage]))
        return tuple(chunks)

    @property
    def even(self) -> bool:
        """Whether all chunks have the same number of blocks."""
        return len({len(chunk.blocks) for chunk in self.chunks}) == 1

    @cached_property
    def modes(self) -> frozenset[str]:
        """Recompute modes that at least one block has."""
        return frozenset(
            mode for chunk in self.chunks for mode, count in self._modes(chunk).items() if count
        )

    @cached_property
    def full_blocks(self) -> int | None:
        """Number n, if the first n blocks of every chunk recompute all and the others nothing."""
        if not self.modes <= {"full", "none"}:
            return None
        counts = [(self._modes(chunk).get("full", 0), len(chunk.blocks)) for chunk in self.chunks]
        partial = {full for full, blocks in counts if full < blocks}
        most = max((full for full, blocks in counts if full == blocks), default=0)
        if not partial:
            return most
        number = partial.pop()
        return number if not partial and most <= number else None

    @property
    def offloaded_blocks(self) -> int | None:
        """Number n, if the first n blocks of the only chunk are offloaded and others store all.

        At least one block is not offloaded: Megatron-Core offloads fewer layers than a model has.
        """
        if len(self.chunks) > 1 or self.modes != {"offload", "none"}:
            return None
        return self._modes(self.chunks[0])["offload"]

    @property
    def world(self) -> tuple[int, int]:
        """Number of nodes, and devices used per node."""
        devices, node = self.spec.devices, self.node_devices
        used = devices if devices < node else gcd(devices, node)
        return devices // used, used

    def _modes(self, chunk: Chunk) -> dict[str, int]:
        """Count the blocks of a chunk by recompute mode."""
        rest, first, count = split_recompute(chunk.recompute)
        count = min(count, len(chunk.blocks))
        blocks_by_mode: dict[str, int] = {}
        for mode, blocks in ((first, count), (rest, len(chunk.blocks) - count)):
            if mode == "selective" and self.model.attention == "flash":
                mode = "none"  # fused attention has no scores to recompute
            blocks_by_mode[mode] = blocks_by_mode.get(mode, 0) + blocks
        return blocks_by_mode


def stage_sizes(blocks: Sequence[int]) -> tuple[int, ...]:
    """Return the layers of chunks from their blocks, with the embedding first and the head last.

    Examples
    --------
    >>> stage_sizes([4, 4])
    (5, 5)
    """
    sizes = list(blocks)
    sizes[0] += 1
    sizes[-1] += 1
    return tuple(sizes)


# ---- models that frameworks come with ----


def field_value(model: TransformerModel, path: str) -> Any:
    """Return a field of a model by its path, such as ``moe.experts``; None below an absent part."""
    value: Any = model
    for name in path.split("."):
        value = None if value is None else getattr(value, name)
    return list(value) if isinstance(value, tuple) else value


def has_fields(model: TransformerModel, fields: Mapping[str, Any]) -> bool:
    """Whether a model has these values of fields.

    ``given`` stands for any value but None, a mapping ``any`` for one of several values.

    Examples
    --------
    >>> from phaze_fast import models
    >>> has_fields(models.load("mixtral-8x7b"), {"moe.experts": 8, "moe": "given"})
    True
    """
    for path, wanted in fields.items():
        value = field_value(model, path)
        if isinstance(wanted, Mapping):
            fits = value in wanted["any"]
        else:
            fits = value is not None if wanted == "given" else value == wanted
        if not fits:
            return False
    return True


def shipped_name(model: TransformerModel, format_: str) -> Any:
    """Return a framework's own name for a model that it comes with, or None.

    Examples
    --------
    >>> from phaze_fast import models
    >>> shipped_name(models.load("llama3-8b"), "torchtitan")
    ['llama3', '8B']
    """
    shipped = package_data(__package__, "models.yaml")["models"]
    known = (entry for entry in shipped if has_fields(model, entry["fields"]))
    return next((entry[format_] for entry in known if format_ in entry), None)


# ---- names of options ----


@dataclass(frozen=True)
class FlagNames:
    """A framework's names for the parts of a plan."""

    format: str
    """A name of `FORMATS`."""
    title: str
    """What a file of the format is."""
    version: str
    """Version of the framework."""
    read_from: tuple[str, ...]
    """Public files that the names were taken from."""
    names: Mapping[str, str]
    """The framework's flag or key, by our name of what it sets."""
    tables: Mapping[str, Mapping[Any, Any]] = field(default_factory=FrozenDict)
    """Tables of the format by name, such as the values of a flag by their names in this package."""

    def __getitem__(self, key: str) -> str:
        return self.names[key]

    def nested(self, settings: Mapping[str, object]) -> dict[str, Any]:
        """Nest settings by the dotted paths of their names.

        Examples
        --------
        >>> flag_names("torchtitan").nested({"tp": 2, "pp": 4})
        {'parallelism': {'tensor_parallel_degree': 2, 'pipeline_parallel_degree': 4}}
        """
        nested: dict[str, Any] = {}
        for key, value in settings.items():
            *folders, last = self[key].split(".")
            inner = nested
            for folder in folders:
                inner = inner.setdefault(folder, {})
            inner[last] = value
        return nested

    def meaning(self, table: str, key: str, word: str) -> Any:
        """Look up what a value of the flag `key` means in this package.

        Raises
        ------
        InvalidInputError
            Where the table has no such value.
        """
        meanings = {value: own for own, value in self.tables[table].items()}
        if word not in meanings:
            raise not_accepted(self[key], word, f"one of {', '.join(meanings)}")
        return meanings[word]


@cache
def flag_names(name: str) -> FlagNames:
    """Look up a framework's names for the parts of a plan.

    Raises
    ------
    InvalidInputError
        Where there is no such format.

    Examples
    --------
    >>> flag_names("megatron")["tp"]
    '--tensor-model-parallel-size'
    """
    check_one_of("format", name, FORMATS)
    data = dict(package_data(__package__, f"{name}.yaml"))
    return FlagNames(
        format=name,
        title=data.pop("title"),
        version=data.pop("version"),
        read_from=tuple(data.pop("read_from")),
        names=FrozenDict(data.pop("names")),
        tables=FrozenDict(data),
    )


def not_used(settings: Sequence[str]) -> list[str]:
    """Return a note that lists settings that the prediction does not use, if any."""
    return [f"the prediction does not depend on {', '.join(settings)}"] if settings else []


def whole_number(name: str, value: object, least: int = 0) -> int:
    """Read a whole number that an option gives, as a number or as text.

    Raises
    ------
    InvalidInputError
        Where it is not a whole number, or below `least`.

    Examples
    --------
    >>> whole_number("--nnodes", "4")
    4
    """
    number = value
    if isinstance(value, str):
        digits = value.removeprefix("-").isdecimal() and len(value) <= 12
        number = int(value) if digits else None
    if isinstance(number, bool) or not isinstance(number, int) or number < least:
        hint = " (shell variables are not expanded)" if isinstance(value, str) else ""
        raise not_accepted(name, value, f"a whole number{hint}")
    return number


# ---- shell commands ----


def command(
    remarks: Iterable[str], words: Sequence[str], options: Iterable[Sequence[object]]
) -> str:
    r"""Write a shell command, one option per line.

    Examples
    --------
    >>> print(command(["a run"], ["torchrun", "train.py"], [("--width", 4), ("--fast",)]))
    #!/bin/sh
    # a run
    torchrun train.py \
      --width 4 \
      --fast
    <BLANKLINE>
    """
    lines = [" ".join(words)]
    lines += [" ".join(shlex.quote(str(word)) for word in option) for option in options]
    head = "".join(f"# {printable(line)}\n" for line in remarks)
    return f"#!/bin/sh\n{head}" + " \\\n  ".join(lines) + "\n"


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise InvalidInputError(f"not a shell command: {error}") from None


def options_of(text: str) -> dict[str, list[str]]:
    """Read the options of a command: words that begin with two dashes, and the words after each.

    Examples
    --------
    >>> options_of("torchrun --nnodes 2 train.py --fast --width=4")
    {'--nnodes': ['2', 'train.py'], '--fast': [], '--width': ['4']}
    """
    values: dict[str, list[str]] = {}
    current: list[str] = []
    for word in _words(text):
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word.partition("=")
            current = [value] if equals else []
            values[name] = current
        else:
            current.append(word)
    return values


def settings_of(text: str) -> dict[str, str]:
    """Read the settings of a command: words of the form key=value.

    Examples
    --------
    >>> settings_of("python train.py base.yml model.width=4 fast=True")
    {'model.width': '4', 'fast': 'True'}
    """
    pairs = (word.partition("=") for word in _words(text) if not word.startswith("-"))
    return {key.lstrip("+"): value for key, equals, value in pairs if equals}


# ---- nested settings, by dotted path ----


def nested_value(data: Mapping[str, Any], path: str) -> Any:
    """Return the value at a path, or None."""
    value: Any = data
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def flattened(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return all values of nested mappings by their dotted paths.

    Examples
    --------
    >>> flattened({"a": {"b": 1}, "c": 2})
    {'a.b': 1, 'c': 2}
    """
    values: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, Mapping):
            values |= flattened(value, f"{prefix}{key}.")
        else:
            values[f"{prefix}{key}"] = value
    return values
