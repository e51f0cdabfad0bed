"""Messages of Chakra execution traces, as MLCommons' schema numbers their fields.

Facts of mlcommons/chakra@6dc63e147b9d schema/protobuf/et_def.proto: the fields that are written
here, with their numbers and types. A file is a GlobalMetadata and then Nodes, each with its length
before it as a varint.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from phaze_fast.errors import MissingExtraError

__all__ = ["COLLECTIVES", "NODES", "VERSION", "framed", "messages", "read_trace"]

VERSION = "0.0.4"
"""Of the schema, as GlobalMetadata says it."""
NODES = {"compute": 4, "send": 5, "receive": 6, "collective": 7}
"""Kinds of nodes by number."""
COLLECTIVES = {
    "all-reduce": 0,
    "all-gather": 2,
    "broadcast": 5,
    "all-to-all": 6,
    "reduce-scatter": 7,
}
"""Kinds of collectives by number."""

_TYPES = {"double": 1, "float": 2, "int64": 3, "uint64": 4, "int32": 5, "bool": 8, "string": 9}
_TYPES |= {"bytes": 12, "uint32": 13}
_MESSAGE, _REPEATED, _OPTIONAL = 11, 3, 1
_VALUES = (
    ("double_val", 3, "double"),
    ("float_val", 5, "float"),
    ("int32_val", 7, "int32"),
    ("int64_val", 9, "int64"),
    ("uint32_val", 11, "uint32"),
    ("uint64_val", 13, "uint64"),
    ("bool_val", 27, "bool"),
    ("string_val", 29, "string"),
)


def _protobuf() -> Any:
    try:
        from google.protobuf import (  # type: ignore[import-untyped, unused-ignore]
            descriptor_pb2,
            descriptor_pool,
            message_factory,
        )
    except ImportError:
        raise MissingExtraError(
            "Chakra traces need protobuf: pip install 'phaze-fast[trace]'"
        ) from None
    return descriptor_pb2, descriptor_pool, message_factory


@cache
def messages() -> tuple[Any, Any]:
    """Give the classes of the messages (GlobalMetadata, Node).

    Raises
    ------
    MissingExtraError
        Where protobuf is not installed.
    """
    descriptor_pb2, descriptor_pool, message_factory = _protobuf()
    file = descriptor_pb2.FileDescriptorProto(
        name="phaze_fast/chakra.proto", package="ChakraProtoMsg", syntax="proto3"
    )

    def message(name: str, fields: list[tuple[str, int, str, bool]]) -> Any:
        made = file.message_type.add(name=name)
        for field, number, kind, several in fields:
            added = made.field.add(
                name=field, number=number, label=_REPEATED if several else _OPTIONAL
            )
            if kind in _TYPES:
                added.type = _TYPES[kind]
            else:
                added.type, added.type_name = _MESSAGE, f".ChakraProtoMsg.{kind}"
        return made

    attribute = message("AttributeProto", [("name", 1, "string", False)])
    attribute.oneof_decl.add(name="value")
    for field, number, kind in _VALUES:
        attribute.field.add(
            name=field, number=number, label=_OPTIONAL, type=_TYPES[kind], oneof_index=0
        )
    message(
        "GlobalMetadata", [("version", 1, "string", False), ("attr", 2, "AttributeProto", True)]
    )
    message(
        "Node",
        [
            ("id", 1, "uint64", False),
            ("name", 2, "string", False),
            ("type", 3, "int32", False),  # an enumeration, which is written alike
            ("ctrl_deps", 4, "uint64", True),
            ("data_deps", 5, "uint64", True),
            ("start_time_micros", 6, "uint64", False),
            ("duration_micros", 7, "uint64", False),
            ("attr", 10, "AttributeProto", True),
        ],
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = [
        message_factory.GetMessageClass(pool.FindMessageTypeByName(f"ChakraProtoMsg.{name}"))
        for name in ("GlobalMetadata", "Node")
    ]
    return found[0], found[1]


def framed(data: bytes) -> bytes:
    """Give a serialised message with its length before it."""
    length, head = len(data), bytearray()
    while length > 0x7F:
        head.append(length & 0x7F | 0x80)
        length >>= 7
    head.append(length)
    return bytes(head) + data


def read_trace(data: bytes) -> tuple[Any, list[Any]]:
    """Read a trace: its metadata and its nodes.

    Raises
    ------
    ValueError
        Where it ends inside a message.
    """
    metadata, node = messages()
    parts, at = [], 0
    while at < len(data):
        length = shift = 0
        while True:
            byte = data[at]
            at += 1
            length |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        if at + length > len(data):
            raise ValueError("the trace ends inside a message")
        parts.append(data[at : at + length])
        at += length
    return metadata.FromString(parts[0]), [node.FromString(part) for part in parts[1:]]
