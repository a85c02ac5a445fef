"""HloModuleProto and what it consists of.

The classes are built at import, from the field numbers of the public XLA `hlo.proto` and
`xla_data.proto`. A graph of the real compiler parses too: protobuf keeps fields that a schema does
not name.
"""

from .messages import Messages, Table

_MESSAGES: Table = {
    "LayoutProto": [("minor_to_major", 1, "int64", True), ("memory_space", 8, "int64", False)],
    "ShapeProto": [
        ("element_type", 2, "int32", False),
        ("dimensions", 3, "int64", True),
        ("tuple_shapes", 4, "ShapeProto", True),
        ("layout", 5, "LayoutProto", False),
        ("is_dynamic_dimension", 6, "bool", True),
    ],
    "ProgramShapeProto": [
        ("parameters", 1, "ShapeProto", True),
        ("result", 2, "ShapeProto", False),
        ("parameter_names", 3, "string", True),
    ],
    "LiteralProto": [
        ("shape", 1, "ShapeProto", False),
        ("preds", 2, "bool", True),
        ("u8s", 3, "bytes", False),
        ("s32s", 4, "int32", True),
        ("s64s", 5, "int64", True),
        ("u32s", 6, "uint32", True),
        ("u64s", 7, "uint64", True),
        ("f32s", 8, "float", True),
        ("f64s", 9, "double", True),
        ("f16s", 11, "bytes", False),
        ("bf16s", 13, "bytes", False),
        ("s8s", 15, "bytes", False),
        ("u16s", 16, "bytes", False),
        ("s16s", 17, "bytes", False),
        ("f8e5m2s", 19, "bytes", False),
        ("f8e4m3fns", 20, "bytes", False),
    ],
    "DotDimensionNumbers": [
        ("lhs_contracting_dimensions", 1, "int64", True),
        ("rhs_contracting_dimensions", 2, "int64", True),
        ("lhs_batch_dimensions", 3, "int64", True),
        ("rhs_batch_dimensions", 4, "int64", True),
    ],
    "GatherDimensionNumbers": [
        ("offset_dims", 1, "int64", True),
        ("collapsed_slice_dims", 2, "int64", True),
        ("start_index_map", 3, "int64", True),
        ("index_vector_dim", 4, "int64", False),
    ],
    "ScatterDimensionNumbers": [
        ("update_window_dims", 1, "int64", True),
        ("inserted_window_dims", 2, "int64", True),
        ("scatter_dims_to_operand_dims", 3, "int64", True),
        ("index_vector_dim", 4, "int64", False),
    ],
    "SliceDimensions": [
        ("start", 1, "int64", False),
        ("limit", 2, "int64", False),
        ("stride", 3, "int64", False),
    ],
    "WindowDimension": [
        ("size", 1, "int64", False),
        ("stride", 2, "int64", False),
        ("padding_low", 3, "int64", False),
        ("padding_high", 4, "int64", False),
        ("window_dilation", 5, "int64", False),
        ("base_dilation", 6, "int64", False),
    ],
    "Window": [("dimensions", 1, "WindowDimension", True)],
    "PaddingConfigDimension": [
        ("edge_padding_low", 1, "int64", False),
        ("edge_padding_high", 2, "int64", False),
        ("interior_padding", 3, "int64", False),
    ],
    "PaddingConfig": [("dimensions", 1, "PaddingConfigDimension", True)],
    "ReplicaGroup": [("replica_ids", 1, "int64", True)],
    "HloInstructionProto": [
        ("name", 1, "string", False),
        ("opcode", 2, "string", False),
        ("shape", 3, "ShapeProto", False),
        ("literal", 8, "LiteralProto", False),
        ("parameter_number", 9, "int64", False),
        ("tuple_index", 13, "int64", False),
        ("dimensions", 14, "int64", True),
        ("window", 15, "Window", False),
        ("slice_dimensions", 17, "SliceDimensions", True),
        ("dynamic_slice_sizes", 20, "int64", True),
        ("padding_config", 21, "PaddingConfig", False),
        ("distribution", 23, "int32", False),
        ("epsilon", 24, "float", False),
        ("feature_index", 25, "int64", False),
        ("custom_call_target", 28, "string", False),
        ("dot_dimension_numbers", 30, "DotDimensionNumbers", False),
        ("gather_dimension_numbers", 33, "GatherDimensionNumbers", False),
        ("gather_slice_sizes", 34, "int64", True),
        ("id", 35, "int64", False),
        ("operand_ids", 36, "int64", True),
        ("called_computation_ids", 38, "int64", True),
        ("backend_config", 43, "bytes", False),
        ("scatter_dimension_numbers", 48, "ScatterDimensionNumbers", False),
        ("replica_groups", 49, "ReplicaGroup", True),
        ("is_stable", 60, "bool", False),
        ("comparison_direction", 63, "string", False),
        ("custom_call_api_version", 77, "int32", False),
    ],
    "FrontendAttributes": [("map", 1, "map string string", True)],
    "HloComputationProto": [
        ("name", 1, "string", False),
        ("instructions", 2, "HloInstructionProto", True),
        ("program_shape", 4, "ProgramShapeProto", False),
        ("id", 5, "int64", False),
        ("root_id", 6, "int64", False),
    ],
    "AliasEntryProto": [
        ("output_shape_index", 1, "int64", True),
        ("parameter_number", 2, "int64", False),
        ("parameter_shape_index", 3, "int64", True),
        ("kind", 4, "int32", False),
    ],
    "HloInputOutputAliasProto": [("entries", 1, "AliasEntryProto", True)],
    "HloModuleProto": [
        ("name", 1, "string", False),
        ("entry_computation_name", 2, "string", False),
        ("computations", 3, "HloComputationProto", True),
        ("host_program_shape", 4, "ProgramShapeProto", False),
        ("id", 5, "int64", False),
        ("entry_computation_id", 6, "int64", False),
        ("input_output_alias", 8, "HloInputOutputAliasProto", False),
        ("frontend_attributes", 19, "FrontendAttributes", False),
    ],
    "HloProto": [("hlo_module", 1, "HloModuleProto", False)],
    "HloSnapshot": [("hlo", 1, "HloProto", False), ("arguments", 2, "LiteralProto", True)],
}


_KINDS = Messages("xla", _MESSAGES)
ShapeProto = _KINDS["ShapeProto"]
LiteralProto = _KINDS["LiteralProto"]
DotDimensionNumbers = _KINDS["DotDimensionNumbers"]
HloInstructionProto = _KINDS["HloInstructionProto"]
HloComputationProto = _KINDS["HloComputationProto"]
HloModuleProto = _KINDS["HloModuleProto"]
HloSnapshot = _KINDS["HloSnapshot"]
