"""What beginners write: one wrong line each, and what a message that mends has to name.

`OLD` is for `neuronxcc.nki`, `NEW` for `nki`. Each entry: name -> (lines, words). The lines stand
in `HEADS`: `x` and `y` are tiles (128, 64) in SBUF, `x_hbm` and `y_hbm` the arguments, `out_hbm`
the result; `r` is stored in it. The words are a regular expression of what mends the line.
"""

HEADS = {
    "neuronxcc": (
        "import math\nimport numpy as np\nimport torch\nfrom neuronxcc import nki\n"
        "import neuronxcc.nki.isa as nisa\nimport neuronxcc.nki.language as nl\n\n\n"
        "@nki.jit\ndef kernel(x_hbm, y_hbm):\n"
        "    out_hbm = nl.ndarray((128, 64), nl.float32, buffer=nl.shared_hbm)\n"
        "    x, y = nl.load(x_hbm), nl.load(y_hbm)\n",
        "    nl.store(out_hbm, r)\n    return out_hbm\n",
    ),
    "nki": (
        "import math\nimport numpy as np\nimport torch\nimport nki\n"
        "import nki.isa as nisa\nimport nki.language as nl\n\n\n"
        "@nki.jit\ndef kernel(x_hbm, y_hbm):\n"
        "    out_hbm = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.shared_hbm)\n"
        "    x = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.sbuf)\n"
        "    y = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.sbuf)\n"
        "    r = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.sbuf)\n"
        "    nisa.dma_copy(dst=x, src=x_hbm)\n    nisa.dma_copy(dst=y, src=y_hbm)\n",
        "    nisa.dma_copy(dst=out_hbm, src=r)\n    return out_hbm\n",
    ),
}

OLD = {
    "ndarray without a buffer, then a store": (
        "r = x\no = nl.ndarray((128, 64), nl.float32)\nnl.store(o, x)",
        r"shared_hbm",
    ),
    "nc_matmul as a @ b": ("r = nisa.nc_matmul(x, y[0:64, 0:64])", r"transpose|nl\.matmul"),
    "where of indices": (
        "i, j = nl.mgrid[0:128, 0:64]\nr = nl.where(i >= j, x, -1e30)",
        r"affine_select",
    ),
    "python where of indices": (
        "i, j = nl.mgrid[0:128, 0:64]\nx[j > i] = -1e30\nr = x",
        r"affine_select",
    ),
    "torch.exp": ("r = torch.exp(x)", r"nl\.exp"),
    "np.exp": ("r = np.exp(x)", r"nl\.exp"),
    "math.exp": ("r = math.exp(x)", r"nl\.exp"),
    "math.sqrt": ("r = math.sqrt(x)", r"functions of nl"),
    "a @ b": ("r = x @ y", r"nl\.matmul"),
    "tile.T": ("r = x.T", r"nl\.transpose"),
    "tile.sum()": ("r = x - x.sum(axis=1)", r"nl\.sum"),
    "tile.max": ("r = x - x.max(1)", r"nl\.max"),
    "F.softmax": ("r = torch.nn.functional.softmax(x, dim=-1)", r"nl\.softmax"),
    "F.relu": ("r = torch.relu(x)", r"nl\.relu"),
    "np.maximum": ("r = np.maximum(x, 0)", r"nl\.maximum"),
    "python max": ("r = max(x, y)", r"nl\.maximum|nl\.where"),
    "python abs": ("r = abs(x)", r"nl\.abs"),
    "python sum": ("r = sum(x)", r"nl\.sum"),
    "if on a tile": ("r = x if x > 0 else y", r"nl\.where"),
    "if on an element": ("if x[0, 0] > 0:\n    r = x\nelse:\n    r = y", r"nl\.where"),
    "while on a tile": ("while x > 1:\n    x = x / 2\nr = x", r"nl\.where|sequential_range"),
    "and of tiles": ("r = nl.where((x > 0) and (y > 0), x, y)", r"nl\.logical_and|&"),
    "chained comparison": ("r = nl.where(0 < x < 1, x, y)", r"nl\.logical_and|&"),
    "float of an element": ("r = x * float(y[0, 0])", r"functions of nl"),
    "int of an element": ("r = x[:, 0 : int(y[0, 0])]", r"as arguments"),
    "item": ("r = x * y.item()", r"device_print"),
    "print of a tile's value": ("print(x[0, 0].item())\nr = x", r"device_print"),
    "numpy of a tile": ("r = np.array(x)", r"NKI_CPU_EAGER|nl\.load"),
    "for over a tile": ("r = x\nfor row in x:\n    r = row", r"range|shape"),
    "len of a tile": ("r = x * len(x)", r"shape\[0\]"),
    "no load": ("r = nl.exp(x_hbm)", r"nl\.load"),
    "add of arguments": ("r = x_hbm + y_hbm", r"nl\.load"),
    "assigns to HBM": ("out_hbm[:, :] = x\nr = x", r"nl\.store"),
    "256 partitions": (
        "r = nl.zeros((256, 64), nl.float32, buffer=nl.sbuf)",
        r"tile the partition axis",
    ),
    "load of 256 rows": (
        "r = nl.load(nl.ndarray((256, 64), nl.float32, buffer=nl.shared_hbm))",
        r"load 128 rows at a time",
    ),
    "PSUM too wide": (
        "r = nl.zeros((128, 4096), nl.float32, buffer=nl.psum)",
        r"split the free axis into blocks",
    ),
    "contraction too long": (
        "r = nisa.nc_matmul(nl.zeros((128, 256), nl.float32, buffer=nl.sbuf), y)",
        r"tile the free axis",
    ),
    "moving too wide": (
        "r = nisa.nc_matmul(x, nl.zeros((128, 1024), nl.float32, buffer=nl.sbuf))",
        r"tile the free axis",
    ),
    "shapes differ": (
        "r = x + nl.zeros((128, 32), nl.float32, buffer=nl.sbuf)",
        r"slice them alike",
    ),
    "row broadcast along partitions": (
        "g = nl.load(y_hbm[0:1, 0:64])\nr = x * g",
        r"broadcast_to|partition",
    ),
    "reduction over partitions": ("r = x - nl.sum(x, axis=0)", r"nc_matmul|transpose|ones"),
    "out of bounds": ("r = nl.load(x_hbm[0:128, 0:80])", r"mask the elements outside"),
    "ceil tiles without a mask": (
        "i, j = nl.mgrid[0:128, 0:64]\nr = nl.load(x_hbm[64 + i, j])",
        r"mask",
    ),
    "wrong dst shape": ("r = x[:, 0:32]", r"slice both sides alike"),
    "nothing stored": ("return out_hbm\nr = x", r"store to it"),
    "returns a tile": ("return x\nr = x", r"store the result into one and return that"),
    "returns nothing": ("nl.store(out_hbm, x)\nreturn\nr = x", r"return"),
    "private_hbm result": (
        "o = nl.ndarray((128, 64), nl.float32, buffer=nl.hbm)\nnl.store(o, x)\nreturn o\nr = x",
        r"shared_hbm",
    ),
    "float64": ("r = nl.zeros((128, 64), nl.float64, buffer=nl.sbuf)", r"nl\.float32"),
    "np.float64": ("r = nl.zeros((128, 64), np.float64, buffer=nl.sbuf)", r"such as float32"),
    "string dtype": (
        "r = nl.zeros((128, 64), 'float23', buffer=nl.sbuf)",
        r"use nl\.float32 or another name",
    ),
    "nl.clamp": ("r = nl.clamp(x, 0, 1)", r"nl\.minimum"),
    "nl.dot": ("r = nl.dot(x, y)", r"nl\.matmul"),
    "nl.empty": ("r = nl.empty((128, 64), nl.float32)", r"nl\.ndarray"),
    "nl.cat": ("r = nl.cat([x, y])", r"slice"),
    "nl.tril": ("r = nl.tril(x)", r"affine_select"),
    "nl.pow": ("r = nl.pow(x, 2)", r"nl\.power"),
    "nl.syncthreads": ("nl.syncthreads()\nr = x", r"wait"),
    "typo": ("r = nl.expp(x)", r"nl\.exp\b"),
    "wrong keyword": ("r = nl.sum(x, dim=1)", r"axis"),
    "keepdim of torch": ("r = x - nl.sum(x, axis=1, keepdim=True)", r"keepdims"),
    "argument missing": ("r = nl.sum(x)", r"axis"),
    "engine as an op": ("r = nisa.activation(nl.add, x)", r"nisa\.tensor_tensor for two tiles"),
    "positional order of activation": ("r = nisa.activation(x, nl.exp)", r"op="),
    "affine_range carries a sum": (
        "r = nl.zeros((128, 64), nl.float32, buffer=nl.sbuf)\n"
        "for k in nl.affine_range(4):\n"
        "    r[...] = r * 0.5 + x",
        r"sequential_range",
    ),
    "range over columns races": (
        "r = nl.ndarray((128, 64), nl.float32, buffer=nl.sbuf)\n"
        "for k in nl.affine_range(2):\n"
        "    r[:, 0:64] = x",
        r"sequential_range|slice|iteration",
    ),
    "read before write": ("r = nl.ndarray((128, 64), nl.float32, buffer=nl.sbuf)", r"memset"),
    "tile of a loop used after it": (
        "for k in nl.affine_range(2):\n    t = nl.load(x_hbm)\nr = t",
        r"before the loop|outside|allocate",
    ),
    "nested list index": ("r = x[[0, 1, 2]]", r"one slice at a time"),
    "boolean index": ("r = x[x > 0]", r"nl\.where"),
    "negative step": ("r = x[:, ::-1]", r"63 - nl\.arange\(64\)\[None, :\]"),
    "None index": ("r = x[:, None, :]", r"reshape|expand_dims|broadcast"),
    "index without arange axes": (
        "i = nl.arange(128)\nr = nl.load(x_hbm[i, 0:64])",
        r"\[:, None\]",
    ),
    "store into a slice of another shape": (
        "nl.store(out_hbm[0:64], x)\nr = x",
        r"slice both sides alike",
    ),
    "program_id without a grid": (
        "r = nl.load(x_hbm[nl.program_id(0) * 128 + nl.arange(128)[:, None], "
        "nl.arange(64)[None, :]])",
        r"grid|kernel\[",
    ),
    "unknown module function": ("r = nl.softmax_stable(x, axis=-1)", r"nl\.softmax"),
    "nisa.exp": ("r = nisa.exp(x)", r"nisa\.activation"),
    "nisa.matmul": ("r = nisa.matmul(x, y)", r"nc_matmul"),
    "stationary in PSUM": (
        "p = nisa.nc_matmul(x, y)\nr = nisa.nc_matmul(p, p)",
        r"nl\.copy|tensor_copy|SBUF|sbuf",
    ),
    "in place on a load": ("x += 1\nr = x[0]", r"slice both sides alike"),
    "name of the other language": (
        "r = nl.ndarray((128, 64), nl.float32, buffer=nl.sbuf)\n"
        "nisa.activation(dst=r, op=nl.exp, data=x)",
        r"assign it to a name",
    ),
    "F.pad": ("r = torch.nn.functional.pad(x, (0, 1))", r"slices"),
    "tile.reshape(-1)": ("r = x.reshape(-1)", r"nc_transpose"),
    "tile.permute": ("r = x.permute(1, 0)", r"nl\.transpose"),
    "tile.to": ("r = x.to(nl.bfloat16)", r"nl\.copy"),
    "tile.half": ("r = x.half()", r"nl\.copy"),
    "bf16 as a string": ("r = x.astype('bf16')", r"use nl\.bfloat16"),
    "mean without an axis": ("r = x - nl.mean(x)", r"axis"),
    "sum over both axes": ("r = x - nl.sum(x, axis=(0, 1), keepdims=True)", r"ones|transpose"),
    "zeros without a type": ("r = nl.zeros(128)", r"dtype"),
    "full without a type": ("r = nl.full((128, 64), 1.0)", r"dtype"),
    "nl.concatenate": ("r = nl.concatenate([x, y], axis=1)", r"slice"),
    "nl.split": ("r = nl.split(x, 2)", r"slices"),
    "nl.einsum": ("r = nl.einsum('ij,jk->ik', x, y)", r"nl\.matmul"),
    "nl.gelu_tanh": ("r = nl.gelu_tanh(x)", r"gelu_apprx_tanh"),
    "nl.swish": ("r = nl.swish(x)", r"nl\.silu"),
    "nl.argmax": ("r = nl.argmax(x, axis=1)", r"nc_find_index8"),
    "nl.cumsum": ("r = nl.cumsum(x)", r"tensor_tensor_scan"),
    "matmul of equal shapes": ("r = nl.matmul(x, y)", r"transpose x first"),
    "load of a number": ("r = nl.load(3)", r"memset"),
    "load of a tile": ("r = nl.load(x)", r"nl\.copy"),
    "store with swapped arguments": ("nl.store(x, out_hbm)\nr = x", r"shared_hbm"),
    "store of one argument": ("nl.store(x)\nr = x", r"a tensor in HBM and the tile"),
    "store to an argument": ("nl.store(x_hbm, x)\nr = x", r"shared_hbm"),
    "size as a method": ("r = x * x.size(0)", r"shape\[0\]"),
    "range of a tile": ("r = x\nfor i in range(x):\n    pass", r"as arguments"),
    "trip count of /": ("for i in nl.affine_range(128 / 64):\n    r = x\nr = x", r"//"),
    "floor division": ("r = x // 2", r"nl\.floor"),
    "modulo": ("r = x % 2", r"nl\.mod"),
    "lambda as an op": ("r = nisa.activation(op=lambda v: v, data=x)", r"op=nl\.add"),
    "assert of a tile": ("assert x > 0\nr = x", r"nl\.where"),
    "three subscripts": ("r = x[0, 0, 0]", r"reshape|expand_dims"),
    "slice bound of /": ("r = x[:, 0 : 64 / 2]", r"//"),
    "name as a subscript": ("r = x['a']", r"slice"),
    "unknown buffer": ("r = nl.zeros((128, 64), nl.float32, buffer='sram')", r"nl\.sbuf"),
    "nl.int64": ("r = nl.zeros((128, 64), nl.int64, buffer=nl.psum)", r"nl\.int32"),
    "shape of -1": ("r = nl.zeros((128, -1), nl.float32)", r"from input shapes"),
    "shape of /": ("r = nl.zeros((128, 64 / 2), nl.float32)", r"//"),
    "softmax with dim": ("r = nl.softmax(x, dim=-1)", r"axis="),
    "numpy operand": ("r = x + np.ones((128, 64))", r"nl\.load"),
    "torch operand": ("r = x + torch.ones(128, 64)", r"nl\.load"),
    "nl.print": ("nl.print(x)\nr = x", r"device_print"),
    "first row alone": ("r = x[0]", r"slice both sides"),
    # what comes from Triton, CUDA and PyTorch
    "pointer and offsets": (
        "r = nl.load(x_hbm + nl.arange(64)[None, :])",
        r"tensor\[rows, columns\]",
    ),
    "load with other": ("r = nl.load(x_hbm, other=0.0)", r"nl\.full first"),
    "load with num_warps": ("r = nl.load(x_hbm, num_warps=4)", r"no threads"),
    "nl.shared": ("r = nl.ndarray((128, 64), nl.float32, buffer=nl.shared)", r"buffer=nl\.sbuf"),
    "nl.shfl_down": ("r = nl.shfl_down(x, 1)", r"nc_stream_shuffle"),
    "nl.threadIdx": ("r = x * nl.threadIdx.x", r"nl\.program_id"),
    "nl.atomic_add": ("nl.atomic_add(out_hbm, x)\nr = x", r"nl\.atomic_rmw"),
    "nl.cdiv": ("r = x * nl.cdiv(128, 64)", r"-\(-n // d\)"),
    "trans_a": ("r = nl.matmul(x, y, trans_a=True)", r"transpose_x="),
    "tile.float": ("r = x.float()", r"nl\.copy\(x, dtype=nl\.float32\)"),
    "tile.view": ("r = x.view(64, 128)", r"reshape\(shape\)"),
    "tile.masked_fill": ("r = x.masked_fill(x > 0, -1e9)", r"nl\.where"),
    "torch.cat": ("r = torch.cat([x, y], dim=1)", r"written into a slice"),
    "F.layer_norm": ("r = torch.nn.functional.layer_norm(x, (64,))", r"bn_stats"),
    "max of two tiles": ("r = nl.max(x, y)", r"two tiles to nl\.maximum"),
    "axis by name": ("r = x - nl.sum(x, axis='free')", r"axis=1"),
    "copy into a tile": ("r = nl.zeros((128, 64), nl.float32)\nnl.copy(r, x)", r"by its name"),
    "result of numpy": ("nl.store(np.zeros((128, 64)), x)\nr = x", r"buffer=nl\.shared_hbm"),
    "result of torch": ("nl.store(torch.empty(128, 64), x)\nr = x", r"buffer=nl\.shared_hbm"),
    "index of numpy": ("r = x[np.arange(128)]", r"one slice at a time"),
    "operator after its number": ("r = nisa.tensor_scalar(x, 2.0, np.multiply)", r"op0=nl\.add"),
    "memset of a tile": ("r = nisa.memset(x, 0)", r"add dtype="),
    "nki.exp": ("r = nki.exp(x)", r"use nl\.exp"),
    "nki.softmax": ("r = nki.softmax(x, axis=-1)", r"use nl\.softmax"),
    "format of a tile": ("print(f'{x:.2f}')\nr = x", r"device_print"),
    "sizes of int8 and fp32": (
        "r = nl.matmul(nl.copy(x, dtype=nl.int8), y, transpose_x=True)",
        r"cast one operand",
    ),
}

NEW = {
    "a @ b": ("r = x @ y", r"nc_matmul"),
    "torch.exp": ("r = torch.exp(x)", r"nl\.exp"),
    "nl.clamp": ("r = nl.clamp(x, 0, 1)", r"nl\.minimum"),
    "nl.arange": ("i = nl.arange(128)\nr = x", r"nl\.ds|slices"),
    "mgrid": ("i, j = nl.mgrid[0:128, 0:64]\nr = x", r"nl\.ds|slices"),
    "no dst": ("r = nisa.activation(op=nl.exp, data=x)", r"dst"),
    "nc_matmul returns": ("r = nisa.nc_matmul(x, y)", r"dst="),
    "matmul into SBUF": (
        "nisa.nc_matmul(dst=r[0:64, 0:64], stationary=x, moving=y)",
        r"buffer=nl\.psum, and copy it from there",
    ),
    "grid of a former language": ("r = x[nl.program_id(0)]", r"slice both sides alike"),
    "tile.T": ("r = x.T", r"nc_transpose"),
    "tile.sum": ("r = x.sum()", r"nl\.sum"),
    "if on a tile": ("if x > 0:\n    r = x", r"nl\.where"),
    "len": ("r = x * len(x)", r"shape\[0\]"),
    "256 partitions": (
        "r = nl.ndarray((256, 64), dtype=nl.float32, buffer=nl.sbuf)",
        r"tile the partition axis",
    ),
    "reads HBM": ("nisa.activation(dst=r, op=nl.exp, data=x_hbm)", r"nl\.load first"),
    "copies between HBM and PSUM": (
        "p = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.psum)\n"
        "nisa.dma_copy(dst=p, src=x_hbm)",
        r"buffer=nl\.sbuf, and copy it from there",
    ),
    "shape mismatch": (
        "nisa.tensor_tensor(dst=r, data1=x, data2=y[:, 0:32], op=nl.add)",
        r"slice both alike, nothing is broadcast",
    ),
    "op as a string": ("nisa.tensor_tensor(dst=r, data1=x, data2=y, op='add')", r"nl\.add"),
    "out of bounds": ("nisa.dma_copy(dst=r, src=x_hbm[0:128, 32:96])", r"min\(\)"),
    "returns a tile": ("nisa.tensor_copy(dst=r, src=x)\nreturn r", r"store the result into one"),
    "par_dim": (
        "r = nl.ndarray((nl.par_dim(128), 64), dtype=nl.float32, buffer=nl.sbuf)",
        r"partition",
    ),
    "math.exp": ("r = math.exp(x)", r"nl\.exp"),
    "np.mean": ("r = np.mean(x)", r"nl\.mean"),
    "read before write": ("pass", r"nisa\.memset"),
    "float64": ("r = nl.ndarray((128, 64), dtype=nl.float64, buffer=nl.sbuf)", r"nl\.float32"),
    "slice assignment": ("r[:, :] = x", r"tensor_copy"),
    "memset of a name": ("nl.memset(r, 0)", r"nisa\.memset"),
    "add": ("r = x + y", r"tensor_tensor"),
    "part of a copy": ("nisa.dma_copy(dst=r[0:64], src=x_hbm)", r"slice both sides"),
    "tensor_tensor without op": ("nisa.tensor_tensor(dst=r, data1=x, data2=y)", r"add op="),
    "activation without op": ("nisa.activation(dst=r, data=x)", r"add op="),
    "tensor_scalar without a number": (
        "nisa.tensor_scalar(dst=r, data=x, op0=nl.multiply)",
        r"add operand0=",
    ),
    "nc_transpose returns": ("r = nisa.nc_transpose(x)", r"dst="),
    "mask": ("nisa.dma_copy(dst=r, src=x_hbm, mask=None)", r"slices of both"),
    "reduction into a whole tile": (
        "nisa.tensor_reduce(dst=r, data=x, op=nl.add, axis=1)",
        r"dst of 128 partitions with 1",
    ),
    "reduction over partitions": (
        "m = nl.ndarray((128, 1), dtype=nl.float32, buffer=nl.sbuf)\n"
        "nisa.tensor_reduce(dst=m, data=x, op=nl.add, axis=0)",
        r"ones|transpose",
    ),
    "number of an element": ("print(float(x[0, 0]))", r"register_load"),
    "isa typo": ("nisa.tensor_copyy(dst=r, src=x)", r"nisa\.tensor_copy"),
    "reshape of partitions": ("r = x.reshape((64, 128))", r"nc_transpose"),
    "comparison": ("r = nl.where(x > 0, x, y)", r"nl\.greater"),
    "list of tiles": ("r = [x, y]", r"tensors one by one"),
    "returns nothing": ("return", r"return the outputs"),
    "number as a source": ("nisa.dma_copy(dst=r, src=1.0)", r"nisa\.memset"),
    "tile before op": ("nisa.activation(r, x, nl.exp)", r"op=nl\.exp and data=tile"),
    "shape without a tuple": ("r = nl.ndarray(128, 64)", r"the shape as one tuple"),
    "type as a string": (
        "r = nl.ndarray((128, 64), dtype='bf16', buffer=nl.sbuf)",
        r"nl\.bfloat16",
    ),
    "memset of HBM": ("nisa.memset(out_hbm, value=0)", r"buffer=nl\.sbuf, and copy"),
    "activation of add": ("nisa.activation(dst=r, op=nl.add, data=x)", r"nisa\.tensor_tensor"),
    "np.max as an op": (
        "nisa.tensor_reduce(dst=r[:, 0:1], data=x, op=np.max, axis=1)",
        r"write nl\.maximum",
    ),
    "negative step": ("r = x[:, ::-1]", r"\.ap of stride -1"),
    "None as a dst": ("nisa.dma_copy(dst=None, src=x)", r"tensors one by one"),
    "nki.exp": ("r = nki.exp(x)", r"use nl\.exp"),
    "astype": ("r = x.astype(nl.bfloat16)", r"nisa\.tensor_copy\(dst, src\)"),
    "tile as a scalar": (
        "nisa.tensor_scalar(dst=r, data=x, op0=nl.multiply, operand0=y)",
        r"tensor_tensor",
    ),
}


# What a cell or script calls a right kernel(x_hbm, y_hbm) with; `o` is an array (128, 64) of fp32.
CALLS = {
    "no arguments": ("kernel()", r"kernel\(x_hbm, y_hbm\)|without arguments"),
    "one too few": ("kernel(o)", r"kernel\(x_hbm, y_hbm\)"),
    "one too many": ("kernel(o, o, o)", r"kernel\(x_hbm, y_hbm\)"),
    "unknown keyword": ("kernel(o, y=o)", r"kernel\(x_hbm, y_hbm\)"),
    "float64": ("kernel(o, o.astype(np.float64))", r"argument y_hbm: .*32 bits or fewer"),
    "int64": ("kernel(torch.zeros(128, 64).long(), o)", r"argument x_hbm: .*32 bits or fewer"),
    "list of numbers": ("kernel(o.tolist(), o)", r"numpy array"),
    "no elements": ("kernel(o[0:0], o)", r"elements|slice both sides"),
    "grid of a function": (
        "kernel[lambda meta: (1,)](o, o)",
        r"instances have no threads|loop inside",
    ),
    "grid of blocks and threads": ("kernel[(8,), (128,)](o, o)", r"no threads|loop inside"),
    "grid of nothing": ("kernel[0](o, o)", r"positive integers|loop inside"),
    "fraction of a grid": ("kernel[1.5](o, o)", r"positive integers|loop inside"),
    "package's function": ("nki.exp(o)", r"use nl\.exp"),
    "package's decorator": ("nki.kernel(kernel)", r"@nki\.jit"),
    "outside of a kernel": ("nl.exp(o)", r"move the call into the kernel"),
    "load outside of a kernel": ("nl.load(o)", r"move the call into the kernel"),
    "num_warps": ("kernel(o, o, num_warps=4)", r"kernel\(x_hbm, y_hbm\)"),
    "complex": ("kernel(o, y_hbm=o.astype(np.complex64))", r"argument y_hbm: .*32 bits or fewer"),
}
