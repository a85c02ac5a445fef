"""HloModuleProto and what it consists of.

The classes are built at import, from lines of the public XLA `hlo.proto` and `xla_data.proto`. A
graph of the real compiler parses too: protobuf keeps fields that a schema does not name.
"""

from .messages import Messages

_KINDS = Messages(
    "xla",
    """
message LayoutProto { repeated int64 minor_to_major = 1; int64 memory_space = 8; }
message ShapeProto {
  int32 element_type = 2;
  repeated int64 dimensions = 3;
  repeated ShapeProto tuple_shapes = 4;
  LayoutProto layout = 5;
  repeated bool is_dynamic_dimension = 6;
}
message ProgramShapeProto {
  repeated ShapeProto parameters = 1;
  ShapeProto result = 2;
  repeated string parameter_names = 3;
}
message LiteralProto {
  ShapeProto shape = 1;
  repeated bool preds = 2;
  bytes u8s = 3;
  repeated int32 s32s = 4;
  repeated int64 s64s = 5;
  repeated uint32 u32s = 6;
  repeated uint64 u64s = 7;
  repeated float f32s = 8;
  repeated double f64s = 9;
  bytes f16s = 11;
  bytes bf16s = 13;
  bytes s8s = 15;
  bytes u16s = 16;
  bytes s16s = 17;
  bytes f8e5m2s = 19;
  bytes f8e4m3fns = 20;
}
message DotDimensionNumbers {
  repeated int64 lhs_contracting_dimensions = 1;
  repeated int64 rhs_contracting_dimensions = 2;
  repeated int64 lhs_batch_dimensions = 3;
  repeated int64 rhs_batch_dimensions = 4;
}
message GatherDimensionNumbers {
  repeated int64 offset_dims = 1;
  repeated int64 collapsed_slice_dims = 2;
  repeated int64 start_index_map = 3;
  int64 index_vector_dim = 4;
}
message ScatterDimensionNumbers {
  repeated int64 update_window_dims = 1;
  repeated int64 inserted_window_dims = 2;
  repeated int64 scatter_dims_to_operand_dims = 3;
  int64 index_vector_dim = 4;
}
message SliceDimensions { int64 start = 1; int64 limit = 2; int64 stride = 3; }
message WindowDimension {
  int64 size = 1;
  int64 stride = 2;
  int64 padding_low = 3;
  int64 padding_high = 4;
  int64 window_dilation = 5;
  int64 base_dilation = 6;
}
message Window { repeated WindowDimension dimensions = 1; }
message PaddingConfigDimension {
  int64 edge_padding_low = 1;
  int64 edge_padding_high = 2;
  int64 interior_padding = 3;
}
message PaddingConfig { repeated PaddingConfigDimension dimensions = 1; }
message ReplicaGroup { repeated int64 replica_ids = 1; }
message HloInstructionProto {
  string name = 1;
  string opcode = 2;
  ShapeProto shape = 3;
  LiteralProto literal = 8;
  int64 parameter_number = 9;
  int64 tuple_index = 13;
  repeated int64 dimensions = 14;
  Window window = 15;
  repeated SliceDimensions slice_dimensions = 17;
  repeated int64 dynamic_slice_sizes = 20;
  PaddingConfig padding_config = 21;
  int32 distribution = 23;
  float epsilon = 24;
  int64 feature_index = 25;
  string custom_call_target = 28;
  DotDimensionNumbers dot_dimension_numbers = 30;
  GatherDimensionNumbers gather_dimension_numbers = 33;
  repeated int64 gather_slice_sizes = 34;
  int64 id = 35;
  repeated int64 operand_ids = 36;
  repeated int64 called_computation_ids = 38;
  bytes backend_config = 43;
  ScatterDimensionNumbers scatter_dimension_numbers = 48;
  repeated ReplicaGroup replica_groups = 49;
  bool is_stable = 60;
  string comparison_direction = 63;
  int32 custom_call_api_version = 77;
}
message FrontendAttributes { map<string, string> map = 1; }
message HloComputationProto {
  string name = 1;
  repeated HloInstructionProto instructions = 2;
  ProgramShapeProto program_shape = 4;
  int64 id = 5;
  int64 root_id = 6;
}
message AliasEntryProto {
  repeated int64 output_shape_index = 1;
  int64 parameter_number = 2;
  repeated int64 parameter_shape_index = 3;
  int32 kind = 4;
}
message HloInputOutputAliasProto { repeated AliasEntryProto entries = 1; }
message HloModuleProto {
  string name = 1;
  string entry_computation_name = 2;
  repeated HloComputationProto computations = 3;
  ProgramShapeProto host_program_shape = 4;
  int64 id = 5;
  int64 entry_computation_id = 6;
  HloInputOutputAliasProto input_output_alias = 8;
  FrontendAttributes frontend_attributes = 19;
}
message HloProto { HloModuleProto hlo_module = 1; }
message HloSnapshot { HloProto hlo = 1; repeated LiteralProto arguments = 2; }
""",
)
ShapeProto = _KINDS["ShapeProto"]
LiteralProto = _KINDS["LiteralProto"]
DotDimensionNumbers = _KINDS["DotDimensionNumbers"]
HloInstructionProto = _KINDS["HloInstructionProto"]
HloComputationProto = _KINDS["HloComputationProto"]
HloModuleProto = _KINDS["HloModuleProto"]
HloSnapshot = _KINDS["HloSnapshot"]
