"""MetaNeff: the inputs and outputs of a compiled graph.

The fields are those that NxD (trace/model_builder.py, v2.26.0, fecfe75) and Transformers NeuronX
(compiler.py, 1ade6d7) use. Their numbers are this stand-in's own: the vendor's are not public.
"""

from ..pyhlo.messages import Messages

_ENUMS = {
    "Type": ("USER_INPUT", "INPUT_WEIGHT", "INPUT_STATE"),
    "DataType": (
        *("UNKNOWN", "FLOAT", "DOUBLE", "FLOAT16", "BFLOAT16"),
        *("INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64"),
    ),
}
_KINDS = Messages(
    "metaneff",
    {
        "MetaTensor": [
            ("name", 1, "bytes"),
            ("shape", 2, "repeated int64"),
            ("data_type", 3, "int64"),
            ("type", 4, "MetaTensor.Type"),
            ("checkpoint_key", 5, "bytes"),
            ("user_input_key", 6, "bytes"),
        ],
        "MetaNeff": [
            ("name", 1, "bytes"),
            ("input_tensors", 2, "repeated MetaTensor"),
            ("output_tensors", 3, "repeated MetaTensor"),
            ("output_aliases_to", 4, "map int64 int64"),
        ],
    },
    {"MetaTensor": _ENUMS},
)
MetaTensor = _KINDS["MetaTensor"]
MetaNeff = _KINDS["MetaNeff"]
