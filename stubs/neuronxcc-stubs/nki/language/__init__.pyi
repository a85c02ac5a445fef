"""``neuronxcc.nki.language``: memory, math, reductions, indexing, iterators, types and buffers."""

# Written by stubs/generate.py.
from typing import Any

bfloat16: Any
float8_e4m3: Any
float8_e5m2: Any
hbm: Any
private_hbm: Any
psum: Any
sbuf: Any
shared_hbm: Any
mgrid: Any
from .. import tensor

class bool_:
    """Boolean type (True or False), stored as a byte.

    .. warning::

       The :class:`bool` type is not a subclass of the :class:`int_` type
       (the :class:`bool` is not even a number type). This is different
       than Python's default implementation of :class:`bool` as a
       sub-class of :class:`int`.

    :Character code: ``'?'``"""
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    T: Any
    def __add__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __and__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __ge__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __getitem__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __gt__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __le__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __lshift__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __lt__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __mul__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __neg__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __or__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __pow__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __radd__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rand__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rlshift__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rmul__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __ror__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rpow__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rrshift__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rshift__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rsub__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rtruediv__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rxor__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __sub__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __truediv__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __xor__(self, *args: Any, **kwargs: Any) -> Any: ...
    all: Any
    any: Any
    argmax: Any
    argmin: Any
    argsort: Any
    astype: Any
    base: Any
    byteswap: Any
    choose: Any
    clip: Any
    compress: Any
    conj: Any
    conjugate: Any
    copy: Any
    cumprod: Any
    cumsum: Any
    data: Any
    device: Any
    diagonal: Any
    dtype: Any
    dump: Any
    dumps: Any
    fill: Any
    flags: Any
    flat: Any
    flatten: Any
    getfield: Any
    imag: Any
    item: Any
    itemset: Any
    itemsize: Any
    max: Any
    mean: Any
    min: Any
    nbytes: Any
    ndim: Any
    newbyteorder: Any
    nonzero: Any
    prod: Any
    ptp: Any
    put: Any
    ravel: Any
    real: Any
    repeat: Any
    reshape: Any
    resize: Any
    round: Any
    searchsorted: Any
    setfield: Any
    setflags: Any
    shape: Any
    size: Any
    sort: Any
    squeeze: Any
    std: Any
    strides: Any
    sum: Any
    swapaxes: Any
    take: Any
    to_device: Any
    tobytes: Any
    tofile: Any
    tolist: Any
    tostring: Any
    trace: Any
    transpose: Any
    var: Any
    view: Any

class float16:
    """Half-precision floating-point number type.

    :Character code: ``'e'``
    :Canonical name: `numpy.half`
    :Alias on this platform (Linux x86_64): `numpy.float16`: 16-bit-precision floating-point number type: sign bit, 5 bits exponent, 10 bits mantissa."""
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    T: Any
    def __add__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __and__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __ge__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __getitem__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __gt__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __le__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __lshift__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __lt__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __mul__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __neg__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __or__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __pow__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __radd__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rand__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rlshift__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rmul__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __ror__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rpow__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rrshift__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rshift__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rsub__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rtruediv__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rxor__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __sub__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __truediv__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __xor__(self, *args: Any, **kwargs: Any) -> Any: ...
    all: Any
    any: Any
    argmax: Any
    argmin: Any
    argsort: Any
    as_integer_ratio: Any
    astype: Any
    base: Any
    byteswap: Any
    choose: Any
    clip: Any
    compress: Any
    conj: Any
    conjugate: Any
    copy: Any
    cumprod: Any
    cumsum: Any
    data: Any
    device: Any
    diagonal: Any
    dtype: Any
    dump: Any
    dumps: Any
    fill: Any
    flags: Any
    flat: Any
    flatten: Any
    getfield: Any
    imag: Any
    is_integer: Any
    item: Any
    itemset: Any
    itemsize: Any
    max: Any
    mean: Any
    min: Any
    nbytes: Any
    ndim: Any
    newbyteorder: Any
    nonzero: Any
    prod: Any
    ptp: Any
    put: Any
    ravel: Any
    real: Any
    repeat: Any
    reshape: Any
    resize: Any
    round: Any
    searchsorted: Any
    setfield: Any
    setflags: Any
    shape: Any
    size: Any
    sort: Any
    squeeze: Any
    std: Any
    strides: Any
    sum: Any
    swapaxes: Any
    take: Any
    to_device: Any
    tobytes: Any
    tofile: Any
    tolist: Any
    tostring: Any
    trace: Any
    transpose: Any
    var: Any
    view: Any

class float32:
    """Single-precision floating-point number type, compatible with C ``float``.

    :Character code: ``'f'``
    :Canonical name: `numpy.single`
    :Alias on this platform (Linux x86_64): `numpy.float32`: 32-bit-precision floating-point number type: sign bit, 8 bits exponent, 23 bits mantissa."""
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    T: Any
    def __add__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __and__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __ge__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __getitem__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __gt__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __le__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __lshift__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __lt__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __mul__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __neg__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __or__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __pow__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __radd__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rand__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rlshift__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rmul__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __ror__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rpow__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rrshift__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rshift__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rsub__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rtruediv__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rxor__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __sub__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __truediv__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __xor__(self, *args: Any, **kwargs: Any) -> Any: ...
    all: Any
    any: Any
    argmax: Any
    argmin: Any
    argsort: Any
    as_integer_ratio: Any
    astype: Any
    base: Any
    byteswap: Any
    choose: Any
    clip: Any
    compress: Any
    conj: Any
    conjugate: Any
    copy: Any
    cumprod: Any
    cumsum: Any
    data: Any
    device: Any
    diagonal: Any
    dtype: Any
    dump: Any
    dumps: Any
    fill: Any
    flags: Any
    flat: Any
    flatten: Any
    getfield: Any
    imag: Any
    is_integer: Any
    item: Any
    itemset: Any
    itemsize: Any
    max: Any
    mean: Any
    min: Any
    nbytes: Any
    ndim: Any
    newbyteorder: Any
    nonzero: Any
    prod: Any
    ptp: Any
    put: Any
    ravel: Any
    real: Any
    repeat: Any
    reshape: Any
    resize: Any
    round: Any
    searchsorted: Any
    setfield: Any
    setflags: Any
    shape: Any
    size: Any
    sort: Any
    squeeze: Any
    std: Any
    strides: Any
    sum: Any
    swapaxes: Any
    take: Any
    to_device: Any
    tobytes: Any
    tofile: Any
    tolist: Any
    tostring: Any
    trace: Any
    transpose: Any
    var: Any
    view: Any

class fp32:
    """Range of fp32 (SDK 2.23)."""
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    max: Any
    min: Any

class int16:
    """Signed integer type, compatible with C ``short``.

    :Character code: ``'h'``
    :Canonical name: `numpy.short`
    :Alias on this platform (Linux x86_64): `numpy.int16`: 16-bit signed integer (``-32_768`` to ``32_767``)."""
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    T: Any
    def __add__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __and__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __ge__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __getitem__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __gt__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __le__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __lshift__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __lt__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __mul__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __neg__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __or__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __pow__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __radd__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rand__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rlshift__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rmul__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __ror__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rpow__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rrshift__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rshift__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rsub__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rtruediv__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rxor__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __sub__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __truediv__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __xor__(self, *args: Any, **kwargs: Any) -> Any: ...
    all: Any
    any: Any
    argmax: Any
    argmin: Any
    argsort: Any
    astype: Any
    base: Any
    bit_count: Any
    byteswap: Any
    choose: Any
    clip: Any
    compress: Any
    conj: Any
    conjugate: Any
    copy: Any
    cumprod: Any
    cumsum: Any
    data: Any
    denominator: Any
    device: Any
    diagonal: Any
    dtype: Any
    dump: Any
    dumps: Any
    fill: Any
    flags: Any
    flat: Any
    flatten: Any
    getfield: Any
    imag: Any
    is_integer: Any
    item: Any
    itemset: Any
    itemsize: Any
    max: Any
    mean: Any
    min: Any
    nbytes: Any
    ndim: Any
    newbyteorder: Any
    nonzero: Any
    numerator: Any
    prod: Any
    ptp: Any
    put: Any
    ravel: Any
    real: Any
    repeat: Any
    reshape: Any
    resize: Any
    round: Any
    searchsorted: Any
    setfield: Any
    setflags: Any
    shape: Any
    size: Any
    sort: Any
    squeeze: Any
    std: Any
    strides: Any
    sum: Any
    swapaxes: Any
    take: Any
    to_device: Any
    tobytes: Any
    tofile: Any
    tolist: Any
    tostring: Any
    trace: Any
    transpose: Any
    var: Any
    view: Any

class int32:
    """Signed integer type, compatible with C ``int``.

    :Character code: ``'i'``
    :Canonical name: `numpy.intc`
    :Alias on this platform (Linux x86_64): `numpy.int32`: 32-bit signed integer (``-2_147_483_648`` to ``2_147_483_647``)."""
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    T: Any
    def __add__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __and__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __ge__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __getitem__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __gt__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __le__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __lshift__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __lt__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __mul__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __neg__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __or__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __pow__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __radd__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rand__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rlshift__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rmul__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __ror__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rpow__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rrshift__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rshift__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rsub__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rtruediv__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rxor__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __sub__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __truediv__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __xor__(self, *args: Any, **kwargs: Any) -> Any: ...
    all: Any
    any: Any
    argmax: Any
    argmin: Any
    argsort: Any
    astype: Any
    base: Any
    bit_count: Any
    byteswap: Any
    choose: Any
    clip: Any
    compress: Any
    conj: Any
    conjugate: Any
    copy: Any
    cumprod: Any
    cumsum: Any
    data: Any
    denominator: Any
    device: Any
    diagonal: Any
    dtype: Any
    dump: Any
    dumps: Any
    fill: Any
    flags: Any
    flat: Any
    flatten: Any
    getfield: Any
    imag: Any
    is_integer: Any
    item: Any
    itemset: Any
    itemsize: Any
    max: Any
    mean: Any
    min: Any
    nbytes: Any
    ndim: Any
    newbyteorder: Any
    nonzero: Any
    numerator: Any
    prod: Any
    ptp: Any
    put: Any
    ravel: Any
    real: Any
    repeat: Any
    reshape: Any
    resize: Any
    round: Any
    searchsorted: Any
    setfield: Any
    setflags: Any
    shape: Any
    size: Any
    sort: Any
    squeeze: Any
    std: Any
    strides: Any
    sum: Any
    swapaxes: Any
    take: Any
    to_device: Any
    tobytes: Any
    tofile: Any
    tolist: Any
    tostring: Any
    trace: Any
    transpose: Any
    var: Any
    view: Any

class int8:
    """Signed integer type, compatible with C ``char``.

    :Character code: ``'b'``
    :Canonical name: `numpy.byte`
    :Alias on this platform (Linux x86_64): `numpy.int8`: 8-bit signed integer (``-128`` to ``127``)."""
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    T: Any
    def __add__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __and__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __ge__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __getitem__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __gt__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __le__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __lshift__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __lt__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __mul__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __neg__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __or__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __pow__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __radd__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rand__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rlshift__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rmul__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __ror__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rpow__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rrshift__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rshift__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rsub__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rtruediv__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rxor__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __sub__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __truediv__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __xor__(self, *args: Any, **kwargs: Any) -> Any: ...
    all: Any
    any: Any
    argmax: Any
    argmin: Any
    argsort: Any
    astype: Any
    base: Any
    bit_count: Any
    byteswap: Any
    choose: Any
    clip: Any
    compress: Any
    conj: Any
    conjugate: Any
    copy: Any
    cumprod: Any
    cumsum: Any
    data: Any
    denominator: Any
    device: Any
    diagonal: Any
    dtype: Any
    dump: Any
    dumps: Any
    fill: Any
    flags: Any
    flat: Any
    flatten: Any
    getfield: Any
    imag: Any
    is_integer: Any
    item: Any
    itemset: Any
    itemsize: Any
    max: Any
    mean: Any
    min: Any
    nbytes: Any
    ndim: Any
    newbyteorder: Any
    nonzero: Any
    numerator: Any
    prod: Any
    ptp: Any
    put: Any
    ravel: Any
    real: Any
    repeat: Any
    reshape: Any
    resize: Any
    round: Any
    searchsorted: Any
    setfield: Any
    setflags: Any
    shape: Any
    size: Any
    sort: Any
    squeeze: Any
    std: Any
    strides: Any
    sum: Any
    swapaxes: Any
    take: Any
    to_device: Any
    tobytes: Any
    tofile: Any
    tolist: Any
    tostring: Any
    trace: Any
    transpose: Any
    var: Any
    view: Any

class nc:
    """``nl.nc(n)``: a grid axis over n physical cores; a plain axis on this core."""
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def __add__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __and__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __ge__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __gt__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __le__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __lshift__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __lt__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __mul__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __neg__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __or__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __pow__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __radd__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rand__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rlshift__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rmul__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __ror__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rpow__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rrshift__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rshift__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rsub__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rtruediv__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rxor__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __sub__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __truediv__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __xor__(self, *args: Any, **kwargs: Any) -> Any: ...
    as_integer_ratio: Any
    bit_count: Any
    bit_length: Any
    conjugate: Any
    denominator: Any
    from_bytes: Any
    imag: Any
    numerator: Any
    real: Any
    to_bytes: Any

class par_dim:
    """``nl.par_dim(n)`` marks the partition axis in a shape with block axes before it."""
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def __add__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __and__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __ge__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __gt__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __le__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __lshift__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __lt__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __mul__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __neg__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __or__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __pow__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __radd__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rand__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rlshift__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rmul__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __ror__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rpow__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rrshift__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rshift__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rsub__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rtruediv__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rxor__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __sub__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __truediv__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __xor__(self, *args: Any, **kwargs: Any) -> Any: ...
    as_integer_ratio: Any
    bit_count: Any
    bit_length: Any
    conjugate: Any
    denominator: Any
    from_bytes: Any
    imag: Any
    numerator: Any
    real: Any
    to_bytes: Any

class tfloat32:
    """Marker class for TF32: 1-8-10 bits, kept in four bytes."""
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

class tile_size:
    """Tile limits of NeuronCore-v2 (nki/programming_model.rst)."""
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    bn_stats_fmax: Any
    gemm_moving_fmax: Any
    gemm_stationary_fmax: Any
    pmax: Any
    psum_fmax: Any
    psum_min_align: Any
    sbuf_min_align: Any
    total_available_sbuf_size: Any

class uint16:
    """Unsigned integer type, compatible with C ``unsigned short``.

    :Character code: ``'H'``
    :Canonical name: `numpy.ushort`
    :Alias on this platform (Linux x86_64): `numpy.uint16`: 16-bit unsigned integer (``0`` to ``65_535``)."""
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    T: Any
    def __add__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __and__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __ge__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __getitem__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __gt__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __le__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __lshift__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __lt__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __mul__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __neg__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __or__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __pow__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __radd__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rand__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rlshift__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rmul__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __ror__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rpow__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rrshift__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rshift__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rsub__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rtruediv__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rxor__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __sub__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __truediv__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __xor__(self, *args: Any, **kwargs: Any) -> Any: ...
    all: Any
    any: Any
    argmax: Any
    argmin: Any
    argsort: Any
    astype: Any
    base: Any
    bit_count: Any
    byteswap: Any
    choose: Any
    clip: Any
    compress: Any
    conj: Any
    conjugate: Any
    copy: Any
    cumprod: Any
    cumsum: Any
    data: Any
    denominator: Any
    device: Any
    diagonal: Any
    dtype: Any
    dump: Any
    dumps: Any
    fill: Any
    flags: Any
    flat: Any
    flatten: Any
    getfield: Any
    imag: Any
    is_integer: Any
    item: Any
    itemset: Any
    itemsize: Any
    max: Any
    mean: Any
    min: Any
    nbytes: Any
    ndim: Any
    newbyteorder: Any
    nonzero: Any
    numerator: Any
    prod: Any
    ptp: Any
    put: Any
    ravel: Any
    real: Any
    repeat: Any
    reshape: Any
    resize: Any
    round: Any
    searchsorted: Any
    setfield: Any
    setflags: Any
    shape: Any
    size: Any
    sort: Any
    squeeze: Any
    std: Any
    strides: Any
    sum: Any
    swapaxes: Any
    take: Any
    to_device: Any
    tobytes: Any
    tofile: Any
    tolist: Any
    tostring: Any
    trace: Any
    transpose: Any
    var: Any
    view: Any

class uint32:
    """Unsigned integer type, compatible with C ``unsigned int``.

    :Character code: ``'I'``
    :Canonical name: `numpy.uintc`
    :Alias on this platform (Linux x86_64): `numpy.uint32`: 32-bit unsigned integer (``0`` to ``4_294_967_295``)."""
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    T: Any
    def __add__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __and__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __ge__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __getitem__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __gt__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __le__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __lshift__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __lt__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __mul__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __neg__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __or__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __pow__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __radd__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rand__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rlshift__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rmul__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __ror__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rpow__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rrshift__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rshift__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rsub__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rtruediv__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rxor__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __sub__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __truediv__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __xor__(self, *args: Any, **kwargs: Any) -> Any: ...
    all: Any
    any: Any
    argmax: Any
    argmin: Any
    argsort: Any
    astype: Any
    base: Any
    bit_count: Any
    byteswap: Any
    choose: Any
    clip: Any
    compress: Any
    conj: Any
    conjugate: Any
    copy: Any
    cumprod: Any
    cumsum: Any
    data: Any
    denominator: Any
    device: Any
    diagonal: Any
    dtype: Any
    dump: Any
    dumps: Any
    fill: Any
    flags: Any
    flat: Any
    flatten: Any
    getfield: Any
    imag: Any
    is_integer: Any
    item: Any
    itemset: Any
    itemsize: Any
    max: Any
    mean: Any
    min: Any
    nbytes: Any
    ndim: Any
    newbyteorder: Any
    nonzero: Any
    numerator: Any
    prod: Any
    ptp: Any
    put: Any
    ravel: Any
    real: Any
    repeat: Any
    reshape: Any
    resize: Any
    round: Any
    searchsorted: Any
    setfield: Any
    setflags: Any
    shape: Any
    size: Any
    sort: Any
    squeeze: Any
    std: Any
    strides: Any
    sum: Any
    swapaxes: Any
    take: Any
    to_device: Any
    tobytes: Any
    tofile: Any
    tolist: Any
    tostring: Any
    trace: Any
    transpose: Any
    var: Any
    view: Any

class uint8:
    """Unsigned integer type, compatible with C ``unsigned char``.

    :Character code: ``'B'``
    :Canonical name: `numpy.ubyte`
    :Alias on this platform (Linux x86_64): `numpy.uint8`: 8-bit unsigned integer (``0`` to ``255``)."""
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    T: Any
    def __add__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __and__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __ge__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __getitem__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __gt__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __le__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __lshift__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __lt__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __mul__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __neg__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __or__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __pow__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __radd__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rand__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rlshift__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rmul__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __ror__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rpow__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rrshift__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rshift__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rsub__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rtruediv__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __rxor__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __sub__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __truediv__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __xor__(self, *args: Any, **kwargs: Any) -> Any: ...
    all: Any
    any: Any
    argmax: Any
    argmin: Any
    argsort: Any
    astype: Any
    base: Any
    bit_count: Any
    byteswap: Any
    choose: Any
    clip: Any
    compress: Any
    conj: Any
    conjugate: Any
    copy: Any
    cumprod: Any
    cumsum: Any
    data: Any
    denominator: Any
    device: Any
    diagonal: Any
    dtype: Any
    dump: Any
    dumps: Any
    fill: Any
    flags: Any
    flat: Any
    flatten: Any
    getfield: Any
    imag: Any
    is_integer: Any
    item: Any
    itemset: Any
    itemsize: Any
    max: Any
    mean: Any
    min: Any
    nbytes: Any
    ndim: Any
    newbyteorder: Any
    nonzero: Any
    numerator: Any
    prod: Any
    ptp: Any
    put: Any
    ravel: Any
    real: Any
    repeat: Any
    reshape: Any
    resize: Any
    round: Any
    searchsorted: Any
    setfield: Any
    setflags: Any
    shape: Any
    size: Any
    sort: Any
    squeeze: Any
    std: Any
    strides: Any
    sum: Any
    swapaxes: Any
    take: Any
    to_device: Any
    tobytes: Any
    tofile: Any
    tolist: Any
    tostring: Any
    trace: Any
    transpose: Any
    var: Any
    view: Any

class ndarray(tensor):
    """An uninitialised tensor in ``buffer`` (default SBUF)."""
    def __init__(self, shape: Any, dtype: Any, *, buffer: Any = None, name: Any = '', **other: Any) -> None: ...
    def __getattr__(self, name: str) -> Any: ...
def abs(x: Any, *, dtype: Any = None, mask: Any = None, name: Any = ...) -> Any:
    """``|x|`` on VectorE."""
def add(x: Any, y: Any, *, dtype: Any = None, mask: Any = None, name: Any = ...) -> Any:
    """x + y; numpy broadcasting, the partition axis at extra cost."""
def affine_range(*args: Any, **_: Any) -> Any:
    """``nl.affine_range(stop)`` / ``(start, stop[, step])``: affine loop iterator."""
def all(x: Any, axis: Any, *, dtype: Any = None, mask: Any = None, name: Any = ...) -> Any:
    """1 where all elements along the last free axes are nonzero; bool unless ``dtype``."""
def all_reduce(x: Any, op: Any, program_axes: Any, *, dtype: Any = None, mask: Any = None, parallel_reduce: Any = True, asynchronous: Any = False, **_: Any) -> Any:
    """Reduce ``x`` over the instances of a launch grid that differ on ``program_axes`` only."""
def arange(*args: Any, name: Any = ...) -> Any:
    """``nl.arange(stop)`` or ``nl.arange(start, stop[, step])``: a 1-D index vector."""
def arctan(x: Any, *, dtype: Any = None, mask: Any = None, name: Any = ...) -> Any:
    """Element-wise arctan on ScalarE, fp32 inside; input's type unless dtype."""
def atomic_rmw(dst: Any, value: Any, op: Any, *, mask: Any = None, name: Any = ...) -> Any:
    """``dst[rows] op= value`` in HBM, rows chosen by an index tile; add only, duplicates add up."""
def bitwise_and(x: Any, y: Any, *, dtype: Any = None, mask: Any = None, name: Any = ...) -> Any:
    """Bits of both integers; numpy broadcasting, the partition axis at extra cost."""
def bitwise_or(x: Any, y: Any, *, dtype: Any = None, mask: Any = None, name: Any = ...) -> Any:
    """Bits of either integer; numpy broadcasting, the partition axis at extra cost."""
def bitwise_xor(x: Any, y: Any, *, dtype: Any = None, mask: Any = None, name: Any = ...) -> Any:
    """Bits of one of the integers; numpy broadcasting, the partition axis at extra cost."""
def broadcast_to(src: Any, *, shape: Any, name: Any = ...) -> Any:
    """numpy broadcasting (SDK 2.22); from one partition to many a ones-matmul on the device."""
def ceil(x: Any, *, dtype: Any = None, mask: Any = None, name: Any = ...) -> Any:
    """Smallest whole number not below ``x``."""
def copy(src: Any, *, mask: Any = None, dtype: Any = None, name: Any = ...) -> Any:
    """On-chip copy into a new SBUF tile, with a cast if ``dtype`` is given."""
def cos(x: Any, *, dtype: Any = None, mask: Any = None, name: Any = ...) -> Any:
    """Cosine as sin(x + pi/2) with whole turns removed."""
def device_print(prefix: Any, x: Any, *, mask: Any = None, **_: Any) -> Any:
    """Print a tile's values in eager mode (NKI_CPU_EAGER=1); nothing is computed otherwise."""
def divide(x: Any, y: Any, *, dtype: Any = None, mask: Any = None, name: Any = ...) -> Any:
    """x / y (reciprocal, then multiply); numpy broadcasting, the partition axis at extra cost."""
def dropout(x: Any, rate: Any, *, dtype: Any = None, mask: Any = None, name: Any = ...) -> Any:
    """``x`` with elements set to zero with probability ``rate`` (a number or [P, 1])."""
def ds(start: Any, size: Any, *, name: Any = ...) -> Any:
    """``nl.ds(start, size)``: the slice ``start:start + size``."""
def empty_like(a: Any, dtype: Any = None, *, buffer: Any = None, name: Any = '') -> Any:
    """An uninitialised tensor with the shape (and type) of ``a`` (SDK 2.22)."""
def equal(x: Any, y: Any, *, dtype: Any = None, mask: Any = None, name: Any = ...) -> Any:
    """1 where x == y, else 0; numpy broadcasting, the partition axis at extra cost."""
def erf(x: Any, *, dtype: Any = None, mask: Any = None, name: Any = ...) -> Any:
    """Element-wise erf on ScalarE, fp32 inside; input's type unless dtype."""
def erf_dx(x: Any, *, dtype: Any = None, mask: Any = None, name: Any = ...) -> Any:
    """Element-wise erf_dx on ScalarE, fp32 inside; input's type unless dtype."""
def exp(x: Any, *, dtype: Any = None, mask: Any = None, name: Any = ...) -> Any:
    """Element-wise exp on ScalarE, fp32 inside; input's type unless dtype."""
def expand_dims(data: Any, axis: Any, *, name: Any = ...) -> Any:
    """A size-1 axis after the last one."""
def finfo(dtype: Any, *, name: Any = ...) -> Any:
    """Limits of a floating-point type (``min``, ``max``, ``eps``, ...)."""
def floor(x: Any, *, dtype: Any = None, mask: Any = None, name: Any = ...) -> Any:
    """Largest whole number not above ``x``."""
def fmod(x: Any, y: Any, *, dtype: Any = None, mask: Any = None, name: Any = ...) -> Any:
    """The remainder of C, of the sign of x; numpy broadcasting, the partition axis at extra cost."""
def full(shape: Any, fill_value: Any, dtype: Any, *, buffer: Any = None, name: Any = '', **kw: Any) -> Any:
    """A tensor filled with a constant (a PSUM tile of zeros costs nothing: see nl.zeros)."""
def gather_flattened(data: Any, indices: Any, *, mask: Any = None, dtype: Any = None, name: Any = ...) -> Any:
    """``data`` [P, F...] read at ``indices`` (unsigned, [P, N...]) of its flattened free axes."""
def gelu(x: Any, *, dtype: Any = None, mask: Any = None, name: Any = ...) -> Any:
    """Element-wise gelu on ScalarE, fp32 inside; input's type unless dtype."""
def gelu_apprx_sigmoid(x: Any, *, dtype: Any = None, mask: Any = None, name: Any = ...) -> Any:
    """Element-wise gelu_apprx_sigmoid on ScalarE, fp32 inside; input's type unless dtype."""
def gelu_apprx_tanh(x: Any, *, dtype: Any = None, mask: Any = None, name: Any = ...) -> Any:
    """Element-wise gelu_apprx_tanh on ScalarE, fp32 inside; input's type unless dtype."""
def gelu_dx(x: Any, *, dtype: Any = None, mask: Any = None, name: Any = ...) -> Any:
    """Element-wise gelu_dx on ScalarE, fp32 inside; input's type unless dtype."""
def gemm_grid(*_: Any, **__: Any) -> Any:
    """A launch grid for matrix products, of which only the name is public."""
def gemm_stationary_grid(*_: Any, **__: Any) -> Any:
    """A launch grid for stationary operands, of which only the name is public."""
def greater(x: Any, y: Any, *, dtype: Any = None, mask: Any = None, name: Any = ...) -> Any:
    """1 where x > y, else 0; numpy broadcasting, the partition axis at extra cost."""
def greater_equal(x: Any, y: Any, *, dtype: Any = None, mask: Any = None, name: Any = ...) -> Any:
    """1 where x >= y, else 0; numpy broadcasting, the partition axis at extra cost."""
def invert(x: Any, *, dtype: Any = None, mask: Any = None, name: Any = ...) -> Any:
    """``~x`` of integers, on VectorE."""
def left_shift(x: Any, y: Any, *, dtype: Any = None, mask: Any = None, name: Any = ...) -> Any:
    """x shifted left, of integers; numpy broadcasting, the partition axis at extra cost."""
def less(x: Any, y: Any, *, dtype: Any = None, mask: Any = None, name: Any = ...) -> Any:
    """1 where x < y, else 0; numpy broadcasting, the partition axis at extra cost."""
def less_equal(x: Any, y: Any, *, dtype: Any = None, mask: Any = None, name: Any = ...) -> Any:
    """1 where x <= y, else 0; numpy broadcasting, the partition axis at extra cost."""
def load(src: Any, *, mask: Any = None, dtype: Any = None, mode: Any = None, name: Any = ...) -> Any:
    """HBM region -> new SBUF tile of the same shape (P first, at most 128), optionally cast.

    ``mode`` is what becomes of chosen rows out of bounds, as NxD Inference 0.4 asks for it
    (modules/chunked_prefill/paged_cache.py): with ``oob_mode.skip`` a tile that the result is
    assigned to keeps its own."""
def load_transpose2d(src: Any, *, mask: Any = None, dtype: Any = None, name: Any = ...) -> Any:
    """HBM [F, P] -> SBUF [P, F] by DMA (element-granular: slow on this core)."""
def log(x: Any, *, dtype: Any = None, mask: Any = None, name: Any = ...) -> Any:
    """Element-wise log on ScalarE, fp32 inside; input's type unless dtype."""
def logical_and(x: Any, y: Any, *, dtype: Any = None, mask: Any = None, name: Any = ...) -> Any:
    """1 where both are nonzero; numpy broadcasting, the partition axis at extra cost."""
def logical_not(x: Any, *, dtype: Any = None, mask: Any = None, name: Any = ...) -> Any:
    """1 where ``x`` is zero, else 0; bool unless ``dtype``."""
def logical_or(x: Any, y: Any, *, dtype: Any = None, mask: Any = None, name: Any = ...) -> Any:
    """1 where either is nonzero; numpy broadcasting, the partition axis at extra cost."""
def logical_xor(x: Any, y: Any, *, dtype: Any = None, mask: Any = None, name: Any = ...) -> Any:
    """1 where one of them is nonzero; numpy broadcasting, the partition axis at extra cost."""
def loop_reduce(x: Any, op: Any, loop_indices: Any, *, dtype: Any = None, mask: Any = None, **_: Any) -> Any:
    """Combine ``x`` into the tile on the left of the assignment in every iteration.

    ``b[...] = nl.loop_reduce(a, op, [k])`` is ``b[...] = b op a``; with ``b = nl.loop_reduce(...)``
    the tile is what ``b`` named before. It must hold its initial value (0 for sums)."""
def matmul(x: Any, y: Any, *, transpose_x: Any = False, mask: Any = None, name: Any = ...) -> Any:
    """``x @ y``, or ``x.T @ y`` with x already [K, M] (transpose_x=True, no transpose needed).

    Result [M, N] fp32 in PSUM."""
def max(x: Any, axis: Any, *, dtype: Any = None, mask: Any = None, keepdims: Any = False, name: Any = ...) -> Any:
    """Reduce the last free axes with maximum, fp32 inside; result at least rank 2."""
def maximum(x: Any, y: Any, *, dtype: Any = None, mask: Any = None, name: Any = ...) -> Any:
    """The larger one; numpy broadcasting, the partition axis at extra cost."""
def mean(x: Any, axis: Any, *, dtype: Any = None, mask: Any = None, keepdims: Any = False, name: Any = ...) -> Any:
    """Mean over the last free axes; integers give fp32."""
def min(x: Any, axis: Any, *, dtype: Any = None, mask: Any = None, keepdims: Any = False, name: Any = ...) -> Any:
    """Reduce the last free axes with minimum, fp32 inside; result at least rank 2."""
def minimum(x: Any, y: Any, *, dtype: Any = None, mask: Any = None, name: Any = ...) -> Any:
    """The smaller one; numpy broadcasting, the partition axis at extra cost."""
def mish(x: Any, *, dtype: Any = None, mask: Any = None, name: Any = ...) -> Any:
    """Element-wise mish on ScalarE, fp32 inside; input's type unless dtype."""
def mod(x: Any, y: Any, *, dtype: Any = None, mask: Any = None, name: Any = ...) -> Any:
    """x modulo y, of the sign of y; numpy broadcasting, the partition axis at extra cost."""
def multiply(x: Any, y: Any, *, dtype: Any = None, mask: Any = None, name: Any = ...) -> Any:
    """x * y; numpy broadcasting, the partition axis at extra cost."""
def negative(x: Any, *, dtype: Any = None, mask: Any = None, name: Any = ...) -> Any:
    """``-x`` on VectorE."""
def not_equal(x: Any, y: Any, *, dtype: Any = None, mask: Any = None, name: Any = ...) -> Any:
    """1 where x != y, else 0; numpy broadcasting, the partition axis at extra cost."""
def num_programs(axes: Any = None, *, name: Any = ...) -> Any:
    """Number of grid instances along ``axes`` (default: all)."""
def ones(shape: Any, dtype: Any, *, buffer: Any = None, name: Any = '', **kw: Any) -> Any:
    """A tensor of ones."""
def power(x: Any, y: Any, *, dtype: Any = None, mask: Any = None, name: Any = ...) -> Any:
    """x to the power of y (two tiles: on GpSimdE); numpy broadcasting, the partition axis at extra cost."""
def prod(x: Any, axis: Any, *, dtype: Any = None, mask: Any = None, keepdims: Any = False, name: Any = ...) -> Any:
    """Reduce the last free axes with multiply, fp32 inside; result at least rank 2."""
def program_id(axis: Any, *, name: Any = ...) -> Any:
    """Index of the running grid instance on ``axis``."""
def program_ndim(*, name: Any = ...) -> Any:
    """Rank of the launch grid."""
def rand(shape: Any, dtype: Any = ..., *, name: Any = ...) -> Any:
    """Tile of uniform numbers in [0, 1); the same in every run, new ones in every call."""
def random_seed(seed: Any, *, mask: Any = None, name: Any = ...) -> Any:
    """Seed of the random instructions that follow: a number or a (1, 1) integer tile."""
def reciprocal(x: Any, *, dtype: Any = None, mask: Any = None, name: Any = ...) -> Any:
    """``1 / x`` on VectorE (SDK 2.22)."""
def relu(x: Any, *, dtype: Any = None, mask: Any = None, name: Any = ...) -> Any:
    """Element-wise relu on ScalarE, fp32 inside; input's type unless dtype."""
def right_shift(x: Any, y: Any, *, dtype: Any = None, mask: Any = None, name: Any = ...) -> Any:
    """x shifted right, of integers, zeros coming in; numpy broadcasting, the partition axis at extra cost."""
def rms_norm(x: Any, w: Any, axis: Any, n: Any, epsilon: Any = 1e-06, *, dtype: Any = None, compute_dtype: Any = None, mask: Any = None, name: Any = ...) -> Any:
    """``x * rsqrt(sum(x^2) / n + epsilon) * w`` over the free axis, fp32 inside."""
def rsqrt(x: Any, *, dtype: Any = None, mask: Any = None, name: Any = ...) -> Any:
    """Element-wise rsqrt on ScalarE, fp32 inside; input's type unless dtype."""
def sequential_range(*args: Any, **_: Any) -> Any:
    """``nl.sequential_range(stop)`` / ``(start, stop[, step])``: sequential loop iterator."""
def shared_constant(constant: Any, dtype: Any = None, **_: Any) -> Any:
    """A numpy array as a constant in HBM; load it before use."""
def shared_identity_matrix(n: Any, dtype: Any = ..., **_: Any) -> Any:
    """The n x n identity as a constant in HBM."""
def sigmoid(x: Any, *, dtype: Any = None, mask: Any = None, name: Any = ...) -> Any:
    """Element-wise sigmoid on ScalarE, fp32 inside; input's type unless dtype."""
def sign(x: Any, *, dtype: Any = None, mask: Any = None, name: Any = ...) -> Any:
    """Element-wise sign on ScalarE, fp32 inside; input's type unless dtype."""
def silu(x: Any, *, dtype: Any = None, mask: Any = None, name: Any = ...) -> Any:
    """Element-wise silu on ScalarE, fp32 inside; input's type unless dtype."""
def silu_dx(x: Any, *, dtype: Any = None, mask: Any = None, name: Any = ...) -> Any:
    """Element-wise silu_dx on ScalarE, fp32 inside; input's type unless dtype."""
def sin(x: Any, *, dtype: Any = None, mask: Any = None, name: Any = ...) -> Any:
    """Element-wise sin on ScalarE, fp32 inside; input's type unless dtype."""
def softmax(x: Any, axis: Any, *, dtype: Any = None, compute_dtype: Any = None, mask: Any = None, name: Any = ...) -> Any:
    """Softmax over the last free axes: negated max, exp with bias and sum, reciprocal, product."""
def softplus(x: Any, *, dtype: Any = None, mask: Any = None, name: Any = ...) -> Any:
    """Element-wise softplus on ScalarE, fp32 inside; input's type unless dtype."""
def spmd_dim(first: Any, second: Any, *, name: Any = ...) -> Any:
    """A grid axis of ``first * second`` instances; the order of cores has no effect here."""
def sqrt(x: Any, *, dtype: Any = None, mask: Any = None, name: Any = ...) -> Any:
    """Element-wise sqrt on ScalarE, fp32 inside; input's type unless dtype."""
def square(x: Any, *, dtype: Any = None, mask: Any = None, name: Any = ...) -> Any:
    """Element-wise square on ScalarE, fp32 inside; input's type unless dtype."""
def static_cast(arr: Any, dtype: Any, *, name: Any = ...) -> Any:
    """A tile or number as another type."""
def static_range(*args: Any, **_: Any) -> Any:
    """``nl.static_range(...)``: fully unrolled while tracing; indices are Python ints."""
def store(dst: Any, value: Any, *, mask: Any = None, name: Any = ...) -> Any:
    """SBUF tile (or a constant) -> HBM region of equal shape; casts to the HBM type."""
def subtract(x: Any, y: Any, *, dtype: Any = None, mask: Any = None, name: Any = ...) -> Any:
    """x - y; numpy broadcasting, the partition axis at extra cost."""
def sum(x: Any, axis: Any, *, dtype: Any = None, mask: Any = None, keepdims: Any = False, name: Any = ...) -> Any:
    """Reduce the last free axes with add, fp32 inside; result at least rank 2."""
def tan(x: Any, *, dtype: Any = None, mask: Any = None, name: Any = ...) -> Any:
    """Tangent as sine times the reciprocal of the cosine."""
def tanh(x: Any, *, dtype: Any = None, mask: Any = None, name: Any = ...) -> Any:
    """Element-wise tanh on ScalarE, fp32 inside; input's type unless dtype."""
def transpose(x: Any, *, dtype: Any = None, mask: Any = None, name: Any = ...) -> Any:
    """2-D transpose, both sides at most 128; result in SBUF."""
def trunc(x: Any, *, dtype: Any = None, mask: Any = None, name: Any = ...) -> Any:
    """``x`` without its fraction: sign(x) * floor(|x|)."""
def var(x: Any, axis: Any, *, dtype: Any = None, mask: Any = None, name: Any = ...) -> Any:
    """Population variance over the last free axes: mean of the squared distances to the mean."""
def where(condition: Any, x: Any, y: Any, *, dtype: Any = None, mask: Any = None, name: Any = ...) -> Any:
    """``x`` where the data tile ``condition`` is nonzero, else ``y`` (a tile or a number).

    A condition on indices selects term by term, as ``affine_select`` does; ``y`` is a number then.
    A contest entry ran that on a device (dinghongsong, llama.py of 2025-03-10, its attention)."""
def zeros(shape: Any, dtype: Any, *, buffer: Any = None, name: Any = '', **kw: Any) -> Any:
    """A tensor of zeros; in PSUM the idiom that starts a matmul accumulation group."""
def zeros_like(a: Any, dtype: Any = None, *, buffer: Any = None, name: Any = '') -> Any:
    """Zeros with the shape (and type) of ``a``."""
