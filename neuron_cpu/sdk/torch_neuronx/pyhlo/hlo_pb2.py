"""HloModuleProto and the messages inside it, as far as the driver's MAC count reads them.

The classes are built at import from the field numbers of the public XLA `hlo.proto` and
`xla_data.proto`; a graph written by the real compiler parses too, because protobuf keeps fields
that a schema does not name.
"""

from __future__ import annotations

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_PACKAGE = "neuron_cpu.xla"  # not "xla": a process may also hold the real definitions
_Field = descriptor_pb2.FieldDescriptorProto
_KINDS = {
    "int64": _Field.TYPE_INT64,
    "int32": _Field.TYPE_INT32,
    "string": _Field.TYPE_STRING,
    "bytes": _Field.TYPE_BYTES,
}

# message -> (field, number, kind or message name, repeated)
_MESSAGES: dict[str, list[tuple[str, int, str, bool]]] = {
    "ShapeProto": [("element_type", 2, "int32", False), ("dimensions", 3, "int64", True)],
    "DotDimensionNumbers": [
        ("lhs_contracting_dimensions", 1, "int64", True),
        ("rhs_contracting_dimensions", 2, "int64", True),
        ("lhs_batch_dimensions", 3, "int64", True),
        ("rhs_batch_dimensions", 4, "int64", True),
    ],
    "HloInstructionProto": [
        ("name", 1, "string", False),
        ("opcode", 2, "string", False),
        ("shape", 3, "ShapeProto", False),
        ("parameter_number", 9, "int64", False),
        ("custom_call_target", 28, "string", False),
        ("dot_dimension_numbers", 30, "DotDimensionNumbers", False),
        ("id", 35, "int64", False),
        ("operand_ids", 36, "int64", True),
        ("called_computation_ids", 38, "int64", True),
        ("backend_config", 43, "bytes", False),
    ],
    "HloComputationProto": [
        ("name", 1, "string", False),
        ("instructions", 2, "HloInstructionProto", True),
        ("id", 5, "int64", False),
        ("root_id", 6, "int64", False),
    ],
    "HloModuleProto": [
        ("name", 1, "string", False),
        ("entry_computation_name", 2, "string", False),
        ("computations", 3, "HloComputationProto", True),
        ("id", 5, "int64", False),
        ("entry_computation_id", 6, "int64", False),
    ],
}


def _file_descriptor() -> descriptor_pb2.FileDescriptorProto:
    """The schema above as a descriptor that the protobuf runtime can load."""
    file = descriptor_pb2.FileDescriptorProto(
        name="neuron_cpu/xla/hlo.proto", package=_PACKAGE, syntax="proto3"
    )
    for message_name, fields in _MESSAGES.items():
        message = file.message_type.add(name=message_name)
        for name, number, kind, repeated in fields:
            label = _Field.LABEL_REPEATED if repeated else _Field.LABEL_OPTIONAL
            field = message.field.add(name=name, number=number, label=label)
            if kind in _KINDS:
                field.type = _KINDS[kind]
            else:
                field.type = _Field.TYPE_MESSAGE
                field.type_name = f".{_PACKAGE}.{kind}"
    return file


_pool = descriptor_pool.DescriptorPool()
_pool.Add(_file_descriptor())


def _message_class(name: str) -> type:
    return message_factory.GetMessageClass(_pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))


ShapeProto = _message_class("ShapeProto")
DotDimensionNumbers = _message_class("DotDimensionNumbers")
HloInstructionProto = _message_class("HloInstructionProto")
HloComputationProto = _message_class("HloComputationProto")
HloModuleProto = _message_class("HloModuleProto")
