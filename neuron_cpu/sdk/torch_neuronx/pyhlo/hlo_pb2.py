"""HloModuleProto and what it consists of.

The classes are built at import, from the field numbers of the public XLA `hlo.proto` and
`xla_data.proto`. A graph of the real compiler parses too: protobuf keeps fields that a schema does
not name.
"""

from .messages import Messages, Table

_MESSAGES: Table = {
    "LayoutProto": [("minor_to_major", 1, "repeated int64"), ("memory_space", 8, "int64")],
    "ShapeProto": [
        ("element_type", 2, "int32"),
        ("dimensions", 3, "repeated int64"),
        ("tuple_shapes", 4, "repeated ShapeProto"),
        ("layout", 5, "LayoutProto"),
        ("is_dynamic_dimension", 6, "repeated bool"),
    ],
    "ProgramShapeProto": [
        ("parameters", 1, "repeated ShapeProto"),
        ("result", 2, "ShapeProto"),
        ("parameter_names", 3, "repeated string"),
    ],
    "LiteralProto": [
        ("shape", 1, "ShapeProto"),
        ("preds", 2, "repeated bool"),
        ("u8s", 3, "bytes"),
        ("s32s", 4, "repeated int32"),
        ("s64s", 5, "repeated int64"),
        ("u32s", 6, "repeated uint32"),
        ("u64s", 7, "repeated uint64"),
        ("f32s", 8, "repeated float"),
        ("f64s", 9, "repeated double"),
        ("f16s", 11, "bytes"),
        ("bf16s", 13, "bytes"),
        ("s8s", 15, "bytes"),
        ("u16s", 16, "bytes"),
        ("s16s", 17, "bytes"),
        ("f8e5m2s", 19, "bytes"),
        ("f8e4m3fns", 20, "bytes"),
    ],
    "DotDimensionNumbers": [
        ("lhs_contracting_dimensions", 1, "repeated int64"),
        ("rhs_contracting_dimensions", 2, "repeated int64"),
        ("lhs_batch_dimensions", 3, "repeated int64"),
        ("rhs_batch_dimensions", 4, "repeated int64"),
    ],
    "GatherDimensionNumbers": [
        ("offset_dims", 1, "repeated int64"),
        ("collapsed_slice_dims", 2, "repeated int64"),
        ("start_index_map", 3, "repeated int64"),
        ("index_vector_dim", 4, "int64"),
    ],
    "ScatterDimensionNumbers": [
        ("update_window_dims", 1, "repeated int64"),
        ("inserted_window_dims", 2, "repeated int64"),
        ("scatter_dims_to_operand_dims", 3, "repeated int64"),
        ("index_vector_dim", 4, "int64"),
    ],
    "SliceDimensions": [("start", 1, "int64"), ("limit", 2, "int64"), ("stride", 3, "int64")],
    "WindowDimension": [
        ("size", 1, "int64"),
        ("stride", 2, "int64"),
        ("padding_low", 3, "int64"),
        ("padding_high", 4, "int64"),
        ("window_dilation", 5, "int64"),
        ("base_dilation", 6, "int64"),
    ],
    "Window": [("dimensions", 1, "repeated WindowDimension")],
    "PaddingConfigDimension": [
        ("edge_padding_low", 1, "int64"),
        ("edge_padding_high", 2, "int64"),
        ("interior_padding", 3, "int64"),
    ],
    "PaddingConfig": [("dimensions", 1, "repeated PaddingConfigDimension")],
    "ReplicaGroup": [("replica_ids", 1, "repeated int64")],
    "HloInstructionProto": [
        ("name", 1, "string"),
        ("opcode", 2, "string"),
        ("shape", 3, "ShapeProto"),
        ("literal", 8, "LiteralProto"),
        ("parameter_number", 9, "int64"),
        ("tuple_index", 13, "int64"),
        ("dimensions", 14, "repeated int64"),
        ("window", 15, "Window"),
        ("slice_dimensions", 17, "repeated SliceDimensions"),
        ("dynamic_slice_sizes", 20, "repeated int64"),
        ("padding_config", 21, "PaddingConfig"),
        ("distribution", 23, "int32"),
        ("epsilon", 24, "float"),
        ("feature_index", 25, "int64"),
        ("custom_call_target", 28, "string"),
        ("dot_dimension_numbers", 30, "DotDimensionNumbers"),
        ("gather_dimension_numbers", 33, "GatherDimensionNumbers"),
        ("gather_slice_sizes", 34, "repeated int64"),
        ("id", 35, "int64"),
        ("operand_ids", 36, "repeated int64"),
        ("called_computation_ids", 38, "repeated int64"),
        ("backend_config", 43, "bytes"),
        ("scatter_dimension_numbers", 48, "ScatterDimensionNumbers"),
        ("replica_groups", 49, "repeated ReplicaGroup"),
        ("is_stable", 60, "bool"),
        ("comparison_direction", 63, "string"),
        ("custom_call_api_version", 77, "int32"),
    ],
    "FrontendAttributes": [("map", 1, "map string string")],
    "HloComputationProto": [
        ("name", 1, "string"),
        ("instructions", 2, "repeated HloInstructionProto"),
        ("program_shape", 4, "ProgramShapeProto"),
        ("id", 5, "int64"),
        ("root_id", 6, "int64"),
    ],
    "AliasEntryProto": [
        ("output_shape_index", 1, "repeated int64"),
        ("parameter_number", 2, "int64"),
        ("parameter_shape_index", 3, "repeated int64"),
        ("kind", 4, "int32"),
    ],
    "HloInputOutputAliasProto": [("entries", 1, "repeated AliasEntryProto")],
    "HloModuleProto": [
        ("name", 1, "string"),
        ("entry_computation_name", 2, "string"),
        ("computations", 3, "repeated HloComputationProto"),
        ("host_program_shape", 4, "ProgramShapeProto"),
        ("id", 5, "int64"),
        ("entry_computation_id", 6, "int64"),
        ("input_output_alias", 8, "HloInputOutputAliasProto"),
        ("frontend_attributes", 19, "FrontendAttributes"),
    ],
    "HloProto": [("hlo_module", 1, "HloModuleProto")],
    "HloSnapshot": [("hlo", 1, "HloProto"), ("arguments", 2, "repeated LiteralProto")],
}


_KINDS = Messages("xla", _MESSAGES)
ShapeProto = _KINDS["ShapeProto"]
LiteralProto = _KINDS["LiteralProto"]
DotDimensionNumbers = _KINDS["DotDimensionNumbers"]
HloInstructionProto = _KINDS["HloInstructionProto"]
HloComputationProto = _KINDS["HloComputationProto"]
HloModuleProto = _KINDS["HloModuleProto"]
HloSnapshot = _KINDS["HloSnapshot"]
