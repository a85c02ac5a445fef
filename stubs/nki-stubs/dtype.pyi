"""``nki.dtype``: the element types, for annotations."""

# Written by stubs/generate.py.
from typing import Any

float32: Any
tfloat32: Any
bfloat16: Any
float16: Any
float8_e4m3: Any
float8_e5m2: Any
int32: Any
int16: Any
int8: Any
uint32: Any
uint16: Any
uint8: Any
bool_: Any
float8_e4m3fn: Any
float8_e8m0fnu: Any
float8_e4m3fn_x4: Any
float8_e5m2_x4: Any
float4_e2m1fn_x4: Any

