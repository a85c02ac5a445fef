"""MetaNeff: the inputs and outputs of a compiled graph.

The fields are those that NxD (trace/model_builder.py, v2.26.0, fecfe75) and Transformers NeuronX
(compiler.py, 1ade6d7) use. Their numbers are this stand-in's own: the vendor's are not public.
"""

from ..pyhlo.messages import Messages

_KINDS = Messages(
    "metaneff",
    """
message MetaTensor {
  enum Type { USER_INPUT INPUT_WEIGHT INPUT_STATE }
  enum DataType {
    UNKNOWN FLOAT DOUBLE FLOAT16 BFLOAT16
    INT8 INT16 INT32 INT64 UINT8 UINT16 UINT32 UINT64
  }
  bytes name = 1;
  repeated int64 shape = 2;
  int64 data_type = 3;
  MetaTensor.Type type = 4;
  bytes checkpoint_key = 5;
  bytes user_input_key = 6;
}
message MetaNeff {
  bytes name = 1;
  repeated MetaTensor input_tensors = 2;
  repeated MetaTensor output_tensors = 3;
  map<int64, int64> output_aliases_to = 4;
}
""",
)
MetaTensor = _KINDS["MetaTensor"]
MetaNeff = _KINDS["MetaNeff"]
