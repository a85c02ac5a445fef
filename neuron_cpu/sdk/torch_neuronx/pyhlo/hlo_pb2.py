"""HloModuleProto, and the messages in it that the driver reads to count MACs.

The classes are built at import, from the field numbers of the public XLA `hlo.proto` and
`xla_data.proto`. A graph of the real compiler parses too: protobuf keeps fields that a schema does
not name.
"""

from .messages import Messages, Table

_MESSAGES: Table = {
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
    "FrontendAttributes": [("map", 1, "map string string", True)],
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
        ("frontend_attributes", 19, "FrontendAttributes", False),
    ],
}


_KINDS = Messages("xla", _MESSAGES)
ShapeProto = _KINDS["ShapeProto"]
DotDimensionNumbers = _KINDS["DotDimensionNumbers"]
HloInstructionProto = _KINDS["HloInstructionProto"]
HloComputationProto = _KINDS["HloComputationProto"]
HloModuleProto = _KINDS["HloModuleProto"]
